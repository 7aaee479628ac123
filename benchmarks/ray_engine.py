"""The ray engine: what it costs above the local one, what passes through its driver, how long new weights take.

Run as `make bench-ray`, or with the interpreter that has Ray: `python benchmarks/ray_engine.py [overhead|traffic|sync]
[--quick] [--sampler vllm]`. Results go to `ray_latest.json`; `--quick` checks that it runs, with numbers that mean
nothing. No GPU is needed; none is used.

overhead: whole GRPO steps of one policy, one trainer and one sampler, against the same policy on the local engine.
Steps alternate between the two in one run, each with one thread; the first of each is discarded, medians are compared.
The sampler is `ray.sampler: transformers`, so that both sample by the same code. Whole weights on a CPU, which the
local engine has, let a group's rows share their prompt's pass in training; sharded ones and GPUs do not. That is
switched off here, so that both compute the same. With one policy nothing runs beside anything: what two policies gain
by working at the same time is not counted.

traffic: the bytes of what the driver sends and gets in such a step, as Ray serializes them, and from them those of a
step of the paper's size, by arithmetic.

sync: seconds of a weight sync from two trainers to a sampler by each way, against the size of the model.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging as transformers_logging

from common import HERE, Setting, coin, machine, one_thread, prompt_texts, save_model
from graftrl.config import Recipe, parse_recipe
from graftrl.engines.local import LocalEngine
from graftrl.methods import StepContext
from graftrl.policies.sampling import Sampled
from graftrl.rollout import Prompt, Row
from graftrl.training.run_folder import write_text

TARGET = 1.15  # of a step's seconds over the local engine's, where a step takes seconds

LAB = Setting("lab", vocabulary=300, prompts=32, group=8, new_tokens=16, microbatch_rows=64)
MIDDLE = Setting(
    "middle", vocabulary=8000, prompts=8, group=8, new_tokens=64, microbatch_rows=16,
    hidden=512, layers=8, heads=8, kv_heads=4, feed_forward=1408,
)  # fmt: skip
LARGE = replace(MIDDLE, name="large", hidden=768, layers=12, heads=12, feed_forward=3072, vocabulary=32_000)
QUICK = replace(LAB, name="quick", prompts=4, group=4, new_tokens=4)

# A step of the GRAFT paper: prompts, responses a prompt; mean tokens of each as `graftrl plan` assumes them.
PAPER = {"prompts": 128, "group": 8, "prompt_tokens": 256, "response_tokens": 1024}


def recipe(setting: Setting, folder: Path, engine: str, **ray: Any) -> Recipe:
    longest = setting.longest_prompt + setting.new_tokens
    content = {
        "name": "bench", "seed": 0, "threads": 1, "engine": engine,
        "method": {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28},
        "models": {"m": {"path": str(folder), "bos": "keep", "device": "cpu",
                         "microbatch_tokens": setting.microbatch_rows * longest}},
        "ray": ray,
        "task": {"kind": "hidden_programs"},
        "sampling": {"max_prompt_tokens": setting.longest_prompt, "max_response_tokens": setting.new_tokens},
        "training": {"steps": 1, "prompts_per_step": setting.prompts, "group_size": setting.group,
                     "minibatch_prompts": setting.prompts},
    }  # fmt: skip
    return parse_recipe(content, "benchmark")


class Side:
    """An engine, stepped by hand the way the training loop does. seen: what the last step passed about."""

    def __init__(self, setting: Setting, asked: Recipe) -> None:
        from graftrl.engines.open import open_engine

        self.setting, self.engine = setting, open_engine(asked)
        if isinstance(self.engine, LocalEngine):
            self.engine.policies["m"].passes.longest_shared = 0
        self.method = asked.build_method()
        self.seconds: list[dict[str, float]] = []
        self.seen: dict[str, Any] = {}

    def step(self, texts: Sequence[str], seed: int) -> None:
        setting, engine = self.setting, self.engine
        prompts = [Prompt(f"{seed}/{i}", ({"role": "user", "content": t},), "", "t") for i, t in enumerate(texts)]
        start = time.perf_counter()
        groups = engine.sample({"m": prompts}, setting.group, {"m": seed})["m"]
        sampled = time.perf_counter()
        for group in groups:
            for response in group.responses:
                response.reward = coin(response.text)
        context = StepContext(seed, seed, setting.group, setting.new_tokens, engine.codecs, lambda _, rows: [])
        rows = self.method.exchange({"m": groups}, context).rows["m"]
        minibatches = self.method.order(rows, len(prompts), np.random.default_rng(seed))
        ordered = time.perf_counter()
        stats = engine.update({"m": minibatches}, self.method.objective)["m"]
        end = time.perf_counter()
        if stats.optimizer_steps != 1:
            raise RuntimeError(f"{stats.optimizer_steps} optimizer steps instead of one")
        times = getattr(engine, "sync_times", {}).get("m")
        self.seconds.append(
            {
                "sampling": sampled - start,
                "of it weight sync": times.seconds if times is not None else 0.0,
                "grading and rows": ordered - sampled,
                "training": end - ordered,
                "step": end - start,
                "tokens": float(sum(len(r.token_ids) for group in groups for r in group.responses)),
            }
        )
        self.seen = {"prompts": prompts, "groups": groups, "minibatches": minibatches, "stats": stats}


def medians(seconds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each phase, without the first step: there Ray's sampler has the first weights already."""
    return {phase: statistics.median(step[phase] for step in seconds[1:]) for phase in seconds[0]}


def overhead(setting: Setting, steps: int, sampler: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Seconds of steps on both engines, and what the last one on Ray passed through its driver."""
    one_thread()
    with tempfile.TemporaryDirectory() as folder:
        save_model(setting, Path(folder))
        local = Side(setting, recipe(setting, Path(folder), "local"))
        ray = Side(setting, recipe(setting, Path(folder), "ray", sampler=sampler))
        try:
            texts = prompt_texts(setting, steps + 1)
            for number in range(steps + 1):
                of_step = texts[number * setting.prompts : (number + 1) * setting.prompts]
                for side in (local, ray) if number % 2 else (ray, local):
                    side.step(of_step, number)
            seen = traffic(ray)
            assert isinstance(local.engine, LocalEngine)
            parameters = sum(p.numel() for p in local.engine.policies["m"].loaded.causal_lm.parameters())
        finally:
            ray.engine.close()
    ours, theirs = medians(ray.seconds), medians(local.seconds)
    ratios = [a["step"] / b["step"] for a, b in zip(ray.seconds[1:], local.seconds[1:], strict=True)]
    return {
        "parameters": parameters,
        "rows": setting.rows,
        "steps": steps,
        "ray_over_local": ours["step"] / theirs["step"],
        "of_single_steps": ratios,
        "ray": ours,
        "local": theirs,
    }, seen


# Traffic --------------------------------------------------------------------------------------------------------------


def wire(thing: Any) -> int:
    """Bytes as Ray serializes it: a pickle, and arrays beside it."""
    from ray import cloudpickle

    beside: list[Any] = []
    return len(cloudpickle.dumps(thing, protocol=5, buffer_callback=beside.append)) + sum(
        b.raw().nbytes for b in beside
    )


def messages(
    ids: Sequence[Any], drawn: Sequence[Sequence[Sampled]], rows: Sequence[Sequence[Row]], rest: Sequence[Any]
) -> dict[str, int]:
    return {
        "prompts to samplers": wire((list(ids), list(range(len(ids))))),
        "responses from samplers": wire([list(of_prompt) for of_prompt in drawn]),
        "rows to trainers": wire([list(minibatch) for minibatch in rows]),
        "the rest": sum(wire(one) for one in rest),
    }


def traffic(side: Side) -> dict[str, Any]:
    """Of the side's last step, and of one of the paper's size: each message grows linearly in its tokens, so that two
    lengths give bytes a row and bytes a token."""
    codec, seen = side.engine.codecs["m"], side.seen
    ids = [codec.prompt_token_ids(prompt) for prompt in seen["prompts"]]
    drawn = [[_sampled(r.token_ids, r.logprobs) for r in group.responses] for group in seen["groups"]]
    rest = [side.method.objective, seen["stats"]]
    measured = messages(ids, drawn, seen["minibatches"], rest)
    tokens = sum(len(one.token_ids) for of_prompt in drawn for one in of_prompt)
    paper = dict.fromkeys(measured, 0)
    row = next(row for minibatch in seen["minibatches"] for row in minibatch)
    per: dict[str, dict[str, float]] = {}
    lengths, count = (256, 1280), 64
    of_length = {}
    for length in lengths:
        prompt, response = np.arange(length), np.arange(length)
        values = np.zeros(length, np.float32)
        rows = [
            replace(row, prompt_token_ids=prompt.copy(), response_token_ids=response.copy(), old_logprobs=values.copy())
            for _ in range(count)
        ]
        of_length[length] = messages(
            [prompt.copy() for _ in range(count)],
            [[_sampled(response.copy(), values.copy())] for _ in range(count)],
            [rows],
            rest,
        )
    short, long = (of_length[length] for length in lengths)
    responses = PAPER["prompts"] * PAPER["group"]
    for name in measured:
        if name == "the rest":
            paper[name] = measured[name]
            continue
        each = (long[name] - short[name]) / count / (lengths[1] - lengths[0])
        fixed = short[name] / count - each * lengths[0]
        per[name] = {"bytes_a_token": each, "bytes_a_row": fixed}
        if name == "prompts to samplers":
            paper[name] = round(PAPER["prompts"] * (fixed + each * PAPER["prompt_tokens"]))
        elif name == "responses from samplers":
            paper[name] = round(responses * (fixed + each * PAPER["response_tokens"]))
        else:  # the lengths above were of prompt and response alike; a prompt's token has no log-probability
            both = PAPER["response_tokens"] + PAPER["prompt_tokens"] * 8 / each
            paper[name] = round(responses * (fixed + each * both))
    return {
        "bytes": measured,
        "bytes_in_all": sum(measured.values()),
        "sampled_tokens": tokens,
        "bytes_a_sampled_token": sum(measured.values()) / tokens,
        "linear": per,
        "paper": {**PAPER, "bytes": paper, "bytes_in_all": sum(paper.values())},
    }


def _sampled(token_ids: Any, logprobs: Any) -> Sampled:
    return Sampled(token_ids, logprobs, stopped=False)


# Weight sync ----------------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "host": {"weight_sync": "host", "resources": {"m": {"trainers": 2}}},
    "broadcast": {"weight_sync": "direct", "resources": {"m": {"trainers": 2}}},
    "handover": {"weight_sync": "direct", "resources": {"m": {"trainers": 2, "devices": "shared"}}},
}


def sync(setting: Setting, way: str, times: int, sampler: str) -> dict[str, Any]:
    """Medians of a few syncs after a first one, in which links are opened."""
    from graftrl.engines.ray.engine import RayEngine

    with tempfile.TemporaryDirectory() as folder:
        save_model(setting, Path(folder))
        engine = RayEngine(recipe(setting, Path(folder), "ray", sampler=sampler, **WAYS[way]))
        try:
            found = []
            prompts = [Prompt("p", ({"role": "user", "content": "0123456789"},), "", "t")]
            for _ in range(times + 1):
                engine._workers["m"].stale = engine._workers["m"].unchecked = True
                engine._sync({"m": [engine.codecs["m"].prompt_token_ids(prompts[0])]})
                found.append(asdict(engine.sync_times["m"]))
        finally:
            engine.close()
    return {key: statistics.median(one[key] for one in found[1:]) for key in found[0]}


# All ------------------------------------------------------------------------------------------------------------------


def measure(parts: Sequence[str], *, quick: bool, sampler: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    sizes = [(QUICK, 2)] if quick else [(LAB, 10), (MIDDLE, 6)]
    if {"overhead", "traffic"} & {*parts}:
        for setting, steps in sizes:
            of_steps, of_driver = overhead(setting, steps, sampler)
            found.setdefault("overhead", {})[setting.name] = of_steps
            found.setdefault("traffic", {})[setting.name] = of_driver
            ratio, seconds = of_steps["ray_over_local"], of_steps["local"]["step"]
            print(f"{setting.name}: {ratio:.3f} of the local engine's {seconds:.2f} s")
    if "sync" in parts:
        for setting in [QUICK] if quick else [LAB, MIDDLE, LARGE]:
            for way in WAYS:
                of_way = sync(setting, way, 1 if quick else 5, sampler)
                found.setdefault("sync", {}).setdefault(setting.name, {})[way] = of_way
                print(f"{setting.name} by {way}: {of_way['seconds']:.3f} s for {of_way['bytes'] / 1e6:.1f} MB")
    return found


def table(found: dict[str, Any]) -> str:
    """What the guide shows."""
    lines = []
    if "overhead" in found:
        lines += [
            "| step of one policy | local, s | ray, s | ratio | of it weight sync, s |",
            "|---|---:|---:|---:|---:|",
        ]
        for name, of in found["overhead"].items():
            ours, theirs = of["ray"], of["local"]["step"]
            lines.append(
                f"| {name}: {of['parameters'] / 1e6:.1f} M parameters, {of['rows']} responses | {theirs:.2f} "
                f"| {ours['step']:.2f} | {of['ray_over_local']:.2f} | {ours['of it weight sync']:.2f} |"
            )
        lines += [
            "",
            "| through the driver | bytes a token | bytes a row | step of the paper's size, MB |",
            "|---|---:|---:|---:|",
        ]
        last = [*found["traffic"].values()][-1]
        for name, size in last["paper"]["bytes"].items():
            of = last["linear"].get(name)
            per = f"{of['bytes_a_token']:.1f} | {of['bytes_a_row']:.0f}" if of else "| "
            lines.append(f"| {name} | {per} | {size / 1e6:.1f} |")
        lines.append("")
    if "sync" in found:
        lines += ["| weights | way | gather, s | transport, s | load, s | all, s |", "|---:|---|---:|---:|---:|---:|"]
        for ways in found["sync"].values():
            lines += [
                f"| {of['bytes'] / 1e6:.1f} MB | {way} | {of['gather_s']:.3f} | {of['transport_s']:.3f} | "
                f"{of['load_s']:.3f} | {of['seconds']:.3f} |"
                for way, of in ways.items()
            ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["overhead", "traffic", "sync", []], default=[])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sampler", choices=["transformers", "vllm"], default="transformers")
    options = parser.parse_args()
    if importlib.util.find_spec("ray") is None:
        sys.exit(
            "this interpreter has no ray: run make bench-ray, or see docs/how-to/scale.md for an environment with it"
        )
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    started = time.perf_counter()
    found = measure(options.parts or ["overhead", "traffic", "sync"], quick=options.quick, sampler=options.sampler)
    print("\n" + table(found))
    if options.quick:
        return
    of_middle = found.get("overhead", {}).get(MIDDLE.name)
    if of_middle is not None:
        met = of_middle["ray_over_local"] <= TARGET
        print(
            f"\nray_over_local {of_middle['ray_over_local']:.3f}, target <= {TARGET:g}: {'met' if met else 'NOT met'}"
        )
    latest = HERE / "ray_latest.json"
    known = json.loads(latest.read_text()) if latest.exists() else {}
    result = {
        **known,
        **found,
        "target": {"ray_over_local": TARGET, "of": MIDDLE.name},
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds_in_all": time.perf_counter() - started,
        "sampler": options.sampler,
        "machine": machine(("torch", "transformers", "ray", "numpy", "graftrl")),
    }
    write_text(latest, json.dumps(result, indent=1) + "\n")
    print(f"{result['seconds_in_all']:.0f} s in all; written to {latest}")


if __name__ == "__main__":
    main()

"""One GRPO step of ours against one of TRL's GRPOTrainer: time, memory, and first of all the same gradient.

Run as `python benchmarks/step_vs_trl.py [small|wide|memory ...]`. Both sides train the same random Qwen2 model on the
same prompts in float32 with AdamW: sample, grade, one optimizer step. No response ends early: the id that would end it
lies outside the vocabulary, on both sides. TRL generates with transformers (no vLLM), needs no pass for old
log-probabilities (one optimizer step per generation), and runs without logging, checkpointing or gradient
checkpointing.

Time: steps alternate between the two sides in one process with torch's default threads, one a core; the first of each
is discarded, medians are compared. In the small setting each side takes the microbatch that suits it: we 64 rows, TRL
the faster of 256 and 32.

Memory: each side runs in a fresh process. A tiny step comes first, so that the baseline holds weights, gradients and
Adam's states on both sides. The growth is the kernel's high-water mark of resident memory (VmHWM, reset through
/proc/self/clear_refs just before the step) minus resident memory at the reset.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging as transformers_logging

from common import (
    SETTINGS,
    SMALL,
    WIDE,
    Setting,
    coin,
    default_threads,
    gradient_difference,
    in_subprocess,
    peak_resident_bytes,
    prompt_texts,
    reset_peak,
    resident_bytes,
    save_model,
)
from graftrl.methods import StepContext, build_method
from graftrl.policies.config import ModelSettings, OptimizerSettings, SamplingSettings
from graftrl.policies.hf import HFPolicy, UpdateStats
from graftrl.rollout import Prompt, Row

LR, CLIP_LOW, CLIP_HIGH = 1e-4, 0.2, 0.28


# Ours -----------------------------------------------------------------------------------------------------------------


class Ours:
    """A policy and the method GRPO, stepped by hand the way the training loop does."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting = setting
        settings = ModelSettings(
            path=str(folder),
            bos="keep",
            optimizer=OptimizerSettings(lr=LR),
            microbatch_tokens=(64 if setting is SMALL else setting.microbatch_rows)
            * (setting.longest_prompt + setting.new_tokens),
        )
        sampling = SamplingSettings(max_response_tokens=setting.new_tokens)
        self.policy = HFPolicy("m", settings, sampling)
        self.policy.codec.eos_ids = (setting.vocabulary,)  # never drawn
        self.method = build_method({"name": "grpo", "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH})
        self.phases: list[dict[str, float]] = []

    def step(self, texts: list[str], seed: int, group: int | None = None, tokens: int | None = None) -> float:
        """Seconds of one step."""
        prompts = [Prompt(f"{seed}/{i}", ({"role": "user", "content": t},), "", "t") for i, t in enumerate(texts)]
        sampling = None if tokens is None else SamplingSettings(max_response_tokens=tokens)
        start = time.perf_counter()
        groups = self.policy.sample(prompts, group or self.setting.group, seed, sampling)
        sampled = time.perf_counter()
        for g in groups:
            for response in g.responses:
                response.reward = coin(response.text)
        graded = time.perf_counter()
        context = StepContext(
            seed, seed, self.setting.group, self.setting.new_tokens, {"m": self.policy.codec}, lambda _, rows: []
        )
        rows = self.method.exchange({"m": groups}, context).rows["m"]
        minibatches = self.method.order(rows, len(prompts), np.random.default_rng(seed))
        stats = self.policy.update(minibatches, self.method.objective)
        end = time.perf_counter()
        if stats.optimizer_steps != 1:
            raise RuntimeError(f"{stats.optimizer_steps} optimizer steps instead of one")
        self.phases.append({"sampling": sampled - start, "grading": graded - sampled, "training": end - graded})
        return end - start


# TRL ------------------------------------------------------------------------------------------------------------------


def trl_reward(completions: list[str], **_: Any) -> list[float]:
    return [coin(text) for text in completions]


def trl_trainer(
    setting: Setting,
    model: Any,
    tokenizer: Any,
    texts: list[str],
    *,
    steps: int,
    output: Path,
    group: int | None = None,
    microbatch_rows: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    group = group or setting.group
    rows = len(texts) // steps * group
    microbatch_rows = min(microbatch_rows or setting.microbatch_rows, rows)
    config = GRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=microbatch_rows,
        gradient_accumulation_steps=rows // microbatch_rows,
        num_generations=group,
        max_completion_length=setting.new_tokens,
        max_steps=steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        loss_type="dapo",
        num_iterations=1,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        shuffle_dataset=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        generation_kwargs={"eos_token_id": setting.vocabulary},
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=trl_reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        optimizers=(optimizer, None),
    )
    trainer.eos_token_ids = [setting.vocabulary]
    return trainer


class BetweenSteps(TrainerCallback):  # type: ignore[misc]
    """Times whole trainer steps and does something between them that is not counted."""

    def __init__(self, between: Callable[[int], None]) -> None:
        self.between = between
        self.seconds: list[float] = []
        self.cpu: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.between(0)
        self._start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)
        self.cpu.append(time.process_time() - self.cpu_started)
        self.between(state.global_step)
        self._start()

    def _start(self) -> None:
        self.started, self.cpu_started = time.perf_counter(), time.process_time()


def load_for_trl(folder: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


# The same gradient ----------------------------------------------------------------------------------------------------


def check_equality(setting: Setting, folder: Path) -> dict[str, float]:
    """TRL's rollouts through both objectives, with and without shifted old log-probabilities.

    Raises:
        RuntimeError: loss or gradient differ by more than rounding.
    """
    ours = Ours(setting, folder)
    model, tokenizer = load_for_trl(folder)
    texts = prompt_texts(setting, 1)
    with tempfile.TemporaryDirectory() as output:
        trainer = trl_trainer(
            setting, model, tokenizer, texts, steps=1, output=Path(output), microbatch_rows=setting.rows
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.args.steps_per_generation = trainer.args.gradient_accumulation_steps = 1
        inputs = trainer._generate_and_score_completions([{"prompt": t} for t in texts for _ in range(setting.group)])
    rows = [
        Row(
            prompt_id=str(i // setting.group),
            prompt_token_ids=inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].numpy(),
            response_token_ids=inputs["completion_ids"][i].numpy(),
            advantages=float(inputs["advantages"][i]),
            kind="own",
            source="m",
        )
        for i in range(setting.rows)
    ]
    rewards = [coin(text) for text in tokenizer.batch_decode(inputs["completion_ids"], skip_special_tokens=True)]
    groups = torch.tensor(rewards).view(setting.prompts, setting.group)
    from graftrl.objective import group_advantages

    worst: dict[str, float] = {
        # TRL divides by std + 1e-4, we by std + 1e-6; TRL's are used on both sides below.
        "advantage_difference": float((group_advantages(groups).flatten() - inputs["advantages"]).abs().max())
    }
    old = np.stack(ours.policy.score(rows))
    rng = np.random.default_rng(0)
    for name, shift in (("on_policy", 0.0), ("shifted", 0.3)):
        shifted = (old + shift * rng.standard_normal(old.shape)).astype(np.float32)
        inputs["old_per_token_logps"] = torch.from_numpy(shifted)
        model.zero_grad()
        trl_loss = trainer._compute_loss(model, inputs)
        trl_loss.backward()
        for row, values in zip(rows, shifted, strict=True):
            row.old_logprobs = values
        our_loss = ours.policy._accumulate(rows, ours.method.objective(0), UpdateStats())
        difference, size = gradient_difference(
            *({name: p.grad for name, p in m.named_parameters()} for m in (ours.policy.loaded.causal_lm, model))
        )
        worst |= {
            f"{name}_loss_trl": float(trl_loss.detach()),
            f"{name}_loss_ours": our_loss,
            f"{name}_gradient_norm": size,
            f"{name}_gradient_relative_difference": difference,
        }
        if abs(our_loss - float(trl_loss.detach())) > 1e-5 or difference > 1e-4:
            raise RuntimeError(f"{setting.name}: not the same objective: {worst}")
    return worst


# Time -----------------------------------------------------------------------------------------------------------------


def time_steps(setting: Setting, folder: Path, measured: int, trl_rows: int) -> dict[str, Any]:
    """Median seconds of both sides over `measured` alternating steps after one that is discarded."""
    ours = Ours(setting, folder)
    model, tokenizer = load_for_trl(folder)
    texts = prompt_texts(setting, measured + 1)
    our_seconds: list[float] = []
    our_cpu: list[float] = []

    def our_turn(step: int) -> None:
        if step <= measured:
            mine = texts[step * setting.prompts : (step + 1) * setting.prompts]
            started = time.process_time()
            our_seconds.append(ours.step(mine, step))
            our_cpu.append(time.process_time() - started)

    between = BetweenSteps(our_turn)
    with tempfile.TemporaryDirectory() as output:
        trainer = trl_trainer(
            setting,
            model,
            tokenizer,
            texts,
            steps=measured + 1,
            output=Path(output),
            microbatch_rows=trl_rows,
        )
        trainer.add_callback(between)
        trainer.train()
    return {
        "trl_rows": trl_rows,
        "ours_seconds": statistics.median(our_seconds[1:]),
        "trl_seconds": statistics.median(between.seconds[1:]),
        "ours_cpu_seconds": statistics.median(our_cpu[1:]),
        "trl_cpu_seconds": statistics.median(between.cpu[1:]),
        "ours_each": our_seconds[1:],
        "trl_each": between.seconds[1:],
        "ours_phases": {k: statistics.median(p[k] for p in ours.phases[1:]) for k in ours.phases[0]},
    }


# Memory ---------------------------------------------------------------------------------------------------------------


def with_gradients(parameters: Any) -> None:
    """Gradients in memory (written, not only reserved), as after any step that does not free them."""
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-30)


def measure_memory(setting: Setting, side: str, folder: Path) -> dict[str, float]:
    """Growth of peak resident memory during one step of one side; meant for a fresh process."""
    texts = prompt_texts(setting, 1)
    found: dict[str, float] = {}

    def baseline(parameters: Any) -> None:
        with_gradients(parameters)
        reset_peak()
        found["before"] = resident_bytes()

    if side == "ours":
        ours = Ours(setting, folder)
        ours.step(texts[:1], 1, group=2, tokens=2)
        baseline(ours.policy.parameters)
        ours.step(texts, 0)
        found["peak"] = peak_resident_bytes()
    else:
        model, tokenizer = load_for_trl(folder)

        def measure(step: int) -> None:
            if step == 0:
                baseline(model.parameters())
            else:
                found["peak"] = peak_resident_bytes()

        with tempfile.TemporaryDirectory() as output:
            tiny = Setting("tiny", setting.vocabulary, 1, 2, 2, 2)
            warm = trl_trainer(tiny, model, tokenizer, texts[:1], steps=1, output=Path(output))
            warm.train()
            optimizer = getattr(warm.optimizer, "optimizer", warm.optimizer)
            trainer = trl_trainer(setting, model, tokenizer, texts, steps=1, output=Path(output), optimizer=optimizer)
            del warm
            trainer.add_callback(BetweenSteps(measure))
            trainer.train()
    found["growth"] = found["peak"] - found["before"]
    return found


def compare_memory(setting: Setting) -> dict[str, Any]:
    sides = {
        side: in_subprocess("step_vs_trl.py", "--side", side, "--setting", setting.name) for side in ("ours", "trl")
    }
    return {**sides, "ratio": sides["ours"]["growth"] / sides["trl"]["growth"]}


# All ------------------------------------------------------------------------------------------------------------------


def measure(parts: tuple[str, ...] = ("small", "wide", "memory")) -> dict[str, Any]:
    """The three keys with their details; `parts` leaves some out."""
    quiet()
    result: dict[str, Any] = {}
    for name, setting, key, measured, trl_microbatches in (
        ("small", SMALL, "step_speedup_vs_trl", 5, (256, 32)),
        ("wide", WIDE, "step_speedup_vs_trl_150k", 1, (32,)),
    ):
        if name not in parts:
            continue
        with tempfile.TemporaryDirectory() as folder:
            save_model(setting, Path(folder))
            equality = check_equality(setting, Path(folder))
            print_equality(setting, equality)
            times = min(
                (time_steps(setting, Path(folder), measured, rows) for rows in trl_microbatches),
                key=lambda found: found["trl_seconds"],
            )
        result[key] = times["trl_seconds"] / times["ours_seconds"]
        result[f"{name}_step"] = {**times, "equality": equality}
        phases = ", ".join(f"{k} {v:.3f}" for k, v in times["ours_phases"].items())
        print(
            f"{name}: ours {times['ours_seconds']:.3f} s ({phases}), TRL {times['trl_seconds']:.3f} s, "
            f"speed-up {result[key]:.2f} (CPU seconds {times['ours_cpu_seconds']:.3f} and "
            f"{times['trl_cpu_seconds']:.3f}, {times['trl_cpu_seconds'] / times['ours_cpu_seconds']:.2f})",
            flush=True,
        )
    if "memory" in parts:
        memory = compare_memory(WIDE)
        result["memory_growth_vs_trl_150k"] = memory["ratio"]
        result["memory"] = memory
        mib = {side: memory[side]["growth"] / 2**20 for side in ("ours", "trl")}
        print(f"memory growth: ours {mib['ours']:.0f} MiB, TRL {mib['trl']:.0f} MiB, ratio {memory['ratio']:.2f}")
    return result


def print_equality(setting: Setting, e: dict[str, float]) -> None:
    print(f"{setting.name}: the same rollouts through both objectives")
    for name in ("on_policy", "shifted"):
        print(
            f"  {name:<9} loss {e[f'{name}_loss_ours']:+.7f} (TRL {e[f'{name}_loss_trl']:+.7f}), gradient norm "
            f"{e[f'{name}_gradient_norm']:.6f}, relative difference {e[f'{name}_gradient_relative_difference']:.1e}"
        )
    print(f"  largest difference of advantages {e['advantage_difference']:.1e} (another epsilon)", flush=True)


def quiet() -> None:
    default_threads()
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="small, wide, memory (default: all)")
    parser.add_argument("--side", choices=("ours", "trl"), help="measure the memory of one side, for a fresh process")
    parser.add_argument("--setting", choices=tuple(SETTINGS), default="wide")
    arguments = parser.parse_args()
    quiet()
    if arguments.side is None:
        measure(tuple(arguments.parts) or ("small", "wide", "memory"))
        return
    setting = SETTINGS[arguments.setting]
    with tempfile.TemporaryDirectory() as folder:
        save_model(setting, Path(folder))
        found = measure_memory(setting, arguments.side, Path(folder))
    Path(arguments.parts[0]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

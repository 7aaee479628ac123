"""What `graftrl plan` expects of a step on this machine against what steps take.

Run as `python benchmarks/plan_check.py`. The machine's rates are measured once (`graftrl.plan.measure`), none of them
on a setting below. Each setting is then a GRPO step of the local engine: sampling, and forward, backward and optimizer
step. Its model, batch and lengths differ. The last column of the table is the error of the whole step.

One thread, and the process's own CPU time rather than the wall's, so that other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import Setting, coin, one_thread, prompt_texts, save_model
from graftrl.methods import StepContext
from graftrl.plan.devices import Device
from graftrl.plan.measure import this_machine
from graftrl.plan.speed import Speed
from graftrl.policies.costs import sampling_work, shape_of
from graftrl.rollout import Prompt
from step_vs_trl import Ours

STEPS = 3  # measured, after one that warms up; the fastest counts
CHECKED = (
    Setting("base", vocabulary=400, prompts=32, group=8, new_tokens=64, microbatch_rows=32),
    Setting("few tokens", vocabulary=400, prompts=32, group=8, new_tokens=16, microbatch_rows=32),
    Setting("small batch", vocabulary=400, prompts=4, group=8, new_tokens=64, microbatch_rows=32),
    Setting("deep", vocabulary=400, prompts=16, group=8, new_tokens=32, microbatch_rows=32, layers=6),
    Setting("wide", vocabulary=400, prompts=8, group=8, new_tokens=64, microbatch_rows=32, hidden=128,
            feed_forward=512, layers=4),
    Setting("wider", vocabulary=400, prompts=4, group=8, new_tokens=64, microbatch_rows=32, hidden=256,
            feed_forward=1024, layers=4),
    Setting("many tokens in the vocabulary", vocabulary=32_000, prompts=8, group=8, new_tokens=16, microbatch_rows=32),
)  # fmt: skip


def measured(setting: Setting, ours: Ours) -> tuple[float, float, list[list[tuple[int, int]]]]:
    """CPU seconds of sampling and of training in the fastest step, and the minibatches' rows (prompt, response)."""
    texts = prompt_texts(setting, STEPS + 1)
    found = []
    for i in range(STEPS + 1):
        of_step = texts[i * setting.prompts : (i + 1) * setting.prompts]
        prompts = [Prompt(f"{i}/{j}", ({"role": "user", "content": t},), "", "t") for j, t in enumerate(of_step)]
        start = time.process_time()
        groups = ours.policy.sample(prompts, setting.group, i)
        sampled = time.process_time()
        for group in groups:
            for response in group.responses:
                response.reward = coin(response.text)
        context = StepContext(i, i, setting.group, setting.new_tokens, {"m": ours.policy.codec}, lambda _, rows: [])
        rows = ours.method.exchange({"m": groups}, context).rows["m"]
        minibatches = ours.method.order(rows, len(prompts), np.random.default_rng(i))
        begin = time.process_time()
        ours.policy.update(minibatches, ours.method.objective)
        found.append((sampled - start, time.process_time() - begin))
    lengths = [
        [(len(row.prompt_token_ids), len(row.response_token_ids)) for row in minibatch if np.any(row.advantages)]
        for minibatch in minibatches
    ]
    return min(s for s, _ in found[1:]), min(t for _, t in found[1:]), lengths


def expected(
    setting: Setting, ours: Ours, device: Device, minibatches: list[list[tuple[int, int]]]
) -> dict[str, float]:
    """Seconds of the same step by the plan's model."""
    shape = shape_of(ours.policy.loaded.causal_lm)
    prompt = round((setting.shortest_prompt + setting.longest_prompt) / 2)
    work = sampling_work(shape, [prompt] * setting.prompts, [(prompt, setting.new_tokens)] * setting.rows, 4)
    speed = Speed(shape, ours.policy.settings, device, rows_per_prompt=setting.group)
    return {
        "sampling": device.seconds(work, 4, decoding=True),
        "training": sum(speed.update(rows).wall for rows in minibatches),
    }


def measure() -> dict[str, Any]:
    one_thread()
    device = this_machine(time.process_time)
    lines = []
    for setting in CHECKED:
        with tempfile.TemporaryDirectory() as folder:
            save_model(setting, Path(folder))
            ours = Ours(setting, Path(folder))
            sampling, training, minibatches = measured(setting, ours)
            plan = expected(setting, ours, device, minibatches)
        step = sampling + training
        lines.append(
            {
                "setting": setting.name,
                "sampling_s": sampling,
                "sampling_error": plan["sampling"] / sampling - 1,
                "training_s": training,
                "training_error": plan["training"] / training - 1,
                "step_s": step,
                "step_error": (plan["sampling"] + plan["training"]) / step - 1,
            }
        )
        print(line(lines[-1]), flush=True)
    errors = [abs(found["step_error"]) for found in lines]
    print(f"error of the step: {np.mean(errors):.0%} in the mean, at most {max(errors):.0%}")
    return {"device": vars(device), "torch": torch.__version__, "settings": lines}


def line(found: dict[str, Any]) -> str:
    parts = (f"{found[f'{p}_s']:.3f} | {found[f'{p}_error']:+.0%}" for p in ("sampling", "training", "step"))
    return f"| {found['setting']} | {' | '.join(parts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the result as JSON")
    arguments = parser.parse_args()
    result = measure()
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

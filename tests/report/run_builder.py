"""Run folders made by hand, with numbers that a test can check."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graftrl.config import parse_recipe
from graftrl.logs.rollouts import write_rollouts, write_transfers
from graftrl.methods import Transfer
from graftrl.policies.config import SamplingSettings
from graftrl.rollout import Group, Prompt, Response
from graftrl.training.run_folder import RunFolder

HOSTILE = '<script>alert("x")</script><img src=http://evil.example/a.png>'
GRAFT_COUNTS = {
    "responses": 2, "admitted": 1, "admitted_successes": 1, "admitted_failures": 0, "gated": 1, "rejected": {"long": 0},
    "candidates": 2, "selected": 1, "all_fail_prompts": 2, "all_fail_solved_by_peer": 1.0,
}  # fmt: skip


def recipe_content(method: Any, seed: int = 0, steps: int = 3) -> dict[str, Any]:
    return {
        "name": f"r{seed}",
        "seed": seed,
        "method": method,
        "models": {"A": {"path": "models/a"}, "B": {"path": "models/b"}},
        "task": {"kind": "hidden_programs"},
        "training": {"steps": steps, "prompts_per_step": 2, "group_size": 2, "minibatch_prompts": 1},
    }


def metrics_line(step: int, exchange: Mapping[str, Any], grafted_tokens: int = 0) -> dict[str, Any]:
    model = {
        "groups": 2, "reward_mean": 0.1 * step, "pass_at_n": 0.5, "all_fail": 0.5, "response_tokens_mean": 5.0,
        "entropy": 0.2, "grad_norm": 1.0, "sampled_tokens": 20, "passed_tokens": 30,
        "trained_tokens": {"own": 10, "grafted": grafted_tokens}, "clipped_tokens": {"own": 1, "grafted": 0},
    }  # fmt: skip
    return {
        "step": step, "models": {"A": model, "B": model}, "exchange": dict(exchange), "step_s": 1.0,
        "wall_s": float(step), "phase_s": {"sampling": 0.5, "training": 0.25},
        "cost": {"sampled_tokens": 40 * step, "trained_tokens": 20 * step, "passed_tokens": 60 * step},
    }  # fmt: skip


def group(model: str, prompt_id: str, rewards: list[float], text: str) -> Group:
    prompt = Prompt(prompt_id, ({"role": "user", "content": f"question {prompt_id}"},), "42", "toy")
    responses = [
        Response(f"{text} {i}", np.array([1, 2]), np.array([-0.1, -0.2], np.float32), "stop", reward)
        for i, reward in enumerate(rewards)
    ]
    return Group(model, prompt, responses)


def make_run(
    root: Path,
    method: Any = "grpo",
    seed: int = 0,
    finals: Mapping[str, float] | None = None,
    before: Mapping[str, int] | None = None,
    steps: int = 3,
    planned_steps: int | None = None,
    grafts: bool = False,
    prompts: tuple[str, str] = ("p1", "p2"),
    text: str = "answer",
) -> Path:
    """A run of models A and B, two prompts a step and two responses each.

    A fails both responses to the first prompt, which B solves once; both solve the second prompt once.
    """
    recipe = parse_recipe(recipe_content(method, seed, planned_steps or steps), "test")
    run = RunFolder.create(root, recipe)
    directions = {"B->A": GRAFT_COUNTS, "A->B": {**GRAFT_COUNTS, "candidates": 0, "selected": 0}} if grafts else {}
    for step in range(1, steps + 1):
        run.append_metrics(metrics_line(step, directions, grafted_tokens=2 if grafts else 0))
        groups = {
            "A": [group("A", prompts[0], [0.0, 0.0], text), group("A", prompts[1], [1.0, 0.0], text)],
            "B": [group("B", prompts[0], [1.0, 0.0], text), group("B", prompts[1], [0.0, 1.0], text)],
        }
        write_rollouts(
            run.step_file("rollouts", step),
            run=recipe.name, step=step, groups=groups, sampling=SamplingSettings(), fingerprints={"A": "a", "B": "b"},
        )  # fmt: skip
        if grafts:
            moved = [
                Transfer("A", "B", prompts[0], 0, "admitted", "", 1.0, 0.7, 0.9, 0.9, 3),
                Transfer("A", "B", prompts[0], 1, "gated", "score", 0.0, -0.7, 0.5, 0.0, 3),
            ]
            write_transfers(run.step_file("exchange", step), step, moved)
    if before is not None:
        write_evaluation(root, 0, {"A": before, "B": before})
    if finals is not None:
        results = {model: {"pass_at_1": score, "samples": 1} for model, score in finals.items()}
        successes: dict[str, Any] = {model: {} for model in finals}
        content = {"step": steps, "results": results, "successes": successes}
        run.write_json(run.step_file("evaluations", steps), content)
    return root


def write_evaluation(root: Path, step: int, successes: Mapping[str, Mapping[str, int]]) -> None:
    results = {m: {"pass_at_1": sum(of.values()) / len(of), "samples": 1} for m, of in successes.items()}
    folder = root / "evaluations"
    folder.mkdir(exist_ok=True)
    content = {"step": step, "results": results, "successes": successes}
    (folder / f"step-{step:06d}.json").write_text(json.dumps(content))

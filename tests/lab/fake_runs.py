"""Finished runs of the laboratory without training: folders with numbers that a test can check."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from graftrl.config import load_recipe
from graftrl.lab.jobs import Job
from graftrl.lab.plan import Laboratory, RunKey
from graftrl.training.run_folder import RunFolder

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
PROMPTS = 8  # validation prompts of a fake run: two select, six test

COUNTS = {
    "responses": 8, "admitted": 3, "admitted_successes": 2, "admitted_failures": 1, "gated": 5, "rejected": {},
    "candidates": 2, "selected": 1,
}  # fmt: skip


def laboratory(root: Path, steps: int | None = 10) -> Laboratory:
    return Laboratory(RECIPE, root / "runs" / "lab", steps)


def write_run(job: Job, right: Mapping[str, Mapping[int, int]], step_s: float = 0.5) -> None:
    """A finished run. right: per model, by evaluated step, how many of the first validation prompts are solved."""
    recipe = load_recipe(job.recipe, job.overrides)
    run = RunFolder.create(job.folder, recipe)
    steps = recipe.training.steps or 0
    exchange = {f"{s}->{r}": COUNTS for s in recipe.models for r in recipe.models if s != r}
    for step in range(1, steps + 1):
        model = {
            "groups": 32, "reward_mean": 0.5, "entropy": 0.2, "grad_norm": 0.25 * step, "skipped_nonfinite": 0,
            "trained_tokens": {"own": 90, "grafted": 10}, "clipped_tokens": {"own": 9, "grafted": step % 2},
        }  # fmt: skip
        line = {
            "step": step,
            "models": dict.fromkeys(recipe.models, model),
            "exchange": exchange,
            "step_s": step_s,
            "phase_s": {"training": step_s},
            "wall_s": step * step_s,
            "cost": {"sampled_tokens": 100 * step, "trained_tokens": 90 * step, "passed_tokens": 80 * step},
        }
        run.append_metrics(line)
    for step in next(iter(right.values())):
        successes = {m: {f"v{i}": int(i < of_step[step]) for i in range(PROMPTS)} for m, of_step in right.items()}
        results = {
            m: {"pass_at_1": sum(of.values()) / PROMPTS, "low": 0.0, "high": 1.0, "problems": PROMPTS, "samples": 1}
            for m, of in successes.items()
        }
        path = run.step_file("evaluations", step)
        run.write_json(path, {"step": step, "results": results, "successes": successes})


def finish(lab: Laboratory, key: RunKey, right: int = 5) -> None:
    """A run whose models solve one prompt before training and `right` of the eight afterwards."""
    write_run(lab.job(key, 1.0), {model: {0: 1, 5: right, 10: right} for model in key.models})

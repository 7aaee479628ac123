"""What the exchange costs: a GRAFT step of two models against the two GRPO steps that it replaces.

Run as `python benchmarks/graft_vs_grpo.py`. The laboratory's two warmed-up models (Llama and GPT-2 type, different
tokenizers) train through the ordinary loop with the quickstart's recipe: 32 prompts, 8 responses each, 4 optimizer
steps. With GRPO each trains in a run of its own, and the two runs' times are added. All runs start from the same
weights with the same seed, see the same prompts, and take turns step by step over the whole 60 steps of the quickstart,
for the number of grafts falls as the models learn; the first step of each is discarded. Step times leave evaluation and
checkpoints out, and hold everything else, the rollout log included.

GRAFT scores peer responses, and it trains on them where GRPO has an all-fail group. Our GRPO spares such groups the
forward and backward pass, for they have no gradient, so GRAFT trains on more rows than it. A third run, "grpo_full",
passes all rows as other trainers do; the key is the stricter ratio, to the GRPO that spares them.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import HERE, one_thread
from graftrl.config import load_recipe
from graftrl.lab.cache import ensure_warm_pair
from graftrl.tasks import VerificationPool
from graftrl.training.loop import prepare, train_step
from graftrl.training.run_folder import RunFolder, TrainingState

ROOT = HERE.parent
METHODS = ("grpo", "graft", "grpo_full")
PHASES = ("sampling", "grading", "scoring", "exchange", "training", "logging")


class Side:
    """One run of a laboratory recipe, advanced a step at a time. folders: of the recipe's models; only: train one."""

    def __init__(
        self,
        method: str,
        folders: dict[str, Path],
        root: Path,
        recipe: str = "quickstart.yaml",
        overrides: Sequence[str] = (),
        only: str | None = None,
    ) -> None:
        name = method if only is None else f"{method}-{only}"
        recipe_of_all = load_recipe(
            ROOT / "recipes" / recipe,
            [
                f"name={name}",
                f"method={method.removesuffix('_full')}",
                "training.steps=1000",
                "evaluation.every=0",
                *(f"models.{model}.path={json.dumps(str(folder.resolve()))}" for model, folder in folders.items()),
                *overrides,
            ],
        )
        models = {model: s for model, s in recipe_of_all.models.items() if only in (None, model)}
        self.recipe = recipe_of_all.model_copy(update={"models": models})
        self.run = RunFolder.create(root / name, self.recipe)
        self.prepared = prepare(self.recipe, self.run)
        if method == "grpo_full":
            objective = self.prepared.method.objective(0)
            whole = replace(objective, terms=tuple(replace(t, policy_gradient=False) for t in objective.terms))
            self.prepared.method.objective = lambda _: whole  # type: ignore[method-assign]
        self.state = TrainingState()
        self.lines: list[dict[str, Any]] = []
        self.cpu: list[float] = []

    def step(self, pool: VerificationPool) -> None:
        started = time.process_time()
        self.lines.append(train_step(self.recipe, self.prepared, self.run, pool, self.state))
        self.cpu.append(time.process_time() - started)

    def grafted_rows(self) -> list[int]:
        """Admitted peer responses of both directions, per step."""
        return [sum(d["admitted"] for d in line["exchange"].values()) for line in self.lines]

    def seconds_of(self, steps: int) -> float:
        """Time of the first measured steps."""
        return sum(line["step_s"] for line in self.lines[1 : 1 + steps])

    def summary(self) -> dict[str, Any]:
        measured = self.lines[1:]
        return {
            "seconds": statistics.median(line["step_s"] for line in measured),
            "seconds_mean": statistics.mean(line["step_s"] for line in measured),
            "cpu_seconds": statistics.median(self.cpu[1:]),
            "sampled_tokens": statistics.mean(
                sum(m["sampled_tokens"] for m in line["models"].values()) for line in measured
            ),
            "passed_tokens": statistics.mean(
                sum(m["passed_tokens"] for m in line["models"].values()) for line in measured
            ),
            "phases": {p: statistics.mean(line["phase_s"].get(p, 0.0) for line in measured) for p in PHASES},
        }


def together(sides: Sequence[Side]) -> dict[str, Any]:
    """Summaries of runs of one model each, added up."""
    first, *others = [side.summary() for side in sides]
    for other in others:
        for key, value in other.items():
            first[key] = {p: first[key][p] + value[p] for p in PHASES} if key == "phases" else first[key] + value
    return first


def measure(steps: int = 60) -> dict[str, Any]:
    """The key `graft_over_grpo` (ratio of the time of all steps) and where the time goes."""
    one_thread()
    folders = ensure_warm_pair(ROOT / "runs" / "lab-cache")
    with tempfile.TemporaryDirectory() as root:
        runs = {
            method: [Side(method, folders, Path(root))]
            if method == "graft"
            else [Side(method, folders, Path(root), only=model) for model in folders]
            for method in METHODS
        }
        graft = runs["graft"][0]
        verification = graft.recipe.verification
        with VerificationPool(verification.workers, verification.limit_s) as pool:
            for i in range(steps + 1):
                for method in METHODS if i % 2 else METHODS[::-1]:
                    for side in runs[method]:
                        side.step(pool)
    found: dict[str, Any] = {method: together(sides) for method, sides in runs.items()}
    grafted = graft.grafted_rows()[1:]
    if not any(grafted):
        raise RuntimeError("no step grafted anything: the comparison would be empty")
    found |= {
        "graft_over_grpo": found["graft"]["seconds_mean"] / found["grpo"]["seconds_mean"],
        "graft_over_grpo_full": found["graft"]["seconds_mean"] / found["grpo_full"]["seconds_mean"],
        "first_20_steps": graft.seconds_of(20) / sum(side.seconds_of(20) for side in runs["grpo"]),
        "cpu_ratio": sum(graft.cpu[1:]) / sum(sum(side.cpu[1:]) for side in runs["grpo"]),
        "steps": steps,
        "grafted_rows": grafted,
    }
    report(found)
    return found


def report(found: dict[str, Any]) -> None:
    print(f"{'seconds a step':<16}" + "".join(f"{method:>10}" for method in METHODS))
    for phase in PHASES:
        print(f"  {phase:<14}" + "".join(f"{found[method]['phases'][phase]:>10.3f}" for method in METHODS))
    for key in ("seconds", "seconds_mean", "cpu_seconds"):
        print(f"{key:<16}" + "".join(f"{found[method][key]:>10.3f}" for method in METHODS))
    for key in ("sampled_tokens", "passed_tokens"):
        print(f"{key:<16}" + "".join(f"{found[method][key]:>10.0f}" for method in METHODS))
    grafted = found["grafted_rows"]
    print(f"grafted rows a step: mean {statistics.mean(grafted):.1f}, {min(grafted)} to {max(grafted)}")
    print(
        f"graft over grpo {found['graft_over_grpo']:.3f} (CPU seconds {found['cpu_ratio']:.3f}), over grpo_full "
        f"{found['graft_over_grpo_full']:.3f}; over grpo in the first 20 steps {found['first_20_steps']:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    measure()

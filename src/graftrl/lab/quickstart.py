"""The quickstart: two tiny models learn a task with GRPO and with GRAFT, at the same budget on the same prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
from rich import box
from rich.console import Console
from rich.table import Table

from graftrl.config import Recipe, load_recipe
from graftrl.errors import ConfigError, RunError
from graftrl.lab.cache import CACHE, ensure_warm_pair, link_names
from graftrl.lab.jobs import Job, run_jobs
from graftrl.lab.models import LAB_MODELS
from graftrl.lab.programs import HiddenProgramsConfig
from graftrl.lab.warmup import WarmupReport
from graftrl.methods.graft import GRAFTSettings
from graftrl.methods.grpo import GRPOSettings
from graftrl.report.data import ModelScores, Run, read_runs, scores
from graftrl.report.html import write_report
from graftrl.report.plots import require_matplotlib
from graftrl.report.tables import plus_minus
from graftrl.settings import Settings
from graftrl.training.run_folder import write_text

METHODS: dict[str, type[Settings]] = {"grpo": GRPOSettings, "graft": GRAFTSettings}
WALL_FILE = "wall.json"


def run_quickstart(
    recipe_path: Path, root: Path, seeds: int = 4, workers: int = 2, console: Console | None = None
) -> dict[str, Any]:
    """Warm up the models, train every method with every seed, compare; returns what `summary.json` holds.

    Finished parts are reused, interrupted ones continued.

    Raises:
        ConfigError: the recipe is not about the laboratory's task and models.
        RunError: the folder holds runs of another recipe, or a run failed.
    """
    console = console or Console()
    require_matplotlib()
    started = time.monotonic()
    earlier_s = _read_wall(root)
    recipe = load_recipe(recipe_path)
    if not isinstance(recipe.task, HiddenProgramsConfig):
        raise ConfigError(f"{recipe_path}: the quickstart needs task.kind hidden_programs")
    unknown = set(recipe.models) - set(LAB_MODELS)
    if unknown:
        raise ConfigError(
            f"{recipe_path}: unknown laboratory model {sorted(unknown)[0]!r}; there are {', '.join(LAB_MODELS)}"
        )

    console.print("1/3 warming up the models (done once, then kept)", style="bold")
    warm = ensure_warm_pair(root.parent / CACHE, recipe.task, [LAB_MODELS[name] for name in recipe.models])
    link_names(warm)
    for name, folder in warm.items():
        warmed = WarmupReport.read(folder)
        console.print(
            f"{name}: pass@1 {warmed.strong:.2f} on its strong families, {warmed.weak:.2f} on the others",
            highlight=False,
        )

    jobs = plan_jobs(recipe_path, recipe, root, range(seeds), warm)
    console.print(f"2/3 training: {len(jobs)} runs, {workers} at a time", style="bold")
    trained = 1
    try:
        trained = run_jobs(jobs, workers, console)
    finally:
        if trained:
            _write_wall(root, earlier_s + time.monotonic() - started)

    console.print("3/3 comparing", style="bold")
    runs = read_runs([job.folder for job in jobs])
    check_same_prompts(runs)
    wall_s = earlier_s + (time.monotonic() - started if trained else 0.0)
    _write_wall(root, wall_s)
    summary = summarize(runs, wall_s)
    write_text(root / "summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")
    report = write_report(runs, root / "report.html", title="graftrl quickstart: GRPO and GRAFT")
    console.print(comparison_table(scores(runs)))
    console.print(
        f"pass@1 on {recipe.evaluation.prompts or recipe.task.validation_size} held-out prompts; 95 % intervals: "
        "bootstrap over prompts before training, "
        + (f"Student's t over {seeds} seeds after" if seeds > 1 else "none after, which would need two seeds"),
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"{wall_s:.0f} s of training and warm-up in all", highlight=False)
    for path in (root / "summary.json", report):
        console.print(str(path), highlight=False, soft_wrap=True)
    return summary


def plan_jobs(
    recipe_path: Path, recipe: Recipe, root: Path, seeds: Sequence[int], warm: Mapping[str, Path]
) -> list[Job]:
    """Every method with every seed; methods alternate, so that an interrupted comparison is balanced."""
    return [
        Job(
            name=f"{method} seed {seed}",
            recipe=recipe_path,
            overrides=(
                f"name=quickstart-{method}-seed{seed}",
                f"seed={seed}",
                f"method={json.dumps(method_settings(recipe, method))}",
                *(f"models.{name}.path={json.dumps(str(folder))}" for name, folder in warm.items()),
            ),
            folder=root / f"{method}-seed{seed}",
        )
        for seed in seeds
        for method in METHODS
    ]


def method_settings(recipe: Recipe, method: str) -> dict[str, Any]:
    """The `method` section for one of `METHODS`: the recipe's options as far as that method has them."""
    given = recipe.method.model_dump(mode="json")
    known = METHODS[method].model_fields
    return {"name": method, **{key: value for key, value in given.items() if key in known and key != "name"}}


def check_same_prompts(runs: Sequence[Run]) -> None:
    """Raises RunError unless all runs of a seed saw the same prompts in the same order."""
    order: dict[int, tuple[Run, pl.DataFrame]] = {}
    for run in runs:
        if run.rollouts is None:
            raise RunError(f"{run.folder}: has no rollout log")
        prompts = run.rollouts.select("step", "model", "prompt_id").unique(maintain_order=True).sort(
            "step", "model", maintain_order=True
        ).collect()  # fmt: skip
        first, expected = order.setdefault(run.seed, (run, prompts))
        if not prompts.equals(expected):
            raise RunError(f"{first.folder} and {run.folder} have one seed but saw different prompts")


def summarize(runs: Sequence[Run], wall_s: float) -> dict[str, Any]:
    """What `summary.json` holds. Scores are pass@1 on the validation prompts.

    Per model: "before", then for each method "mean", "seeds" (one value a seed) and "half_width" of the 95 % t
    interval; "gain": GRAFT minus GRPO, paired by seed. A half-width is null with fewer than two seeds.
    """
    models: dict[str, Any] = {}
    for model, of_model in scores(runs).items():
        entry: dict[str, Any] = {}
        if of_model.before is not None:
            entry["before"] = of_model.before[0]
            entry["before_interval"] = list(of_model.before[1:])
        for method, score in of_model.methods.items():
            entry[method] = {
                "mean": score.mean,
                "seeds": list(score.seeds.values()),
                "half_width": score.half_width,
            }
            if score.gains is not None:
                entry["gain"] = {
                    "mean": score.gain,
                    "seeds": list(score.gains.values()),
                    "half_width": score.gain_half_width,
                }
        models[model] = entry
    return {"models": models, "wall_s": wall_s}


def comparison_table(by_model: Mapping[str, ModelScores]) -> Table:
    # Narrow enough for 80 columns without breaking a cell.
    table = Table(title="pass@1 before and after training", box=box.SIMPLE, show_edge=False, pad_edge=False)
    methods = list(dict.fromkeys(method for of_model in by_model.values() for method in of_model.methods))
    table.add_column("model")
    table.add_column("before", justify="right")
    for method in methods:
        table.add_column(method.upper(), justify="right")
    table.add_column("GRAFT - GRPO", justify="right")
    for model, of_model in by_model.items():
        gains = [score for score in of_model.methods.values() if score.gain is not None]
        table.add_row(
            model,
            "" if of_model.before is None else "{:.3f} [{:.3f}, {:.3f}]".format(*of_model.before),
            *(plus_minus(of_model.methods[m].mean, of_model.methods[m].half_width) for m in methods),
            *(plus_minus(score.gain or 0.0, score.gain_half_width, sign="+") for score in gains),
        )
    return table


def _read_wall(root: Path) -> float:
    """Seconds that earlier calls spent on warm-up and training in this folder."""
    try:
        return float(json.loads((root / WALL_FILE).read_text(encoding="utf-8"))["wall_s"])
    except (FileNotFoundError, KeyError, ValueError):
        return 0.0


def _write_wall(root: Path, seconds: float) -> None:
    write_text(root / WALL_FILE, json.dumps({"wall_s": seconds}) + "\n")

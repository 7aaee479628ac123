"""Train the pair of `recipes/real-pair.yaml` by several methods with several seeds, and write a table.

    python recipes/real_pair/compare.py        # a run: 10 minutes on two cores, 13 GB of memory
    python recipes/real_pair/compare.py --methods grpo,scion --seeds 1 --steps 2
    python recipes/real_pair/compare.py --methods grpo,scion,grpo-n32,hacpo,sgt-0.3

A method is one of graftrl's or of its presets, or `grpo-n32`: GRPO with four times the rollouts.

Runs lie in `runs/real-pair/METHOD-seedN` and are resumed, never repeated. After the last step each model answers 150
held-out questions 8 times, which pass@1 and pass@8 are estimated from; then the run's weights (5 GB) are removed,
unless `--keep-weights` is given. `real-pair.csv` has a row per model, method and seed, with the columns of the
laboratory's tables, `real-pair.md` the means and the differences to the first method. `graftrl report
runs/real-pair/*-seed*` makes a page of curves.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from graftrl.evaluation.intervals import t_interval
from graftrl.evaluation.significance import paired_t_test
from graftrl.lab.jobs import Job, run_jobs
from graftrl.lab.measure import Measures, measure, read_measures
from graftrl.lab.results import BOTH, MEASURED_COLUMNS, read_outcome, to_csv
from graftrl.lab.studies import LAB_METHODS
from graftrl.report.data import read_runs
from graftrl.report.tables import markdown_table, plus_minus
from graftrl.training.run_folder import RunFolder, write_text

RECIPE = Path(__file__).parent.parent / "real-pair.yaml"
STEP_S = 30.0  # on two cores
# Rivals that are more than a method's name. HACPO's minibatches hold own and peer rows: twice the prompts, as
# published, so that a step has as many optimizer steps as the baseline's.
RIVALS = {
    "grpo-n32": LAB_METHODS["grpo-n32"].overrides,
    "hacpo": ("method=hacpo", "training.minibatch_prompts=12"),
}
VALIDATION_PROMPTS = 200  # a quarter of them selects checkpoints where that is done, and is not measured


@dataclass(frozen=True)
class Finished:
    """A run. measures, before, damped: by model; before: pass@1 on the measured questions, before training; damped:
    share of the imitated tokens that SCION damped, over all steps, None where a method damps none."""

    measures: Mapping[str, Measures]
    before: Mapping[str, float]
    damped: Mapping[str, float | None]
    wall_s: float


Found = Mapping[tuple[str, int], Finished]  # by method and seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--methods",
        default="grpo,scion,scion-no-damping,sgt,graft",
        help="separated by commas; the first is the baseline",
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... of every method")
    parser.add_argument("--steps", type=int, default=20, help="of a run")
    parser.add_argument("--run", type=Path, default=Path("runs/real-pair"), help="folder of the runs")
    parser.add_argument("--out", type=Path, help="folder of the tables; that of the runs by default")
    parser.add_argument("--keep-weights", action="store_true", help="of every run: 5 GB each")
    given = parser.parse_args()

    console = Console(stderr=True)
    methods = given.methods.split(",")
    found: dict[tuple[str, int], Finished] = {}
    for seed in range(given.seeds):  # one run at a time: each takes all cores
        for method in methods:
            job = job_of(method, seed, given.steps, given.run / f"{method}-seed{seed}")
            run_jobs([job], workers=1, console=console)
            measures = read_measures(job.folder) or measured_apart(job.folder)
            folder = RunFolder.open(job.folder)
            if folder.checkpoints.exists() and not given.keep_weights:
                shutil.rmtree(folder.checkpoints)
            (run,) = read_runs([job.folder])
            before = {model: read_outcome(run, model).before for model in run.models}
            damped = {model: damped_share([row["models"][model] for row in run.metrics]) for model in run.models}
            found[method, seed] = Finished(measures, before, damped, run.metrics[-1]["wall_s"])
            write_tables(given.out or given.run, found, methods, given.steps)
    console.print(str((given.out or given.run) / "real-pair.md"), highlight=False, soft_wrap=True)


def job_of(method: str, seed: int, steps: int, folder: Path) -> Job:
    changes = (
        *RIVALS.get(method, (f"method={method}",)), f"seed={seed}",
        f"training.steps={steps}", f"checkpoint.every={steps}",
        f"task.validation_size={VALIDATION_PROMPTS}", f"evaluation.prompts={VALIDATION_PROMPTS}",
    )  # fmt: skip
    return Job(f"{method} seed {seed}", RECIPE, changes, folder, expected_s=STEP_S * steps)


def measured_apart(folder: Path) -> dict[str, Measures]:
    """In a process of its own, which gives the models' memory back before the next run needs it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, folder).result()


def damped_share(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Of a run's imitated tokens, from its metrics of one model."""
    imitated = [
        (row["trained_tokens"]["sft"], row["token_means"]["damped"]) for row in steps if "damped" in row["token_means"]
    ]
    tokens = sum(count for count, _ in imitated)
    return sum(count * share for count, share in imitated) / tokens if tokens else None


def write_tables(out: Path, found: Found, methods: Sequence[str], steps: int) -> None:
    """Of the runs that have finished so far."""
    rows = [
        {
            "regime": "real", "pair": "smollm2-gemma3", "model": model, "method": method, "seed": seed,
            "pass1": round(of_model.pass1, 6), "pass8": round(of_model.pass8, 6), "wall_s": round(run.wall_s, 3),
        }
        for (method, seed), run in sorted(found.items())
        for model, of_model in run.measures.items()
    ]  # fmt: skip
    write_text(out / "real-pair.csv", to_csv(rows, MEASURED_COLUMNS))
    any_run = next(iter(found.values()))
    models, baseline = list(any_run.measures), methods[0]
    before = {model: t_interval([run.before[model] for run in found.values()])[0] for model in models}
    families = sorted(any_run.measures[models[0]].families)
    table = [
        _row(found, model, method, baseline, families)
        for model in [*models, BOTH]
        for method in methods
        if any(m == method for m, _ in found)
    ]
    page = [
        "# Two real models",
        f"SmolLM2-135M-Instruct and Gemma-3-270M, {steps} steps of `recipes/real-pair.yaml`, made by "
        "`python recipes/real_pair/compare.py`. Means over seeds ± half-width of the 95 % t interval, after the last "
        f"step; differences to `{baseline}` are paired by seed. Damped: share of the imitated tokens that the receiver "
        "held below SCION's tau, in all of training. The last columns are pass@1 by data set.",
        f"pass@1 before training: {', '.join(f'{model} {mean:.3f}' for model, mean in before.items())}.",
        markdown_table(
            [
                *("model", "method", "seeds", "pass@1", f"pass@1 − {baseline}", "pass@8", f"pass@8 − {baseline}"),
                *("entropy", "damped", *families),
            ],
            table,
            text_columns=2,
        ),
    ]
    write_text(out / "real-pair.md", "\n\n".join(page) + "\n")


def _row(found: Found, model: str, method: str, baseline: str, families: Sequence[str]) -> list[str]:
    ours = {seed: run for (m, seed), run in found.items() if m == method}

    def mean(run: Finished, value: Callable[[Measures], float]) -> float:
        chosen = list(run.measures.values()) if model == BOTH else [run.measures[model]]
        return sum(value(of_model) for of_model in chosen) / len(chosen)

    def interval(value: Callable[[Measures], float]) -> str:
        return plus_minus(*t_interval([mean(run, value) for run in ours.values()]))

    def difference(value: Callable[[Measures], float]) -> str:
        shared = [seed for seed in ours if (baseline, seed) in found]
        if method == baseline or not shared:
            return ""
        theirs = [mean(found[baseline, seed], value) for seed in shared]
        test = paired_t_test([mean(ours[seed], value) for seed in shared], theirs)
        return plus_minus(test.mean, test.half_width, "+")

    row = [model, f"`{method}`", str(len(ours))]
    for value in (lambda of: of.pass1, lambda of: of.pass8):
        row += [interval(value), difference(value)]
    damped = [share for run in ours.values() if (share := run.damped.get(model)) is not None]
    row += [interval(lambda of: of.entropy), plus_minus(*t_interval(damped)) if damped else ""]
    return [*row, *(interval(lambda of, f=f: of.families[f]) for f in families)]


if __name__ == "__main__":
    main()

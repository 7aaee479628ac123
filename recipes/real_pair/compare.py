"""Train the pair of `recipes/real-pair.yaml` by several methods with several seeds, and write a table.

    python recipes/real_pair/compare.py        # 50 runs of 4 to 8 minutes on two cores, up to 16 GB of memory
    python recipes/real_pair/compare.py --methods grpo,scion --seeds 1 --steps 2

These times are with `MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000` in the environment; without, longer.

A method is one of graftrl's or of its presets, or `grpo-n32`: GRPO with four times the rollouts.

Runs lie in `runs/real-pair/METHOD-seedN` and are resumed, never repeated. After the last step each model answers 150
held-out questions 8 times, which pass@1 and pass@8 are estimated from; then the run's weights (5 GB) are removed,
unless `--keep-weights` is given. `real-pair.csv` has a row per model, method and seed, and begins with the columns of
the laboratory's tables; `real-pair.md` has the means and the differences to the first method. A run whose rows are in
the table is not trained again, though its folder be gone. `graftrl report runs/real-pair/*-seed*` makes a page of
curves.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from graftrl.errors import GraftrlError, RunError
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
STEP_S = 12.0  # on two cores, of eight responses to a prompt
METHODS = ("grpo", "scion", "scion-no-damping", "sgt-0.03", "sgt", "sgt-0.3", "sgt-1", "graft", "hacpo", "grpo-n32")
# Rivals that are more than a method's name. HACPO's minibatches hold own and peer rows: twice the prompts, as
# published, so that a step has as many optimizer steps as the baseline's.
RIVALS = {
    "grpo-n32": LAB_METHODS["grpo-n32"].overrides,
    "hacpo": ("method=hacpo", "training.minibatch_prompts=12"),
}
VALIDATION_PROMPTS = 200  # a quarter of them selects checkpoints where that is done, and is not measured


@dataclass(frozen=True)
class Result:
    """A model after a run, and its row of the table.

    before: pass@1 on the measured questions, before training. entropy: nats per response. damped: share of the imitated
    tokens that SCION damped, over all steps; None where a method damps none. families: pass@1 by data set.
    """

    pass1: float
    pass8: float
    wall_s: float
    steps: int
    before: float
    entropy: float
    damped: float | None
    families: Mapping[str, float]


NUMBERS = ("steps", "before", "entropy", "damped")  # columns after those of the laboratory, before the data sets'
Found = dict[tuple[str, int, str], Result]  # by method, seed and model
_PASS1, _PASS8, _ENTROPY, _DAMPED = map(attrgetter, ("pass1", "pass8", "entropy", "damped"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--methods", default=",".join(METHODS), help="separated by commas; the first is the baseline (%(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0, 1, ... of every method")
    parser.add_argument("--steps", type=int, default=20, help="of a run")
    parser.add_argument("--run", type=Path, default=Path("runs/real-pair"), help="folder of the runs")
    parser.add_argument("--out", type=Path, help="folder of the tables; that of the runs by default")
    parser.add_argument("--keep-weights", action="store_true", help="of every run: 5 GB each")
    given = parser.parse_args()

    console = Console(stderr=True)
    methods, out = given.methods.split(","), given.out or given.run
    found = read_table(out / "real-pair.csv", given.steps)
    for seed in range(given.seeds):  # one run at a time: each takes all cores
        for method in methods:
            if not any(key[:2] == (method, seed) for key in found):
                found |= results_of(method, seed, given, console)
                write_tables(out, found, methods, given.steps)
    write_tables(out, found, methods, given.steps)  # of these methods, though no run was missing
    console.print(str(out / "real-pair.md"), highlight=False, soft_wrap=True)


def results_of(method: str, seed: int, given: argparse.Namespace, console: Console) -> Found:
    """Of a run, which is trained and measured first as far as it is not yet."""
    job = job_of(method, seed, given.steps, given.run / f"{method}-seed{seed}")
    run_jobs([job], workers=1, console=console)
    measures = read_measures(job.folder) or measured_apart(job.folder)
    folder = RunFolder.open(job.folder)
    if folder.checkpoints.exists() and not given.keep_weights:
        shutil.rmtree(folder.checkpoints)
    (run,) = read_runs([job.folder])
    return {
        (method, seed, model): Result(
            of_model.pass1,
            of_model.pass8,
            run.metrics[-1]["wall_s"],
            given.steps,
            read_outcome(run, model).before,
            of_model.entropy,
            damped_share([row["models"][model] for row in run.metrics]),
            of_model.families,
        )
        for model, of_model in measures.items()
    }


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


def read_table(path: Path, steps: int) -> Found:
    """The results of the table that an earlier call wrote.

    Raises:
        RunError: they are of runs of other lengths.
    """
    if not path.exists():
        return {}
    found: Found = {}
    with path.open(encoding="utf-8", newline="") as file:
        table = csv.DictReader(file)
        families = [name for name in table.fieldnames or () if name not in (*MEASURED_COLUMNS, *NUMBERS)]
        missing = [name for name in (*MEASURED_COLUMNS, *NUMBERS) if name not in (table.fieldnames or ())]
        if missing:
            raise RunError(f"{path} has no column {missing[0]!r}: give --out another folder, or mend the table")
        for row in table:
            try:
                found[row["method"], int(row["seed"]), row["model"]] = Result(
                    float(row["pass1"]), float(row["pass8"]), float(row["wall_s"]), int(row["steps"]),
                    float(row["before"]), float(row["entropy"]), float(row["damped"]) if row["damped"] else None,
                    {name: float(row[name]) for name in families},
                )  # fmt: skip
            except (TypeError, ValueError) as error:
                raise RunError(
                    f"{path}, line {table.line_num}: {error}: remove the row, and its run is measured anew"
                ) from error
    other = {result.steps for result in found.values()} - {steps}
    if other:
        raise RunError(f"{path} has runs of {other.pop()} steps, not of {steps}: give --out another folder, or --steps")
    return found


def write_tables(out: Path, found: Found, methods: Sequence[str], steps: int) -> None:
    """Of the runs that have finished so far; the page of the given methods."""
    models = list(dict.fromkeys(model for *_, model in found))
    families = sorted({family for result in found.values() for family in result.families})
    rows = [
        {
            **asdict(result), **result.families, "regime": "real", "pair": "-".join(models), "model": model,
            "method": method, "seed": seed,
        }
        for (method, seed, model), result in sorted(found.items(), key=lambda item: item[0][:2])
    ]  # fmt: skip
    rounded = [{k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    write_text(out / "real-pair.csv", to_csv(rounded, (*MEASURED_COLUMNS, *NUMBERS, *families)))
    trained = [method for method in methods if any(key[0] == method for key in found)]
    before = [
        f"{model} {fmean(result.before for (*_, of), result in found.items() if of == model):.3f}" for model in models
    ]
    table = [
        [model, *_cells(found, [model] if model != BOTH else models, method, methods[0], families)]
        for model in [*models, BOTH]
        for method in trained
    ]
    page = [
        "# Two real models",
        f"SmolLM2-135M-Instruct and Gemma-3-270M, {steps} steps of `recipes/real-pair.yaml`, made by "
        "`python recipes/real_pair/compare.py`. Means over seeds ± half-width of the 95 % t interval, after the last "
        f"step; differences to `{methods[0]}` are paired by seed. Damped: share of the imitated tokens that the "
        "receiver held below SCION's tau, in all of training. Entropy: of the responses to a question, in nats. The "
        "last columns are pass@1 by data set.",
        f"pass@1 before training: {', '.join(before)}.",
        markdown_table(
            [
                *("model", "method", "seeds"),
                *(column for name in ("pass@1", "pass@8", "entropy") for column in (name, f"{name} − {methods[0]}")),
                *("damped", *families),
            ],
            table,
            text_columns=2,
        ),
    ]
    write_text(out / "real-pair.md", "\n\n".join(page) + "\n")


def by_seed(
    found: Found, models: Sequence[str], method: str, value: Callable[[Result], float | None]
) -> dict[int, float]:
    """The mean over models, of the seeds in which it is known."""
    of_seed: dict[int, list[float | None]] = {}
    for (of_method, seed, model), result in found.items():
        if of_method == method and model in models:
            of_seed.setdefault(seed, []).append(value(result))
    known = {seed: [value for value in values if value is not None] for seed, values in of_seed.items()}
    return {seed: sum(values) / len(values) for seed, values in known.items() if len(values) == len(models)}


def _cells(found: Found, models: Sequence[str], method: str, baseline: str, families: Sequence[str]) -> list[str]:
    """A row of the page's table, without the models."""
    cells = [f"`{method}`", str(len(by_seed(found, models, method, _PASS1)))]
    for value in (_PASS1, _PASS8, _ENTROPY):
        ours, theirs = by_seed(found, models, method, value), by_seed(found, models, baseline, value)
        paired = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
        cells.append(plus_minus(*t_interval(list(ours.values()))))
        if method == baseline or not paired:
            cells.append("")
        else:
            test = paired_t_test(*zip(*paired, strict=True))
            cells.append(plus_minus(test.mean, test.half_width, "+"))
    details = [_DAMPED, *(lambda result, f=f: result.families[f] for f in families)]
    for value in details:
        values = list(by_seed(found, models, method, value).values())
        cells.append(plus_minus(*t_interval(values)) if values else "")
    return cells


if __name__ == "__main__":
    try:
        main()
    except GraftrlError as error:
        sys.exit(f"error: {error}")

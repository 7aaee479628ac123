"""Train the pair of `recipes/real-pair.yaml` by several methods with several seeds, and write a table.

    python recipes/real_pair/compare.py        # a run: 10 minutes on two cores, 13 GB of memory
    python recipes/real_pair/compare.py --methods grpo,scion --seeds 1 --steps 2

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
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console

from graftrl.evaluation.intervals import t_interval
from graftrl.evaluation.significance import paired_t_test
from graftrl.lab.jobs import Job, run_jobs
from graftrl.lab.measure import Measures, measure, read_measures
from graftrl.lab.results import BOTH, MEASURED_COLUMNS, to_csv
from graftrl.report.tables import markdown_table, plus_minus
from graftrl.training.run_folder import RunFolder, write_text

RECIPE = Path(__file__).parent.parent / "real-pair.yaml"
STEP_S = 30.0  # on two cores
VALIDATION_PROMPTS = 200  # a quarter of them selects checkpoints where that is done, and is not measured

Found = Mapping[tuple[str, int], Mapping[str, Measures]]  # (method, seed) -> model -> measures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--methods", default="grpo,scion,sgt,graft", help="separated by commas; the first is the baseline"
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... of every method")
    parser.add_argument("--steps", type=int, default=20, help="of a run")
    parser.add_argument("--run", type=Path, default=Path("runs/real-pair"), help="folder of the runs")
    parser.add_argument("--out", type=Path, help="folder of the tables; that of the runs by default")
    parser.add_argument("--keep-weights", action="store_true", help="of every run: 5 GB each")
    given = parser.parse_args()

    console = Console(stderr=True)
    methods = given.methods.split(",")
    found: dict[tuple[str, int], dict[str, Measures]] = {}
    wall_s: dict[tuple[str, int], float] = {}
    for seed in range(given.seeds):  # one run at a time: each takes all cores
        for method in methods:
            job = job_of(method, seed, given.steps, given.run / f"{method}-seed{seed}")
            run_jobs([job], workers=1, console=console)
            measured = read_measures(job.folder) or measured_apart(job.folder)
            run = RunFolder.open(job.folder)
            if run.checkpoints.exists() and not given.keep_weights:
                shutil.rmtree(run.checkpoints)
            found[method, seed], wall_s[method, seed] = measured, run.read_metrics()[-1]["wall_s"]
            write_tables(given.out or given.run, found, wall_s, methods, given.steps)
    console.print(str((given.out or given.run) / "real-pair.md"), highlight=False, soft_wrap=True)


def job_of(method: str, seed: int, steps: int, folder: Path) -> Job:
    changes = (
        f"method={method}", f"seed={seed}", f"training.steps={steps}", f"checkpoint.every={steps}",
        f"task.validation_size={VALIDATION_PROMPTS}", f"evaluation.prompts={VALIDATION_PROMPTS}",
    )  # fmt: skip
    return Job(f"{method} seed {seed}", RECIPE, changes, folder, expected_s=STEP_S * steps)


def measured_apart(folder: Path) -> dict[str, Measures]:
    """In a process of its own, which gives the models' memory back before the next run needs it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, folder).result()


def write_tables(
    out: Path, found: Found, wall_s: Mapping[tuple[str, int], float], methods: Sequence[str], steps: int
) -> None:
    """Of the runs that have finished so far."""
    rows = [
        {
            "regime": "real", "pair": "smollm2-gemma3", "model": model, "method": method, "seed": seed,
            "pass1": round(of_model.pass1, 6), "pass8": round(of_model.pass8, 6),
            "wall_s": round(wall_s[method, seed], 3),
        }
        for (method, seed), measured in sorted(found.items())
        for model, of_model in measured.items()
    ]  # fmt: skip
    write_text(out / "real-pair.csv", to_csv(rows, MEASURED_COLUMNS))
    models = [*next(iter(found.values())), BOTH]
    table = [
        cells for model in models for method in methods if (cells := _row(found, model, method, methods[0])) is not None
    ]
    page = [
        "# Two real models",
        f"SmolLM2-135M-Instruct and Gemma-3-270M, {steps} steps of `recipes/real-pair.yaml`, made by "
        "`python recipes/real_pair/compare.py`. Means over seeds ± half-width of the 95 % t interval, after the last "
        f"step; differences to `{methods[0]}` are paired by seed.",
        markdown_table(["model", "method", "seeds", "pass@1", f"− {methods[0]}", "pass@8", "entropy"], table, 2),
    ]
    write_text(out / "real-pair.md", "\n\n".join(page) + "\n")


def _row(found: Found, model: str, method: str, baseline: str) -> list[str] | None:
    """None where no run of the method has finished."""

    def mean(measured: Mapping[str, Measures], name: str) -> float:
        chosen = list(measured.values()) if model == BOTH else [measured[model]]
        return sum(float(getattr(of_model, name)) for of_model in chosen) / len(chosen)

    ours = {seed: measured for (m, seed), measured in found.items() if m == method}
    if not ours:
        return None
    row = [model, f"`{method}`", str(len(ours)), plus_minus(*t_interval([mean(m, "pass1") for m in ours.values()]))]
    shared = [seed for seed in ours if (baseline, seed) in found]
    if method == baseline or not shared:
        row.append("")
    else:
        theirs = [mean(found[baseline, seed], "pass1") for seed in shared]
        test = paired_t_test([mean(ours[seed], "pass1") for seed in shared], theirs)
        row.append(plus_minus(test.mean, test.half_width, "+"))
    return row + [plus_minus(*t_interval([mean(m, name) for m in ours.values()])) for name in ("pass8", "entropy")]


if __name__ == "__main__":
    main()

"""Train the pair of `recipes/real-pair.yaml` by several methods with several seeds, and write a table.

    python recipes/real_pair/compare.py        # a run: 10 minutes on two cores, 13 GB of memory, 5 GB of disk
    python recipes/real_pair/compare.py --methods grpo,scion --seeds 1 --steps 2

Runs lie in `runs/real-pair/METHOD-seedN` and are resumed, never repeated. `runs/real-pair/real-pair.csv` has a row per
model, method and seed, with the columns of the laboratory's tables; pass1 and pass8 are unbiased estimates from 8
responses to each measured question after the last step. `graftrl report runs/real-pair/*-seed*` makes a page of curves.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from graftrl.lab.jobs import Job, run_jobs
from graftrl.lab.measure import measure, read_measures
from graftrl.lab.results import MEASURED_COLUMNS, to_csv
from graftrl.training.run_folder import RunFolder, write_text

RECIPE = Path(__file__).parent.parent / "real-pair.yaml"
RUN_S = 600.0  # of four steps on two cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", default="grpo,graft,sgt,scion", help="separated by commas")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... of every method")
    parser.add_argument("--steps", type=int, default=4, help="of a run")
    parser.add_argument("--run", type=Path, default=Path("runs/real-pair"), help="folder of the runs")
    given = parser.parse_args()

    methods = given.methods.split(",")
    folders = {(m, seed): given.run / f"{m}-seed{seed}" for seed in range(given.seeds) for m in methods}
    jobs = [
        Job(
            name=f"{method} seed {seed}",
            recipe=RECIPE,
            overrides=(
                f"method={method}", f"seed={seed}", f"training.steps={given.steps}", f"checkpoint.every={given.steps}",
            ),
            folder=folder,
            expected_s=RUN_S * given.steps / 4,
        )
        for (method, seed), folder in folders.items()
    ]  # fmt: skip
    run_jobs(jobs, workers=1, console=Console(stderr=True))

    table = []
    for (method, seed), folder in folders.items():
        measured = read_measures(folder) or measure(folder)
        last = RunFolder.open(folder).read_metrics()[-1]
        table += [
            {
                "regime": "real", "pair": "smollm2-gemma3", "model": model, "method": method, "seed": seed,
                "pass1": round(of_model.pass1, 6), "pass8": round(of_model.pass8, 6),
                "wall_s": round(last["wall_s"], 3),
            }
            for model, of_model in measured.items()
        ]  # fmt: skip
    path = given.run / "real-pair.csv"
    write_text(path, to_csv(table, MEASURED_COLUMNS))
    print(path)


if __name__ == "__main__":
    main()

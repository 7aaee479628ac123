"""`graftrl lab STUDY ...`: reproduce the tables of the laboratory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from graftrl.lab.studies import SEEDS, STUDIES

_STUDY_HELP = "; ".join(f"{name}: {study.title.lower()}" for name, study in STUDIES.items())


def lab(
    studies: Annotated[list[str], typer.Argument(metavar="STUDY ...", help=f"{_STUDY_HELP}; or all.")],
    run: Annotated[Path, typer.Option(help="Folder of all runs; every study shares it.")] = Path("runs/lab"),
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where pages, plots and lab.csv go; by default docs/results, or beside the runs if seeds, pairs or "
            "steps are reduced.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help=f"Seeds 0, 1, ... of every method; {SEEDS} in most studies.", show_default=False),
    ] = None,
    pairs: Annotated[
        list[str] | None, typer.Option(help="Pairs instead of the study's, such as A-B,A-C.", show_default=False)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps instead of the recipe's, for a reduced run.", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Runs side by side, one CPU thread each.")] = 2,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs with their expected time.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
    tables_only: Annotated[
        bool, typer.Option("--tables-only", help="Train nothing: make the pages from the runs that have finished.")
    ] = False,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Open the pairs that are kept until a rule is frozen.")
    ] = False,
    holm: Annotated[bool, typer.Option(help="Correct the verdicts for the number of comparisons.")] = True,
    recipe: Annotated[Path, typer.Option(help="What the laboratory's settings are put on.")] = Path(
        "recipes/quickstart.yaml"
    ),
) -> None:
    """Reproduce a table of the laboratory: train what is missing, then write its page, plots and raw numbers.

    Safe to stop and to call again: finished runs are kept, interrupted ones continued.
    """
    from graftrl.errors import ConfigError
    from graftrl.lab.harness import Options, list_runs, planned_runs, run_lab

    names = tuple(name for given in pairs or () for name in given.split(",") if name)
    options = Options(recipe, run, out, seeds, names, steps, workers, corrected=holm, held_out=held_out)
    if as_json and not dry_run:
        raise ConfigError("--json belongs to --dry-run; the numbers of a study are in its lab.csv")
    if as_json:
        typer.echo(json.dumps(planned_runs(studies, options), indent=2))
    elif dry_run:
        list_runs(studies, options)
    else:
        run_lab(studies, options, tables_only=tables_only)

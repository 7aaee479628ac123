"""`graftrl logs`: what is in a rollout log, what is wrong with it, and how logs of other programs become one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from graftrl.errors import DataError

app = typer.Typer(help="Rollout logs: inspect, validate, import, score, merge.", no_args_is_help=True)

LogArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="A run folder, a folder of Parquet files, or one file.")
]


@app.command()
def inspect(
    path: LogArgument, as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not tables.")] = False
) -> None:
    """Show models, steps, prompts, successes, sampling settings and what is missing."""
    from graftrl.logs.summary import headline, summarize, tables

    summary = summarize(path)
    if as_json:
        typer.echo(json.dumps(summary, ensure_ascii=False, indent=2, allow_nan=False))
        return
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    console.print(headline(summary), markup=False)
    for table in tables(summary):
        console.print()
        console.print(table)


@app.command()
def validate(
    path: LogArgument,
    most: Annotated[int, typer.Option("--most", min=1, help="Problems to print; the rest is counted.")] = 50,
) -> None:
    """List torn files, faulty rows, duplicates and uneven groups; fails when there are any."""
    from graftrl.logs.validate import validate_log

    count = 0
    for problem in validate_log(path):
        count += 1
        if count <= most:
            typer.echo(str(problem))
    if count > most:
        typer.echo(f"... and {count - most} more; --most prints more of them")
    if count:
        raise DataError(f"{path}: {count} problem{'s' if count > 1 else ''} found")
    typer.echo(f"{path}: no problem found")

"""The command `graftrl report`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graftrl.urls import readable


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN ...",
            help="Run folders, or folders that hold runs, such as runs/lab; or a run's URL.",
            show_default=False,
            parser=readable("tables"),
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The page; default report.html in RUN, of several in this folder.", show_default=False),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Of the page.", show_default=False)] = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write every plot as PNG and SVG.", show_default=False)
    ] = None,
    tables: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write every table as Markdown and LaTeX.", show_default=False),
    ] = None,
) -> None:
    """Write one HTML page about runs: learning curves, exchange, scores, clipping, cost, side by side."""
    from graftrl.report.command import run_report

    for file in run_report(runs, out=out, title=title, plots=plots, tables=tables):
        typer.echo(str(file))

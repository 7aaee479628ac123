"""The command `graftrl doctor`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE.yaml]", help="Check its models too.", show_default=False)
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Check this model too: a hub id, a directory or a .gguf; may be repeated."),
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Load weights too: is a BOS missing, does the head fit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at versions, devices, threads, disk and the usual traps of models. Exit code 2 if there is a problem."""
    from graftrl.doctor.command import run_doctor

    run_doctor(recipe, model or (), weights=weights, as_json=as_json)

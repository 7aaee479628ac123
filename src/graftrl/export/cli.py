"""The command `graftrl export`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    source: Annotated[
        str, typer.Argument(metavar="RUN[:MODEL[@STEP]]", help="Default: the best checkpoint, else the last.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder to write; of several models, with a folder each.", show_default=False)
    ],
) -> None:
    """Write trained models as folders for from_pretrained, also from a checkpoint in parts (checkpoint.format)."""
    from transformers.utils import logging as transformers_logging

    from graftrl.export.command import export as run_export

    transformers_logging.disable_progress_bar()
    written, notes = run_export(source, out)
    for folder in written:
        typer.echo(str(folder))
    for note in notes:
        typer.echo(f"note: {note}")

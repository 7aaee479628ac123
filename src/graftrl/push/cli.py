"""The command `graftrl push`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def push(
    source: Annotated[
        str, typer.Argument(metavar="RUN[:MODEL[@STEP]]", help="Default: the best checkpoint, else the last.")
    ],
    repo: Annotated[str | None, typer.Argument(metavar="[USER/NAME]", help="On the hub.", show_default=False)] = None,
    card_only: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the folder here; do not upload.", show_default=False)
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Hub id of the model it was trained from, where the recipe has a path."),
    ] = None,
    license_id: Annotated[
        str | None, typer.Option("--license", metavar="ID", help="For the card, such as apache-2.0.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
) -> None:
    """Put a trained model on the hub, with a card of its method, data, results and provenance."""
    from graftrl.push.command import PushRequest
    from graftrl.push.command import push as run_push

    place, notes = run_push(PushRequest(source, repo, card_only, private, license_id, base_model))
    typer.echo(place)
    for note in notes:
        typer.echo(f"note: {note}")

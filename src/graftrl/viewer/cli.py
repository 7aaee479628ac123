"""The command `graftrl view`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graftrl.urls import readable


def view(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN ...",
            help="Run folders, folders that hold runs, or rollout logs; or a run's URL.",
            show_default=False,
            parser=readable("tables"),
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Look at prompts, responses, token log-probabilities, and what was exchanged and why, on a local page."""
    import contextlib
    import os
    import sys
    import webbrowser

    from graftrl.viewer.runs import open_runs
    from graftrl.viewer.server import ViewServer

    with ViewServer(open_runs(runs), port) as server:
        typer.echo(f"{server.url} (Ctrl-C ends)")
        # Without a desktop, Python would start a browser in this terminal.
        desktop = sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
        if browser and desktop:
            webbrowser.open(server.url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()

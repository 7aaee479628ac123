"""`graftrl report`: the page, and its plots and tables as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graftrl.report import plots as drawing
from graftrl.report import summary
from graftrl.report.data import find_runs, join_seeds, read_runs
from graftrl.report.html import render_report
from graftrl.training.remote import is_copy
from graftrl.training.run_folder import disk_errors, write_text

_NAMED = 4  # folders in a title


def run_report(
    paths: Sequence[Path],
    *,
    out: Path | None = None,
    title: str | None = None,
    plots: Path | None = None,
    tables: Path | None = None,
) -> list[Path]:
    """Write the page about all runs at some paths, and what else was asked for; returns the files, the page first.

    Raises:
        RunError: no run there, a torn file, a full disk. DataError: a torn log. ConfigError: matplotlib is missing.
    """
    drawing.require_matplotlib()
    runs = join_seeds(read_runs(find_runs(paths), presets=True))
    page = out or (paths[0] if len(paths) == 1 and not is_copy(paths[0]) else Path()) / "report.html"
    figures, found = drawing.drawn(runs), summary.tables_of(runs)
    names = list(dict.fromkeys(path.resolve().name for path in paths))
    named = ", ".join(names) if len(names) <= _NAMED else f"{sum(len(run.parts) for run in runs)} runs"
    text = render_report(runs, title or f"graftrl: {named}", figures, found)
    with disk_errors(page.parent, again="write the report again", option="--out"):
        write_text(page, text)
    written = [page]
    if plots is not None:
        with disk_errors(plots, again="write the report again", option="--plots"):
            written += drawing.save(figures, plots)
    if tables is not None:
        with disk_errors(tables, again="write the report again", option="--tables"):
            written += summary.write_tables(found, tables)
    return written

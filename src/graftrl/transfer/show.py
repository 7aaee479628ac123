"""Proxy pairs as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from graftrl.transfer.pairs import ProxyPair


def table(pairs: Sequence[tuple[Path, ProxyPair]]) -> Table:
    made = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for column in ("pair", "model", "made by"):
        made.add_column(column, overflow="fold")
    for column in ("step", "size", "before", "after", "gain"):
        made.add_column(column, justify="right", no_wrap=True)
    for folder, pair in pairs:
        p, gain = pair.provenance, pair.gain
        numbers = ("", "", "not measured")
        if gain is not None:
            numbers = (f"{gain.before:.3f}", f"{gain.after:.3f}", gain.text)
        size = f"{pair.parameters / 1e6:,.2f} M{' + LoRA' if pair.expert.adapter else ''}"
        made.add_row(folder.name, p.model, p.method, str(p.step), size, *numbers)
    return made

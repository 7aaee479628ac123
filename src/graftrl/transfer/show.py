"""Proxy pairs as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from graftrl.transfer.pairs import ProxyPair


def print_pairs(pairs: Sequence[tuple[Path, ProxyPair]]) -> None:
    """A row for each pair: of which model, made how, and pass@1 on its run's validation prompts."""
    made = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for column in ("pair", "model", "made by"):
        made.add_column(column, overflow="fold")
    for column in ("step", "size", "pass@1", "gain"):
        made.add_column(column, justify="right", no_wrap=True)
    for folder, pair in pairs:
        p, gain = pair.provenance, pair.gain
        numbers = ("", "not measured") if gain is None else (f"{gain.before:.3f} → {gain.after:.3f}", gain.text)
        size = f"{pair.parameters / 1e6:,.2f} M{' + LoRA' if pair.expert.adapter else ''}"
        made.add_row(folder.name, p.model, p.method, str(p.step), size, *numbers)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # a pipe has no width; a table must not be cut to 80 columns
    console.print(made)

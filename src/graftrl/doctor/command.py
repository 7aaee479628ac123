"""`graftrl doctor`, put together and printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils import logging as transformers_logging

from graftrl.config import load_recipe
from graftrl.doctor.findings import Finding
from graftrl.doctor.machine import GIB, check_machine, check_space, describe
from graftrl.doctor.models import check_model, check_models, settings_of
from graftrl.errors import ConfigError
from graftrl.names import model_names

_STYLE = {"ok": "green", "note": "yellow", "problem": "red"}


def run_doctor(
    recipe: Path | None, models: Sequence[str] = (), *, weights: bool = False, as_json: bool = False
) -> None:
    """Raises ConfigError when there is a problem, after everything is printed."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    facts = describe(Path("runs"))
    findings = list(check_machine(facts))
    if recipe is not None:
        loaded = load_recipe(recipe)
        found, size = check_models(loaded, weights=weights)
        findings += found
        if size:  # the newest ones, the best, and the one being written
            findings.append(check_space(facts, size, loaded.checkpoint.keep + 2))
    for name, path in zip(model_names(models), models, strict=True):
        findings += check_model(name, settings_of(path), weights=weights)[0]
    if as_json:
        typer.echo(json.dumps({**facts, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print(facts, findings)
    problems = sum(finding.level == "problem" for finding in findings)
    if problems:
        raise ConfigError(f"doctor found {problems} problem{'s' if problems > 1 else ''}")


def _print(facts: Mapping[str, Any], findings: Sequence[Finding]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = 160  # a pipe has no width
    installed = {name: found for name, found in facts["packages"].items() if found is not None}
    absent = [name for name, found in facts["packages"].items() if found is None]
    console.print(f"graftrl {facts['graftrl']}, Python {facts['python']}, {facts['platform']}")
    console.print(", ".join(f"{name} {found}" for name, found in installed.items()))
    if absent:
        console.print(f"not installed: {', '.join(absent)}", style="dim")
    console.print(
        f"{facts['cores']:g} cores, {facts['memory_bytes'] / GIB:.1f} GiB of memory, "
        f"{facts['memory_available_bytes'] / GIB:.1f} GiB available"
    )
    console.print()
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        cells = (finding.level, finding.about, finding.check, finding.message)
        table.add_row(*(Text(cell, style=_STYLE[finding.level] if cell is cells[0] else "") for cell in cells))
    console.print(table)

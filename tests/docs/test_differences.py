"""The table of defaults says what the programs do."""

import re
from pathlib import Path

import pytest
import yaml

from graftrl.config import parse_recipe

ROOT = Path(__file__).parents[2]


def rows():
    """setting -> the six cells: option and default here, in TRL, in verl."""
    page = (ROOT / "docs" / "differences.md").read_text()
    table = page.partition("## Defaults")[2].partition("\n## ")[0]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:2] == "| "]
    return {cells[0]: cells[1:] for cells in found[1:]}


def option(cell):
    name = re.match(r"`([\w.]+)`", cell)
    return name and name[1]


def default(cell):
    return re.sub(r" \(.*\)$", "", cell.strip("*"))


def dig(found, dotted):
    for part in dotted.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    return found


def check(settings, option_cell, default_cell):
    name = option(option_cell)
    if name is None:
        return 0
    found = dig(settings, name)
    found = getattr(found, "value", found)
    assert str(found) == default(default_cell), name
    return 1


def test_defaults_are_those_of_the_code():
    recipe = parse_recipe(
        {
            "name": "defaults",
            "method": "grpo",
            "models": {"A": {"path": "somewhere"}},
            "task": {"kind": "hidden_programs"},
            "training": {"steps": 1},
        },
        "test",
    )
    checked = sum(check(recipe, *cells[0:2]) for cells in rows().values())
    assert checked >= 20


def test_defaults_are_those_of_trl():
    pytest.importorskip("trl")
    from trl import GRPOConfig

    config = GRPOConfig("unused", bf16=False, report_to="none")
    assert sum(check(config, *cells[2:4]) for cells in rows().values()) >= 18


def test_defaults_are_those_of_verl():
    verl = pytest.importorskip("verl")
    config = yaml.safe_load(
        (Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml").read_text()
    )
    assert sum(check(config, *cells[4:6]) for cells in rows().values()) >= 18

"""The reference says what the code does."""

import re
from pathlib import Path

from graftrl import errors
from graftrl.cli import app

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def test_every_class_of_error_is_listed_with_its_exit_code():
    listed = {}
    for code, raised in re.findall(
        r"^\| (\d+) \|.*\| ([^|]*) \|$", (REFERENCE / "exit-codes.md").read_text(), re.MULTILINE
    ):
        listed |= {name: int(code) for name in re.findall(r"`(\w+)`", raised)}
    classes = {c.__name__: c.exit_code for c in errors.GraftrlError.__subclasses__() if c.__module__ == errors.__name__}
    assert listed == classes


def test_every_command_is_listed():
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    names |= {group.name for group in app.registered_groups}
    table = (REFERENCE / "command-line.md").read_text().partition("## JSON")[0]
    listed = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))))
    assert listed == names

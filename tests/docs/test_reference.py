"""The reference says what the code does."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def maker():
    """tools/reference.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("reference_maker", REFERENCE.parents[1] / "tools" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.mark.parametrize("page", ["recipe", "commands"])
def test_the_lists_of_options_are_those_of_the_code(maker, page):
    stored = (REFERENCE / f"{page}.md").read_text(encoding="utf-8")
    assert stored == getattr(maker, f"{page}_page")(), f"docs/reference/{page}.md is out of date: run make reference"


def test_an_option_without_a_meaning_is_named(maker):
    class Undocumented(maker.DataSource):
        """Rows.

        limit: how many.
        """

        extra: int = 1

    assert maker.meaning_of(Undocumented, "limit") == "how many."
    assert maker.meaning_of(Undocumented, "split") == "of the hub data set."  # from the class that it extends
    with pytest.raises(LookupError, match=r"Undocumented\.extra has no meaning"):
        maker.meaning_of(Undocumented, "extra")


def test_docstrings_are_taken_apart_at_lines_and_sentences(maker):
    text = """What it is: a thing.

    a: one. b, c: two, with
        d: inside. And more.
    d: three; e: no field.

    The end.
    """
    rest, meanings = maker.taken_apart(text, ["a", "b", "c", "d"])
    assert rest == "What it is: a thing.\n\nThe end."
    assert meanings == {"a": "one.", "b": "two, with d: inside. And more.", "c": "two, with d: inside. And more.",
                        "d": "three; e: no field."}  # fmt: skip

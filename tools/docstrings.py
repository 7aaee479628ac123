"""Docstrings of classes say what their fields are, as `name: meaning` or `name, other: meaning`; here they are read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable


def taken_apart(docstring: str, names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """The text before the first field, and name -> meaning in one line.

    A field begins at the start of a line or sentence, and ends with the next one or the paragraph.

    Args:
        names: of the fields; any other word before a colon is text.
    """
    text = inspect.cleandoc(docstring)
    name = "(?:" + "|".join(map(re.escape, names)) + ")"
    begins = list(re.finditer(rf"(?:(?<=\. )|(?<=\.\n)|^)({name}(?:, {name})*):\s", text, re.MULTILINE))
    if not begins:
        return text, {}
    meanings: dict[str, str] = {}
    rest = ""
    for begin, after in zip(begins, [*begins[1:], None], strict=True):
        meaning = text[begin.end() : after.start() if after else len(text)]
        meaning, _, beyond = meaning.partition("\n\n")
        rest += f"\n\n{beyond.strip()}" if beyond.strip() else ""
        for each in begin[1].split(", "):
            meanings[each] = " ".join(meaning.split())
    return text[: begins[0].start()].strip() + rest, meanings

"""Extension of griffe, which reads the docstrings for the site: the fields of a class become a table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from griffe import Class, Extension

sys.path.insert(0, str(Path(__file__).parent))

from docstrings import taken_apart


class Fields(Extension):
    def on_class(self, *, cls: Class, **_: Any) -> None:
        if cls.docstring is None:
            return
        names = [name for name, member in cls.members.items() if member.is_attribute and not name.startswith("_")]
        text, meanings = taken_apart(cls.docstring.value, names) if names else ("", {})
        if meanings:
            listed = "\n".join(f"    {name}: {meaning}" for name, meaning in meanings.items())
            cls.docstring.value = f"{text}\n\nAttributes:\n{listed}"

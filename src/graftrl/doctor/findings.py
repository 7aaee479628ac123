"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """level: "problem" would spoil a run; "note" is worth knowing. about: the machine, or a model by name. check: what
    was looked at, one of a fixed set of words. message: one line; of a problem also how to mend it."""

    level: Level
    about: str
    check: str
    message: str

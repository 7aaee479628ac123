"""Tasks: prompts plus verification in a killable pool.

Names are imported on first use: a verification worker imports this package too and must start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graftrl.tasks.base import Grade, Task, Verifier
    from graftrl.tasks.build import build_task
    from graftrl.tasks.math import MathVerifier
    from graftrl.tasks.pool import VerificationPool, grade_groups

_HOMES = {
    "Grade": "base",
    "MathVerifier": "math",
    "Task": "base",
    "VerificationPool": "pool",
    "Verifier": "base",
    "build_task": "build",
    "grade_groups": "pool",
}

__all__ = ["Grade", "MathVerifier", "Task", "VerificationPool", "Verifier", "build_task", "grade_groups"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

"""Code of the user's own, which a recipe names as `module:name`."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

from graftrl.errors import ConfigError


def import_named(path: str) -> Any:
    """What `module:name` names; the working directory is importable.

    Raises:
        ConfigError: no such module or name, or the module raises while it is imported; says the file and line.
    """
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing runs the user's code: anything can be raised
        raise ConfigError(
            f"cannot import {path!r}: {type(error).__name__}: {error}{_place(error, module_name)}"
        ) from error
    return found


def _place(error: Exception, module_name: str) -> str:
    """Where it happened, if in a file of the user's; where a module is looked for, if there is none."""
    if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
        return f"; it must be a file in the working directory ({Path.cwd()}) or installed"
    frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in f.filename]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""

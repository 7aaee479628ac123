"""A new folder of log files that is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from graftrl.errors import DataError


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that takes its name when the block ends, and is removed when it fails.

    Raises:
        DataError: `out` exists and is not an empty folder.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"{out}: exists already; choose another --out or remove it")
    temporary = out.parent / f".{out.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.replace(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise

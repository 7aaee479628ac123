"""Writing log files: a new folder is there as a whole or not at all, and a full disk is one clear line."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from graftrl.errors import DataError, RunError


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that takes its name when the block ends, and is removed when it fails.

    Raises:
        DataError: `out` exists and is not an empty folder.
        RunError: it cannot be written.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"{out}: exists already; choose another --out or remove it")
    temporary = out.parent / f".{out.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    with writing(out):
        temporary.mkdir(parents=True)
    try:
        yield temporary
        with writing(out):
            temporary.replace(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raises RunError where the system refuses to write: a full disk, a folder without permission."""
    try:
        yield
    except (OSError, pl.exceptions.ComputeError) as error:
        raise RunError(f"{out}: cannot be written: {str(error).splitlines()[0]}") from error

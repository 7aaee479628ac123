"""Runs at URLs as command line arguments. Nothing heavy is imported before one is given."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from graftrl.errors import ConfigError


def is_url(where: Path | str) -> bool:
    """Whether it has a scheme, such as s3:// or memory://."""
    return isinstance(where, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", where) is not None


def readable(wanted: Literal["tables", "responses"]) -> Callable[[str], Path]:
    """A parser of arguments: a path as it is; of a run at a URL, the path of a copy that is brought up to date.

    wanted: "responses" for a rollout log alone; "tables" for everything but weights.
    """

    def path_or_url(argument: str) -> Path:
        if not is_url(argument):
            return Path(argument)
        from graftrl.training import remote

        return remote.read_run(argument, getattr(remote, f"is_of_{wanted}")).root

    return path_or_url


def local(argument: str) -> Path:
    """A parser of arguments that cannot be URLs. Raises ConfigError for one."""
    if is_url(argument):
        raise ConfigError(f"{argument}: this command works on this machine's files alone; copy them here first")
    return Path(argument)

"""Errors a user can mend. The command line prints each as one line and exits with `exit_code`."""

from __future__ import annotations

from collections.abc import Iterable


class GraftrlError(Exception):
    """Base of every error that graftrl raises on purpose: one line that says what, where and how to mend it."""

    exit_code = 2


class ConfigError(GraftrlError):
    """A recipe, an override or a combination of settings that cannot work."""


class DataError(GraftrlError):
    """A data set, log or response file that cannot be read or holds nothing usable."""


class ModelError(GraftrlError):
    """A model or tokenizer that is missing, cannot be loaded or does not do what a policy needs."""


class RunError(GraftrlError):
    """A run folder that is in use, incomplete or does not belong to this recipe; a full disk."""

    exit_code = 3


class WorkerLost(RunError):
    """A process of the run's engine that died or does not answer. What was saved is whole; new workers can go on.

    models: whose workers they are; empty where nobody can say.
    """

    def __init__(self, message: str, models: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.models = frozenset(models)


class NumericsError(GraftrlError):
    """A number that must not enter an update: a non-finite loss or gradient, a log-probability mismatch."""

    exit_code = 4

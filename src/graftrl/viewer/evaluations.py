"""Evaluations (`graftrl eval`) among the folders of a user: one entry for each benchmark that has responses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graftrl.chunks import EVALUATION

_NOT_BELOW = ("rollouts", "checkpoints", "exchange")  # folders of many files in which no evaluation lies


@dataclass(frozen=True)
class EvaluatedBenchmark:
    """folder: of the evaluation. models: what its record says of each, by name."""

    folder: Path
    benchmark: str
    models: Mapping[str, Any] = field(compare=False)

    @property
    def pattern(self) -> str:
        """Of its files, below the folder."""
        return f"rollouts/*/{self.benchmark}/run-*-chunk-*.parquet"


def find_evaluations(path: Path) -> list[EvaluatedBenchmark]:
    """The evaluations at a path and anywhere below it, inside of runs too, as far as they have responses.

    Raises:
        RunError: an eval.yaml that `graftrl eval` did not write.
    """
    found: list[EvaluatedBenchmark] = []
    for parent, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if name not in _NOT_BELOW and not name.startswith("."))
        if EVALUATION.file in files:
            folder = Path(parent)
            held = EVALUATION.read(folder)
            asked = {} if held is None else held[0]
            of_folder = [EvaluatedBenchmark(folder, name, asked["models"]) for name in asked.get("benchmarks", {})]
            found += [each for each in of_folder if next(folder.glob(each.pattern), None) is not None]
    return found

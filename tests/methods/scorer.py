"""A stand-in for the receivers' models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from graftrl.rollout import Row


class Scorer:
    """Stands for the receivers' models: one log-probability for every token, and a count of the calls."""

    def __init__(self, logprob: float | Callable[[Row], float]) -> None:
        self.logprob = logprob
        self.calls: list[str] = []

    def __call__(self, model: str, rows: Sequence[Row]) -> list[np.ndarray]:
        self.calls.append(model)
        value = self.logprob if callable(self.logprob) else lambda row: self.logprob
        return [np.full(len(row.response_token_ids), value(row), np.float32) for row in rows]

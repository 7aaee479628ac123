"""Uncertainty of a score: over training seeds (Student's t) and over problems (bootstrap)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def t_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float | None]:
    """Mean and half-width of the two-sided t interval; the half-width is None for fewer than two values."""
    data = np.asarray(values, dtype=np.float64)
    if len(data) == 0:
        raise ValueError("an interval needs at least one value")
    if len(data) == 1:
        return float(data[0]), None
    from scipy import stats  # late: a second of start-up that most commands need not spend

    half = stats.t.ppf(0.5 + level / 2, len(data) - 1) * data.std(ddof=1) / math.sqrt(len(data))
    return float(data.mean()), float(half)


def paired_t_interval(
    first: Sequence[float], second: Sequence[float], level: float = 0.95
) -> tuple[float, float | None]:
    """Interval of the mean difference first - second, paired by position (same seed)."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values paired with {len(second)}")
    return t_interval([a - b for a, b in zip(first, second, strict=True)], level)


def bootstrap_interval(
    scores: Sequence[float], level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Mean, lower and upper bound by resampling problems with replacement (percentile bootstrap).

    Args:
        scores: one value per problem, such as its share of right samples.
    """
    data = np.asarray(scores, dtype=np.float64)
    if len(data) == 0:
        raise ValueError("an interval needs at least one problem")
    rng = np.random.default_rng(seed)
    means = data[rng.integers(len(data), size=(resamples, len(data)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(data.mean()), float(low), float(high)

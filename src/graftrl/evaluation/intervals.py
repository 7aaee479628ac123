"""Uncertainty of a score: over training seeds (Student's t), over problems (bootstrap), of a share (Wilson)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

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


def wilson_interval(successes: int, trials: int, level: float = 0.95) -> tuple[float, float, float]:
    """Share, lower and upper bound of a binomial proportion (Wilson, 1927: the score interval).

    Never empty and never outside [0, 1], also for no success or no failure, where the normal approximation fails.

    Raises:
        ValueError: no trial, or not 0 <= successes <= trials.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes in {trials} trials")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share, shrink = successes / trials, 1 + z * z / trials
    middle = (share + z * z / (2 * trials)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else middle - half  # exactly the end of the range there, not a rounding residue
    high = 1.0 if successes == trials else middle + half
    return share, low, high

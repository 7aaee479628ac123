"""Uncertainty of a score: over training seeds (Student's t), over problems (bootstrap), of a share (Wilson)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_DRAWN_AT_ONCE = 8_000_000  # problems that a bootstrap holds at once


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float


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
        scores: one value per problem, such as its share of right samples, or the difference of two models' shares.
    """
    return stratified_bootstrap_interval([scores], level, resamples, seed)


def stratified_bootstrap_interval(
    strata: Sequence[Sequence[float]], level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """The same for the unweighted mean of several means, such as a score over benchmarks: problems are resampled within
    each.

    Args:
        strata: of each benchmark one value per problem.

    Raises:
        ValueError: no benchmark, or one without a problem.
    """
    data = [np.asarray(scores, dtype=np.float64) for scores in strata]
    if not data or any(len(scores) == 0 for scores in data):
        raise ValueError("an interval needs at least one problem")
    rng = np.random.default_rng(seed)
    drawn = [_resampled_means(scores, resamples, rng) for scores in data]
    low, high = np.quantile(np.mean(drawn, axis=0), [(1 - level) / 2, (1 + level) / 2])
    return float(np.mean([scores.mean() for scores in data])), float(low), float(high)


def _resampled_means(scores: NDArray[np.float64], resamples: int, rng: np.random.Generator) -> NDArray[np.float64]:
    at_once = max(1, _DRAWN_AT_ONCE // len(scores))
    blocks = (min(at_once, resamples - start) for start in range(0, resamples, at_once))
    return np.concatenate([scores[rng.integers(len(scores), size=(rows, len(scores)))].mean(axis=1) for rows in blocks])


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

"""Is one method better than another? Student's t on differences paired by seed, and Holm's correction for several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from graftrl.evaluation.intervals import paired_t_interval


@dataclass(frozen=True)
class PairedTest:
    """mean: of the differences. half_width: of their 95 % t interval. p: two-sided, of mean difference 0. n: pairs.

    half_width and p are None for a single pair.
    """

    mean: float
    half_width: float | None
    p: float | None
    n: int


def paired_t_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """The paired t-test of first - second, paired by position (same seed). Equal differences give p = 0, or 1 if zero.

    Raises:
        ValueError: no values, or not as many in both.
    """
    mean, half_width = paired_t_interval(first, second)
    n = len(first)
    if half_width is None:
        return PairedTest(mean, None, None, n)
    differences = [a - b for a, b in zip(first, second, strict=True)]
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1))
    if deviation == 0.0:
        return PairedTest(mean, half_width, 1.0 if mean == 0.0 else 0.0, n)
    from scipy import stats  # late, as in `intervals`

    p = 2 * stats.t.sf(abs(mean) / (deviation / math.sqrt(n)), n - 1)
    return PairedTest(mean, half_width, float(p), n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of Holm (1979), in the order given: those at most alpha are significant at the family-wise
    error rate alpha. Sorted ascending, the i-th of m (from 0) is the running maximum of (m - i) p_i, at most 1."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted

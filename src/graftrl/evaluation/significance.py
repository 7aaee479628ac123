"""Is one better than another? Student's t on differences paired by seed, sign flips on differences paired by problem,
and Holm's correction for several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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


_EXACT_FLIPS = 14  # so many differences are flipped in all 2^14 ways
_ROWS_AT_ONCE = 512


def sign_flip_test(strata: Sequence[Sequence[float]], flips: int = 10_000, seed: int = 0) -> float:
    """Two-sided p of no difference between two models, from differences paired by problem (Fisher's randomisation).

    If the models were equal, each problem's difference could as well have had the other sign. p is the share of sign
    patterns with a mean at least as far from 0 as the one found: of all patterns when few differences are not 0, else
    of `flips` drawn ones and the one found.

    Args:
        strata: of each benchmark one difference per problem; the statistic is the unweighted mean of the benchmarks'
            means.

    Raises:
        ValueError: no benchmark, or one without a problem.
    """
    if not strata or any(len(differences) == 0 for differences in strata):
        raise ValueError("a test needs at least one problem")
    terms = np.concatenate([np.asarray(d, dtype=np.float64) / (len(d) * len(strata)) for d in strata])
    terms = terms[terms != 0.0]
    if len(terms) == 0:
        return 1.0
    found = abs(terms.sum()) - 1e-12 * np.abs(terms).sum()  # patterns that equal it but for rounding count
    if len(terms) <= _EXACT_FLIPS:
        patterns = (np.arange(2 ** len(terms))[:, None] >> np.arange(len(terms))) & 1
        return float(np.mean(np.abs((1 - 2 * patterns) @ terms) >= found))
    rng = np.random.default_rng(seed)
    extreme = 0
    for start in range(0, flips, _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, flips - start)
        signs = 1.0 - 2.0 * rng.integers(2, size=(rows, len(terms)))
        extreme += int((np.abs(signs @ terms) >= found).sum())
    return (1 + extreme) / (1 + flips)


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

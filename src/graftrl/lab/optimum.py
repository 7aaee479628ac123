"""Where a score that was measured at a few values of lambda is highest, and how surely."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000


@dataclass(frozen=True)
class Optimum:
    """The top of a parabola in log lambda through the means over seeds.

    value: within the range measured; its end where the parabola has no top there. low, high: 95 % percentile bootstrap
        over seeds. inside: share of the resamples whose parabola has its top inside the range. resampled: their tops.
    coefficients: of the parabola in log lambda, highest power first.
    """

    value: float
    low: float
    high: float
    inside: float
    coefficients: tuple[float, float, float]
    resampled: NDArray[np.float64]

    def at(self, value: float) -> float:
        """The parabola's height at a lambda."""
        return float(np.polyval(self.coefficients, np.log(value)))


def fit_optimum(scores: Mapping[float, Mapping[int, float]], seed: int = 0) -> Optimum:
    """Least squares on the means over seeds. A parabola in log lambda treats twice and half a lambda alike.

    Args:
        scores: by lambda, then by seed; seeds that some lambda lacks are left out.
        seed: of the bootstrap, which draws seeds with replacement, the same ones for every lambda.

    Raises:
        ValueError: fewer than three lambdas, or no seed that all have.
    """
    values = sorted(scores)
    seeds = sorted(set.intersection(*(set(of_one) for of_one in scores.values()))) if scores else []
    if len(values) < 3 or not seeds:
        raise ValueError(f"a parabola needs three values of lambda with a common seed, not {len(values)}")
    x = np.log(values)
    table = np.array([[scores[value][s] for s in seeds] for value in values])  # [lambda, seed]
    top, _, coefficients = _top(x, table.mean(axis=1))
    drawn = np.random.default_rng(seed).integers(len(seeds), size=(RESAMPLES, len(seeds)))
    tops = [_top(x, table[:, row].mean(axis=1))[:2] for row in drawn]
    resampled = np.exp([t for t, _ in tops])
    low, high = np.quantile(resampled, [0.025, 0.975])
    a, b, c = (float(value) for value in coefficients)
    share = float(np.mean([within for _, within in tops]))
    return Optimum(float(np.exp(top)), float(low), float(high), share, (a, b, c), resampled)


def _top(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, bool, NDArray[np.float64]]:
    """Where the fitted parabola is highest within the range of x, whether that is its top, and its coefficients."""
    coefficients = np.polyfit(x, y, 2)
    a, b, _ = coefficients
    if a < 0 and x[0] <= -b / (2 * a) <= x[-1]:
        return float(-b / (2 * a)), True, coefficients
    ends = np.polyval(coefficients, x[[0, -1]])
    return float(x[0] if ends[0] >= ends[1] else x[-1]), False, coefficients

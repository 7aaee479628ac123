"""HACPO's capability-aware advantages over the pooled groups of a receiver and one peer (Zhang et al., 2026)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def capability(mean_rewards: Sequence[float], window: int = 5) -> float:
    """P: mean reward over the last `window` steps, at least 1e-8."""
    recent = list(mean_rewards)[-window:]
    return max(float(np.mean(recent)) if recent else 0.0, 1e-8)


def capability_ratio(source: float, receiver: float) -> float:
    """omega = clip(P_source / P_receiver, 0.1, 10)."""
    return float(np.clip(source / receiver, 0.1, 10.0))


def capability_advantages(
    own: NDArray[np.float64], peer: NDArray[np.float64], omega: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Advantages of both groups: raw rewards minus one capability-weighted mean, over one deviation.

    mu = (sum own + sum peer / omega) / (n_own + n_peer), or the own mean where that exceeds 1; sigma the unbiased
    deviation of the pooled raw rewards; exactly 0 where all pooled rewards are equal.
    """
    pooled = np.concatenate([own, peer])
    if pooled.min() == pooled.max():
        return np.zeros_like(own), np.zeros_like(peer)
    mu = (own.sum() + peer.sum() / omega) / len(pooled)
    if mu > 1:
        mu = own.mean()
    scale = pooled.std(ddof=1) + 1e-6
    return (own - mu) / scale, (peer - mu) / scale

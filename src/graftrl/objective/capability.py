"""HACPO's capability-aware advantages over the pooled groups of a receiver and its peers (Zhang et al., 2026)."""

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
    """Advantages of a receiver's group and of one peer's; see `pooled_advantages`."""
    advantages, (of_peer,) = pooled_advantages(own, [(peer, omega)])
    return advantages, of_peer


def pooled_advantages(
    own: NDArray[np.float64], peers: Sequence[tuple[NDArray[np.float64], float]]
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """Advantages of all groups: raw rewards minus one capability-weighted mean, over one deviation.

    mu = (sum own + sum over peers of (sum peer / omega_peer)) / number of pooled rewards, or the own mean where that
    exceeds 1; sigma the unbiased deviation of the pooled raw rewards; exactly 0 where all pooled rewards are equal. The
    paper defines it for one peer; that each of several peers has its own omega is our extension.

    Args:
        own: float64 [n]. peers: per peer its rewards, float64 [n_peer], and its omega.
    """
    pooled = np.concatenate([own, *(rewards for rewards, _ in peers)])
    if pooled.min() == pooled.max():
        return np.zeros_like(own), [np.zeros_like(rewards) for rewards, _ in peers]
    mu = (own.sum() + sum(rewards.sum() / omega for rewards, omega in peers)) / len(pooled)
    if mu > 1:
        mu = own.mean()
    scale = pooled.std(ddof=1) + 1e-6
    return (own - mu) / scale, [(rewards - mu) / scale for rewards, _ in peers]

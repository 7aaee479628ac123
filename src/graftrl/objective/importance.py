"""When a sampler is not the trainer: how far its log-probabilities are off, and weights that correct for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Gap:
    """|sampler - trainer| in nats over all tokens: mean and largest; 0 without tokens."""

    mean: float
    largest: float


def logprob_gap(sampler: Sequence[NDArray[np.float32]], trainer: Sequence[NDArray[np.float32]]) -> Gap:
    """Of log-probabilities of the same tokens, [T] per response. NaN where either is not a number."""
    if not sampler:
        return Gap(0.0, 0.0)
    difference = np.abs(np.concatenate(sampler).astype(np.float64) - np.concatenate(trainer))
    return Gap(float(difference.mean()), float(difference.max())) if len(difference) else Gap(0.0, 0.0)


def truncated_importance_weights(
    trainer: NDArray[np.float32], sampler: NDArray[np.float32], cap: float
) -> NDArray[np.float32]:
    """min(pi_trainer / pi_sampler, cap) per token, float32 [T], from log-probabilities of the same weights.

    Truncated importance sampling (Ionides, 2008): a sampler in another precision or with other kernels draws from a
    distribution that is not quite the policy's. Multiplied into the advantages, the weights correct the gradient's
    expectation; the cap bounds its variance, at the price of a bias toward tokens that the sampler favours.
    """
    if not cap > 0:
        raise ValueError(f"cap is {cap}; it must be positive")
    # exp of the truncated difference: a difference of hundreds of nats must not overflow on the way
    difference = np.minimum(trainer.astype(np.float64) - sampler, np.log(cap))
    return np.exp(difference).astype(np.float32)

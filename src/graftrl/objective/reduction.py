"""How per-token losses become one number: a scale for each row, computed from the *whole* minibatch.

A reduction maps the minibatch's token counts to one factor per row; the loss is sum_j scale_j * sum_t loss_jt. Since
the factors are known before the first forward pass, the minibatch can be cut into microbatches anywhere: each adds its
rows' part and the gradient is the same (to float tolerance).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Reduction = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""Token counts [rows] -> scales [rows]."""


def token_mean(lengths: ArrayLike) -> NDArray[np.float64]:
    """Every token of the minibatch counts alike: 1 / sum_j |o_j| (DAPO; GRAFT, equation 2). 0 for an empty one."""
    lengths = np.asarray(lengths, np.int64)
    total = int(lengths.sum())
    return np.full(len(lengths), 1.0 / total if total else 0.0)


def sequence_mean(lengths: ArrayLike) -> NDArray[np.float64]:
    """Every response counts alike: mean over rows of the mean over tokens (GRPO's original form)."""
    lengths = np.asarray(lengths, np.int64)
    rows = max(len(lengths), 1)
    return np.where(lengths > 0, 1.0 / (rows * np.maximum(lengths, 1)), 0.0)


def row_mean(lengths: ArrayLike) -> NDArray[np.float64]:
    """The mean over each row's own tokens; how rows are averaged is left to the term."""
    lengths = np.asarray(lengths, np.int64)
    return np.where(lengths > 0, 1.0 / np.maximum(lengths, 1), 0.0)


def constant_divisor(divisor: float) -> Reduction:
    """Sum over tokens divided by a constant, such as rows * max_tokens (Dr. GRPO; Liu et al., 2025)."""
    if not divisor > 0:
        raise ValueError(f"divisor is {divisor}; it must be positive")

    def reduce(lengths: ArrayLike) -> NDArray[np.float64]:
        return np.full(len(np.asarray(lengths)), 1.0 / divisor)

    return reduce


def response_limit(max_tokens: int) -> Reduction:
    """The constant divisor rows * max_tokens of the minibatch: length does not change a token's weight (Dr. GRPO)."""

    def reduce(lengths: ArrayLike) -> NDArray[np.float64]:
        lengths = np.asarray(lengths, np.int64)
        return constant_divisor(max(len(lengths), 1) * max_tokens)(lengths)

    return reduce

"""How much a peer's response counts: the compatibility score and its gate (GRAFT, section 4.2, equations 6 to 8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.floating[Any]]


_BLOCK = 16_384  # responses summed at once: their tokens stay in the processor's cache


def mean_logprobs(logprobs: Sequence[Floats]) -> NDArray[np.float64]:
    """Mean over each response's tokens, float64 [responses], in nats per token; NaN where there is no token.

    Summed in float64 over flat blocks: a million responses take a fraction of a second.
    """
    means = np.full(len(logprobs), np.nan)
    for first in range(0, len(logprobs), _BLOCK):
        block = logprobs[first : first + _BLOCK]
        lengths = np.fromiter(map(len, block), dtype=np.int64, count=len(block))
        filled = np.flatnonzero(lengths)
        if len(filled):
            flat = np.concatenate(block, dtype=np.float64)
            starts = np.cumsum(lengths[filled]) - lengths[filled]
            means[first + filled] = np.add.reduceat(flat, starts) / lengths[filled]
    return means


def compatibility_scores(receiver_logprobs: Sequence[Floats], source_logprobs: Sequence[Floats]) -> NDArray[np.float64]:
    """s = exp(mean receiver log-probability - mean source log-probability) for each response (equation 7).

    Args:
        receiver_logprobs: per response float [T_receiver], under the receiver's weights at the start of the step, in
            the receiver's tokens, EOS excluded.
        source_logprobs: per response float [T_source], as recorded at generation (temperature 1, no truncation), in
            the source's tokens, EOS excluded. The two lengths differ when the tokenizers do.

    Returns:
        float64 [responses]; NaN where a side has no tokens or a non-finite mean.
    """
    if len(receiver_logprobs) != len(source_logprobs):
        raise ValueError(f"{len(receiver_logprobs)} receiver rows against {len(source_logprobs)} source rows")
    receiver, source = mean_logprobs(receiver_logprobs), mean_logprobs(source_logprobs)
    finite = np.isfinite(receiver) & np.isfinite(source)
    scores = np.full(len(receiver), np.nan)
    with np.errstate(over="ignore"):  # a huge mean difference is a score of inf, whose weight is 1
        scores[finite] = np.exp(receiver[finite] - source[finite])
    return scores


def compatibility_weights(
    scores: NDArray[np.float64], threshold: float = 0.8, *, floor: bool = True
) -> NDArray[np.float64]:
    """w = 1[s > threshold] * min(s, 1) for each score (equation 8); 0 where the score is NaN.

    Args:
        scores: float64 [responses].
        threshold: delta; the comparison is strict, so a score equal to it is dropped.
        floor: False keeps every finite score with w = min(s, 1) (the paper's ablation without the floor).
    """
    if not threshold >= 0:
        raise ValueError(f"threshold is {threshold}; it must be a number >= 0")
    admitted = (scores > threshold) if floor else ~np.isnan(scores)
    return np.where(admitted, np.minimum(np.nan_to_num(scores, nan=0.0, posinf=1.0), 1.0), 0.0)


def compatibility_score(receiver_logprobs: ArrayLike, source_logprobs: ArrayLike) -> float:
    """s of one response; see `compatibility_scores`. Both arguments are 1-D with EOS already excluded.

    Raises:
        ValueError: an argument that is not 1-D.
    """
    receiver, source = np.asarray(receiver_logprobs, np.float64), np.asarray(source_logprobs, np.float64)
    if receiver.ndim != 1 or source.ndim != 1:
        raise ValueError(f"log-probabilities must be 1-D, got shapes {receiver.shape} and {source.shape}")
    return float(compatibility_scores([receiver], [source])[0])


def compatibility_weight(score: float, threshold: float = 0.8, *, floor: bool = True) -> float:
    """w of one score; see `compatibility_weights`."""
    return float(compatibility_weights(np.array([score], np.float64), threshold, floor=floor)[0])

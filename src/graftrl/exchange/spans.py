"""One text in two tokenisations, cut where both have a boundary: what one says of a span is about the other's span.

Offsets are in bytes of the UTF-8 text. A log-probability of a text is the sum over its spans in either tokenisation, so
the span sums of a log-ratio telescope to the log-ratio of the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream

from graftrl.errors import ModelError


def token_ends(
    token_ids: Sequence[int] | NDArray[np.int64], tokenizer: Any, *, ends_with_eos: bool
) -> NDArray[np.int64]:
    """Byte offset at which each token ends, int64 [T]; never decreases.

    A token that ends inside a character counts to the end of that character: no text can be cut there. A final EOS is
    one more byte, so that it is a span of its own. Bytes that never become a character (a response cut in the middle
    of one) count with the last token.

    Raises:
        ModelError: a tokenizer without a `tokenizers` backend.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{type(tokenizer).__name__} tells no byte offsets; models with different tokenizers need fast tokenizers"
        )
    stream = DecodeStream(skip_special_tokens=False)
    contents = token_ids[: len(token_ids) - ends_with_eos]
    ends = np.empty(len(token_ids), dtype=np.int64)
    offset, waiting = 0, 0  # tokens since the last whole character
    for index, token_id in enumerate(contents):
        piece = stream.step(backend, int(token_id))
        waiting += 1
        if piece is not None:
            offset += len(piece.encode("utf-8", "surrogatepass"))
            ends[index + 1 - waiting : index + 1] = offset
            waiting = 0
    if waiting:
        offset += 1
        ends[len(contents) - waiting : len(contents)] = offset
    ends[len(contents) :] = offset + 1
    return ends


def common_ends(ends: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The offsets at which every tokenisation of a text has a boundary, ascending; the text's end is one.

    Raises:
        ValueError: they do not end at the same offset, so they are not of one text.
    """
    if len({int(of_one[-1]) for of_one in ends}) > 1:
        raise ValueError("tokenisations that end at different offsets are not of one text")
    return reduce(np.intersect1d, ends)


def spans_of(ends: NDArray[np.int64], common: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which span each token belongs to, int64 [T]: span i ends at common[i]."""
    return np.searchsorted(common, ends)


def sum_spans(values: NDArray[np.floating[Any]], spans: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Sum of a value per token over each of `count` spans, float64 [count]."""
    return np.bincount(spans, weights=values, minlength=count).astype(np.float64, copy=False)


def total(values: NDArray[np.floating[Any]], spans: NDArray[np.int64] | None) -> float:
    """The sum of values per token; where spans are given, of values per span that stand at each of its tokens."""
    if spans is None:
        return float(values.sum(dtype=np.float64))
    _, first = np.unique(spans, return_index=True)
    return float(values[first].sum(dtype=np.float64))

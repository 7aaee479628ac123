"""Into whose tokens: a peer's response as the receiver trains on it (GRAFT, section 4.2, "on its own tokenisation").

The receiver never sees the source's ids (unless both speak the same vocabulary): it encodes the response *string*.
A response that would not survive the round trip is rejected with a reason, never repaired.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from graftrl.rollout import FinishReason


class Tokenizer(Protocol):
    """What the exchange needs of a tokenizer; Hugging Face tokenizers have it."""

    all_special_ids: list[int]

    def __hash__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Retokenized:
    """token_ids: int64 [T] in the receiver's vocabulary, with its EOS last iff `ends_with_eos`."""

    token_ids: NDArray[np.int64]
    ends_with_eos: bool


@dataclass(frozen=True, slots=True)
class Rejected:
    """Why a response cannot be trained on by the receiver; counted per reason."""

    reason: str


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of vocabulary, merges and special tokens: equal fingerprints encode and decode a response alike."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        for key in ("truncation", "padding", "post_processor"):  # set by calls, or only wrap a whole prompt
            state.pop(key, None)
        content = json.dumps(state, sort_keys=True)
    else:
        content = json.dumps([sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids)])
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def same_tokenizer(first: Any, second: Any) -> bool:
    """True when the source's ids mean the same to the receiver and can be reused untouched."""
    return first is second or tokenizer_fingerprint(first) == tokenizer_fingerprint(second)


def retokenize(
    source_token_ids: Sequence[int] | NDArray[np.int64],
    finish_reason: FinishReason,
    source: Tokenizer | None,
    receiver: Tokenizer,
    *,
    receiver_eos_id: int,
    max_tokens: int,
    same_vocabulary: bool | None = None,
    text: str | None = None,
) -> Retokenized | Rejected:
    """The receiver's token ids for a peer's response.

    The receiver's EOS is appended iff the source stopped by itself; a response that was cut at the source's limit gets
    none, so the receiver does not learn to stop there.

    Args:
        source_token_ids: [T] the ids that the source sampled, its EOS included when it stopped.
        finish_reason: of the source.
        source: None where the source's tokenizer is not at hand, as for a peer that is read from a log. Special tokens
            among its ids then show only in the text.
        receiver_eos_id: the id that ends a response of the receiver.
        max_tokens: the receiver's response limit in tokens, EOS included. A longer response is rejected, never cut:
            a cut success is no longer verified.
        same_vocabulary: pass the result of `same_tokenizer` when it is known; None finds out.
        text: the response without its EOS as it was recorded; None decodes it from the ids.

    Returns:
        `Retokenized`, or `Rejected` with a reason: "empty", "special token", "replacement character", "not encodable",
        "changed by round trip", "too long".

    Raises:
        ValueError: neither `source` nor `text` and `same_vocabulary` say what the ids mean.
    """
    if source is None and (text is None or same_vocabulary is None):
        raise ValueError("without the source's tokenizer, text and same_vocabulary must be given")
    contents = [int(i) for i in (source_token_ids[:-1] if finish_reason == "stop" else source_token_ids)]
    if not contents:
        return Rejected("empty")
    if same_vocabulary is None:
        same_vocabulary = same_tokenizer(source, receiver)
    if same_vocabulary:
        return _with_eos(contents, finish_reason, receiver_eos_id, max_tokens)
    if source is not None:
        text = text if text is not None else _decode(contents, source)
        if not _special_ids(source).isdisjoint(contents):  # skipping it would train on a text the source did not write
            return Rejected("special token")
    if not text:
        return Rejected("empty")
    token_ids = encode_response(text, receiver)
    if isinstance(token_ids, Rejected):
        return token_ids
    return _with_eos(token_ids, finish_reason, receiver_eos_id, max_tokens)


def encode_response(text: str, tokenizer: Tokenizer) -> list[int] | Rejected:
    """The ids of a response's text, without an EOS; rejected unless they decode to exactly this text."""
    if "�" in text:
        return Rejected("replacement character")
    try:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    except (UnicodeEncodeError, TypeError):  # a lone surrogate; tokenizers reports it as a TypeError
        return Rejected("not encodable")
    if _decode(token_ids, tokenizer) != text:
        return Rejected("changed by round trip")
    if not _special_ids(tokenizer).isdisjoint(token_ids):  # the text spells one of the tokenizer's control tokens
        return Rejected("special token")
    return token_ids


def _decode(token_ids: list[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@lru_cache(maxsize=64)
def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens with a role (eos, pad, ...), and others that the tokenizer file marks as special.

    Remembered: a tokenizer works them out anew at every question.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}


def _with_eos(contents: list[int], finish_reason: FinishReason, eos_id: int, max_tokens: int) -> Retokenized | Rejected:
    stopped = finish_reason == "stop"
    token_ids = [*contents, eos_id] if stopped else contents
    if len(token_ids) > max_tokens:
        return Rejected("too long")
    return Retokenized(np.array(token_ids, dtype=np.int64), ends_with_eos=stopped)

"""Byte spans of one text in two tokenisations: shared boundaries, and sums that telescope, with multi-byte text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from graftrl.errors import ModelError
from graftrl.exchange.spans import common_ends, spans_of, sum_spans, token_ends

CORPUS = "größe naïve 日本語 hello hallo ab abc 12,3 12,4 😀 👍🏽 " * 3
TEXT = "Größe 😀😀 日本語, naïve  a\n 12,34 👍🏽é"
EOS = 0


def byte_fallback() -> PreTrainedTokenizerFast:
    """Characters and single bytes for unknown ones, spaces as a visible mark: as SentencePiece models'."""
    tokens = ["<eos>", "<unk>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcdefghijklmnoprstuvwz,123öß"]
    merges = [("l", "l"), ("▁", "a"), ("1", "2")]
    vocabulary = {token: i for i, token in enumerate([*tokens, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")


@pytest.fixture(scope="session")
def tokenizers(byte_level) -> dict[str, PreTrainedTokenizerFast]:
    """Byte-level ones split characters between tokens, and a token may end inside one."""
    of_bytes = {
        name: byte_level(CORPUS, eos="<eos>", merges=merges)
        for name, merges in {"bytes": 0, "small": 20, "large": 70}.items()
    }
    return {**of_bytes, "fallback": byte_fallback()}


def encode(tokenizer, text: str, eos: bool = False) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False) + [EOS] * eos


def test_ends_by_hand(tokenizers):
    one = tokenizers["bytes"]
    assert token_ends(encode(one, "aé b"), one, ends_with_eos=False).tolist() == [1, 3, 3, 4, 5]  # é: two tokens
    assert token_ends(encode(one, "é", eos=True), one, ends_with_eos=True).tolist() == [2, 2, 3]
    assert token_ends([EOS], one, ends_with_eos=True).tolist() == [1]
    merged = tokenizers["fallback"]
    assert token_ends(encode(merged, "hallo 12"), merged, ends_with_eos=False).tolist() == [1, 2, 4, 5, 6, 8]


def test_a_response_cut_inside_a_character_still_has_an_end(tokenizers):
    ids = encode(tokenizers["bytes"], "a😀")[:-1]
    assert token_ends(ids, tokenizers["bytes"], ends_with_eos=False).tolist() == [1, 2, 2, 2]


@pytest.mark.parametrize("name", ["bytes", "small", "large", "fallback"])
@pytest.mark.parametrize("eos", [False, True])
def test_ends_reach_the_texts_length_and_lie_between_characters(tokenizers, name, eos):
    ends = token_ends(encode(tokenizers[name], TEXT, eos), tokenizers[name], ends_with_eos=eos)
    boundaries = np.cumsum([len(character.encode()) for character in TEXT])
    assert ends[-1] == boundaries[-1] + eos
    assert (np.diff(ends) >= 0).all()
    assert set(ends[: len(ends) - eos].tolist()) <= set(boundaries.tolist())


def test_spans_end_where_both_tokenisations_have_a_boundary():
    one, other = np.array([2, 3, 6, 6, 9]), np.array([1, 3, 5, 9])
    common = common_ends([one, other])
    assert common.tolist() == [3, 9]
    assert spans_of(one, common).tolist() == [0, 0, 1, 1, 1] and spans_of(other, common).tolist() == [0, 0, 1, 1]
    assert sum_spans(np.array([1.0, 2.0, 4.0, 8.0]), spans_of(other, common), 2).tolist() == [3.0, 12.0]


def test_one_tokenisation_has_a_span_for_every_boundary():
    ends = np.array([1, 3, 4])
    assert spans_of(ends, common_ends([ends])).tolist() == [0, 1, 2]


def test_tokenisations_of_different_texts_are_refused():
    with pytest.raises(ValueError, match="not of one text"):
        common_ends([np.array([1, 3]), np.array([1, 4])])


def test_a_tokenizer_without_offsets_is_refused():
    with pytest.raises(ModelError, match="fast tokenizers"):
        token_ends([1], object(), ends_with_eos=False)


TEXTS = st.text(st.sampled_from("abhlo 12,é日本語😀👍🏽\u200dßö\n"), min_size=1, max_size=24)


@given(text=TEXTS, eos=st.booleans(), pair=st.sampled_from([("small", "large"), ("bytes", "fallback")]))
@settings(max_examples=60, deadline=None)
def test_span_sums_telescope_to_the_sequences_exact_log_ratio(tokenizers, text, eos, pair):
    """Whatever the log-probabilities: both sides' sums over the spans add up to their sums over all tokens, and a span
    holds the same bytes on both sides."""
    rng = np.random.default_rng(len(text))
    ids = [encode(tokenizers[name], text, eos) for name in pair]
    ends = [token_ends(of, tokenizers[name], ends_with_eos=eos) for of, name in zip(ids, pair, strict=True)]
    common = common_ends(ends)
    spans = [spans_of(of, common) for of in ends]
    logprobs = [-rng.exponential(size=len(of)) for of in ids]
    sums = [sum_spans(*given, len(common)) for given in zip(logprobs, spans, strict=True)]
    ratio = sums[0] - sums[1]
    np.testing.assert_allclose(ratio.sum(), logprobs[0].sum() - logprobs[1].sum(), rtol=1e-12, atol=1e-12)
    assert common[-1] == len(text.encode()) + eos
    for of, which, name in zip(ids, spans, pair, strict=True):
        assert set(which.tolist()) == set(range(len(common)))  # none is empty on either side
        assert (np.diff(which) >= 0).all()
        contents = np.array(of)[: len(of) - eos]
        pieces = [tokenizers[name].decode(contents[which[: len(contents)] == i]) for i in range(len(common) - eos)]
        assert "".join(pieces) == text
        assert np.cumsum([len(piece.encode()) for piece in pieces]).tolist() == common[: len(pieces)].tolist()

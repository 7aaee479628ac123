"""A peer's response in the receiver's tokens: the same text, or a rejection with the reason."""

import copy

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import normalizers, processors

from graftrl.exchange import Rejected, Retokenized, retokenize, same_tokenizer

TEXT = "The answer is x + y = 42."


def ids_of(text, tokenizer):
    return tokenizer.encode(text, add_special_tokens=False)


def text_of(token_ids, tokenizer):
    return tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def transfer(contents, source, receiver, *, finish_reason="stop", max_tokens=1000, **options):
    """Retokenize a response of the given text or ids; a response that stopped ends with the source's EOS."""
    token_ids = ids_of(contents, source) if isinstance(contents, str) else list(contents)
    if finish_reason == "stop":
        token_ids = [*token_ids, source.eos_token_id]
    eos_id = receiver.eos_token_id
    return retokenize(
        token_ids, finish_reason, source, receiver, receiver_eos_id=eos_id, max_tokens=max_tokens, **options
    )


class FixedTextSource:
    """A tokenizer without special tokens that decodes everything to one text."""

    all_special_ids: tuple[int, ...] = ()

    def __init__(self, text):
        self.text = text

    def decode(self, token_ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        return self.text


# What the receiver trains on


def test_receiver_trains_on_its_own_tokens_of_the_same_text(source, receiver):
    done = transfer(TEXT, source, receiver)
    assert done.token_ids.dtype == np.int64
    assert list(done.token_ids) == [*ids_of(TEXT, receiver), receiver.eos_token_id]
    assert len(done.token_ids) != len(ids_of(TEXT, source)) + 1  # the two tokenizers really cut it differently


@given(text=st.text(min_size=1).filter(lambda text: "�" not in text and "<|" not in text))  # no special token
@example(text="  two  spaces , and punctuation ! don't")
@example(text="\r\n\t\x00 é e\u0301 ∑ 𝔽 한 👩‍👩‍👧")
def test_every_text_survives_between_byte_level_tokenizers(text, source, receiver):
    for one, other in ((source, receiver), (receiver, source)):
        done = transfer(text, one, other, finish_reason="length")
        assert isinstance(done, Retokenized)
        assert text_of(done.token_ids, other) == text


@pytest.mark.parametrize(("finish_reason", "ends_with_eos"), [("stop", True), ("length", False)])
@pytest.mark.parametrize("same_vocabulary", [False, True])
def test_receiver_eos_is_appended_only_when_the_source_stopped(
    source, receiver, finish_reason, ends_with_eos, same_vocabulary
):
    receiver = source if same_vocabulary else receiver
    done = transfer(TEXT, source, receiver, finish_reason=finish_reason)
    expected = ids_of(TEXT, receiver) + ([receiver.eos_token_id] if ends_with_eos else [])
    assert list(done.token_ids) == expected
    assert done.ends_with_eos is ends_with_eos


def test_words_known_to_both_vocabularies_move_between_tokenizer_families(source, word_level):
    done = transfer("a b c a", source, word_level)
    assert list(done.token_ids) == [2, 3, 4, 2, word_level.eos_token_id]
    back = transfer([2, 3, 4, 2], word_level, source)
    assert list(back.token_ids) == [*ids_of("a b c a", source), source.eos_token_id]


def test_only_the_last_token_counts_as_the_eos_when_padding_shares_its_id(source):
    assert source.pad_token_id == source.eos_token_id
    done = transfer(ids_of("42", source), source, source)
    assert list(done.token_ids) == [*ids_of("42", source), source.eos_token_id]


# The same tokenizer


def test_same_tokenizer_reuses_sampled_ids_that_would_encode_otherwise(source):
    spelled = [token for character in TEXT for token in ids_of(character, source)]
    assert spelled != ids_of(TEXT, source)
    done = transfer(spelled, source, copy.deepcopy(source))
    assert list(done.token_ids) == [*spelled, source.eos_token_id]


def test_sampled_ids_that_would_encode_otherwise_are_encoded_afresh_for_another_tokenizer(source, receiver):
    spelled = [token for character in TEXT for token in ids_of(character, source)]
    assert list(transfer(spelled, source, receiver).token_ids) == list(transfer(TEXT, source, receiver).token_ids)


def test_a_cut_character_is_kept_for_the_same_tokenizer(source):
    first_byte = ids_of("é", source)[:1]
    assert list(transfer(first_byte, source, source, finish_reason="length").token_ids) == first_byte


def test_known_vocabulary_comparison_is_not_repeated(source, receiver):
    done = transfer(TEXT, source, receiver, same_vocabulary=True)
    assert list(done.token_ids[:-1]) == ids_of(TEXT, source)


def test_reloaded_tokenizer_is_the_same(source, tmp_path):
    source.save_pretrained(tmp_path)
    assert same_tokenizer(source, type(source).from_pretrained(tmp_path))


def test_call_settings_and_prompt_wrapping_do_not_make_another_tokenizer(source):
    other = copy.deepcopy(source)
    other.backend_tokenizer.enable_padding(length=32)
    other.backend_tokenizer.enable_truncation(max_length=16)
    other.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", source.eos_token_id)]
    )
    assert same_tokenizer(source, other)


def test_other_merges_vocabulary_special_tokens_or_normalizer_make_another_tokenizer(byte_level, source, receiver):
    base = byte_level("one two", eos="<eos>")
    others = [
        source,
        receiver,
        byte_level("three four", eos="<eos>"),
        byte_level("one two", eos="<end>"),
        byte_level("one two", eos="<eos>", extra_special=("<tool>",)),
        byte_level("one two", eos="<eos>", normalizer=normalizers.Lowercase()),
    ]
    assert not any(same_tokenizer(base, other) for other in others)


# A source whose tokenizer is not at hand


@given(text=st.text(min_size=1).filter(lambda text: "�" not in text and "<|" not in text))
def test_recorded_text_gives_what_the_sources_tokenizer_would(text, source, receiver):
    ids = [*ids_of(text, source), source.eos_token_id]
    options = {"receiver_eos_id": receiver.eos_token_id, "max_tokens": 1000, "same_vocabulary": False}
    stored = retokenize(ids, "stop", None, receiver, text=text, **options)
    live = retokenize(ids, "stop", source, receiver, **options)
    assert isinstance(stored, Retokenized) and isinstance(live, Retokenized)
    assert list(stored.token_ids) == list(live.token_ids) and stored.ends_with_eos


def test_recorded_ids_of_the_same_tokenizer_are_reused_untouched(source):
    spelled = [token for character in TEXT for token in ids_of(character, source)]
    options = {"receiver_eos_id": source.eos_token_id, "max_tokens": 1000, "same_vocabulary": True, "text": TEXT}
    assert list(retokenize(spelled, "length", None, source, **options).token_ids) == spelled


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("42 �", "replacement character"),
        ("a \ud83d", "not encodable"),
        ("so <|im_end|> 42", "special token"),
        ("", "empty"),
    ],
)
def test_recorded_text_is_rejected_by_the_same_rules(receiver, text, reason):
    options = {"receiver_eos_id": receiver.eos_token_id, "max_tokens": 99, "same_vocabulary": False}
    assert retokenize([5, 6], "length", None, receiver, text=text, **options) == Rejected(reason)


def test_without_tokenizer_and_text_nothing_is_guessed(receiver):
    with pytest.raises(ValueError, match="text and same_vocabulary must be given"):
        retokenize([5, 6], "length", None, receiver, receiver_eos_id=0, max_tokens=99, same_vocabulary=False)


# Rejections


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
@pytest.mark.parametrize("same_vocabulary", [False, True])
def test_response_longer_than_the_limit_is_rejected_and_not_cut(source, receiver, finish_reason, same_vocabulary):
    receiver = source if same_vocabulary else receiver
    needed = len(ids_of(TEXT, receiver)) + (finish_reason == "stop")  # the EOS takes a place too
    fits = transfer(TEXT, source, receiver, finish_reason=finish_reason, max_tokens=needed)
    assert len(fits.token_ids) == needed
    cut = transfer(TEXT, source, receiver, finish_reason=finish_reason, max_tokens=needed - 1)
    assert cut == Rejected("too long")


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_response_without_contents_is_rejected(source, receiver, finish_reason):
    assert transfer([], source, receiver, finish_reason=finish_reason) == Rejected("empty")
    assert transfer([], source, source, finish_reason=finish_reason) == Rejected("empty")


def test_ids_that_decode_to_nothing_are_rejected(receiver):
    done = retokenize(
        [3], "length", FixedTextSource(""), receiver, receiver_eos_id=0, max_tokens=9, same_vocabulary=False
    )
    assert done == Rejected("empty")


@pytest.mark.parametrize("special", ["<|endoftext|>", "<|tool|>"])
def test_special_token_among_the_source_ids_is_rejected(source, receiver, special):
    contents = [*ids_of("4", source), source.convert_tokens_to_ids(special), *ids_of("2", source)]
    assert transfer(contents, source, receiver) == Rejected("special token")


@pytest.mark.parametrize("special", ["<|im_end|>", "<|im_start|>"])
def test_text_that_spells_a_special_token_of_the_receiver_is_rejected(source, receiver, special):
    assert transfer(f"so {special} 42", source, receiver) == Rejected("special token")


def test_text_that_looks_like_a_special_token_of_neither_side_is_text(source, receiver):
    assert isinstance(transfer("so <|pad|> 42", source, receiver), Retokenized)


def test_response_cut_inside_a_character_is_rejected(source, receiver):
    contents = ids_of("caf", source) + ids_of("é", source)[:1]
    assert transfer(contents, source, receiver, finish_reason="length") == Rejected("replacement character")


def test_written_replacement_character_is_rejected(source, receiver):
    assert transfer("42 �", source, receiver) == Rejected("replacement character")


def test_lone_surrogate_is_rejected_without_a_crash(receiver):
    broken = FixedTextSource("x = \ud83d 42")
    done = retokenize([3], "length", broken, receiver, receiver_eos_id=0, max_tokens=99, same_vocabulary=False)
    assert done == Rejected("not encodable")


@pytest.mark.parametrize("text", ["a d b", "a  b", " a b", "a\nb"])
def test_text_that_the_receiver_would_change_is_rejected(source, word_level, text):
    assert transfer(text, source, word_level) == Rejected("changed by round trip")


def test_receiver_that_folds_case_rejects_only_what_it_would_change(byte_level, source):
    folding = byte_level("the answer", eos="<eos>", normalizer=normalizers.Lowercase())
    assert transfer("The answer", source, folding) == Rejected("changed by round trip")
    assert isinstance(transfer("the answer", source, folding), Retokenized)

"""Small real tokenizers with different vocabularies, trained in memory."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")


@pytest.fixture(scope="session")
def byte_level() -> Callable[..., PreTrainedTokenizerFast]:
    """Byte-level BPE: every byte is in the vocabulary, the merges come from `corpus`."""

    def build(
        corpus: str = "",
        *,
        eos: str,
        merges: int = 40,
        extra_special: tuple[str, ...] = (),
        normalizer: normalizers.Normalizer | None = None,
    ) -> PreTrainedTokenizerFast:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        if normalizer is not None:
            backend.normalizer = normalizer
        special = [AddedToken(token, special=True, normalized=False) for token in (eos, *extra_special)]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=len(alphabet) + len(special) + merges,
            initial_alphabet=alphabet,
            special_tokens=special,
            show_progress=False,
        )
        backend.train_from_iterator([corpus] * 3, trainer)
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token=eos)

    return build


@pytest.fixture(scope="session")
def source(byte_level) -> PreTrainedTokenizerFast:
    """Pads with its EOS; `<|tool|>` is special in the tokenizer file without having a role such as eos."""
    return byte_level("The answer is 42. the answer", eos="<|endoftext|>", extra_special=("<|tool|>",))


@pytest.fixture(scope="session")
def receiver(byte_level) -> PreTrainedTokenizerFast:
    """Other merges and other special tokens than `source`."""
    return byte_level("so x + y = 42, hence boxed", eos="<|im_end|>", extra_special=("<|im_start|>",))


@pytest.fixture(scope="session")
def word_level() -> PreTrainedTokenizerFast:
    """Knows the words "a", "b" and "c", collapses white space, maps the rest to its unknown token."""
    vocabulary = {"[UNK]": 0, "</s>": 1, "a": 2, "b": 3, "c": 4}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="</s>", pad_token="</s>")

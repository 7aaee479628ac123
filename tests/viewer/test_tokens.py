from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from graftrl.lab.cache import SHIPPED
from graftrl.viewer.tokens import TokenTexts

TEXTS = ("D:1,9,4;B:8,0", "A:")


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    return {name: next(SHIPPED.glob(f"{name}-*")) for name in "AB"}


def _ids(folder: Path, text: str) -> list[int]:
    return list(AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False))


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_decoded_tokens(folders: dict[str, Path], tmp_path: Path, text: str) -> None:
    for name, folder in folders.items():
        texts = TokenTexts(tmp_path, {name: {"path": str(folder)}})
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        ids = _ids(folder, text)
        pieces = texts.cut(name, ids, text, ends_with_eos=False)
        assert pieces == [tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in ids]
        whole = texts.cut(name, [*ids, tokenizer.eos_token_id], text, ends_with_eos=True)
        assert whole == [*pieces, tokenizer.eos_token]


def test_a_character_of_several_tokens_stands_at_its_first(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    bytes_alone.save(str(tmp_path / "tokenizer.json"))
    ids = bytes_alone.encode("aß€!").ids
    texts = TokenTexts(tmp_path / "run", {"M": {"path": str(tmp_path)}})
    assert texts.cut("M", ids, "aß€!", ends_with_eos=False) == ["a", "ß", "", "€", "", "", "!"]


def test_the_newest_checkpoint_comes_first(folders: dict[str, Path], tmp_path: Path) -> None:
    for step, name in ((3, "A"), (12, "B")):
        place = tmp_path / "checkpoints" / f"step-{step:06d}" / "M"
        place.mkdir(parents=True)
        shutil.copy(folders[name] / "tokenizer.json", place)
    ids = _ids(folders["B"], TEXTS[0])
    texts = TokenTexts(tmp_path, {"M": {"path": str(folders["A"])}})
    assert "".join(texts.cut("M", ids, TEXTS[0], ends_with_eos=False) or []) == TEXTS[0]


def test_a_response_is_left_whole_where_its_tokens_are_not_known(folders: dict[str, Path], tmp_path: Path) -> None:
    ids = _ids(folders["A"], TEXTS[0])
    wrong = TokenTexts(tmp_path, {"A": {"path": str(folders["B"])}})
    assert wrong.cut("A", ids, TEXTS[0], ends_with_eos=False) is None
    assert wrong.notes["A"] == "the tokenizer found for A does not give this text"
    lacking = "no tokenizer of A on this machine"
    gguf = "the tokenizer of A lies in a GGUF file, which is not opened here"
    for path, note in (
        ("nowhere/at-all", lacking),
        ("/nowhere/at/all", lacking),
        ("a/some.gguf", gguf),
        (None, lacking),
    ):
        none = TokenTexts(tmp_path, {"A": {"path": path}} if path else {})
        assert none.cut("A", ids, TEXTS[0], ends_with_eos=False) is None
        assert none.notes["A"] == note
    (tmp_path / "tokenizer.json").write_text("{torn")
    torn = TokenTexts(tmp_path, {"A": {"path": str(tmp_path)}})
    assert torn.cut("A", ids, TEXTS[0], ends_with_eos=False) is None
    assert "tokenizer.json cannot be read" in torn.notes["A"]

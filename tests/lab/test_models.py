"""Tokenizers and models of the laboratory, in memory and loaded through transformers' Auto classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from graftrl.lab.models import ALPHABET, LAB_MODELS, LabModel, build_model, build_tokenizer, save_model
from graftrl.lab.programs import HiddenProgramsConfig, build_hidden_programs

RESPONSE = "A:6,2,9,5,1,4,1,3;E:8,6,7,5,3,2,3,9"
SIZES = {"A": 90_000, "B": 115_000, "C": 190_000, "S": 25_000, "M": 53_000, "P": 41_600, "D": 423_000}
TOKENIZERS = {name: build_tokenizer(model) for name, model in LAB_MODELS.items()}


def pieces(name: str, text: str) -> list[str]:
    tokenizer = TOKENIZERS[name]
    return [tokenizer.decode([i]) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("name", LAB_MODELS)
@settings(deadline=None, max_examples=200)
@given(text=st.text(ALPHABET, max_size=60))
def test_tokenizer_is_lossless(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_merges() -> None:
    assert pieces("A", "A:6,2;E:8,9") == ["A", ":", "6,", "2", ";", "E", ":", "8,", "9"]
    assert pieces("B", "A:6,2;E:8,9") == ["A", ":6", ",2", ";", "E", ":8", ",9"]
    assert pieces("C", "A:6,2;E:8,9") == ["A:", "6", ",2", ";", "E:", "8", ",9"]


def test_responses_have_about_the_same_length() -> None:
    assert {name: len(pieces(name, RESPONSE)) + 1 for name in LAB_MODELS} == {
        **dict.fromkeys("BCD", 20),
        **dict.fromkeys("ASMP", 22),
    }


def test_padding_and_special_tokens() -> None:
    assert TOKENIZERS["A"].pad_token_id != TOKENIZERS["A"].eos_token_id
    assert TOKENIZERS["B"].pad_token_id == TOKENIZERS["B"].eos_token_id
    assert TOKENIZERS["B"].bos_token_id is None


def test_unknown_characters_are_not_dropped() -> None:
    assert TOKENIZERS["A"].decode(TOKENIZERS["A"]("a§b")["input_ids"]) == "a<unk>b"


@pytest.fixture(scope="module", params=list(LAB_MODELS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LabModel, Path]:
    model = LAB_MODELS[request.param]
    folder = tmp_path_factory.mktemp(model.name)
    save_model(build_model(model, seed=0), model, folder)
    return model, folder


def test_auto_classes_load_the_same_model(saved: tuple[LabModel, Path]) -> None:
    model, folder = saved
    network = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(10, 30)[None]
    with torch.no_grad():
        assert torch.equal(network(ids).logits, build_model(model, seed=0).eval()(ids).logits)
    assert network.dtype == torch.float32
    parameters = sum(parameter.numel() for parameter in network.parameters())
    assert parameters == pytest.approx(SIZES[model.name], rel=0.03)


def test_auto_tokenizer_is_the_built_one(saved: tuple[LabModel, Path]) -> None:
    model, folder = saved
    tokenizer = AutoTokenizer.from_pretrained(folder)
    built = TOKENIZERS[model.name]
    assert tokenizer.get_vocab() == built.get_vocab()
    assert tokenizer(RESPONSE)["input_ids"] == built(RESPONSE)["input_ids"]
    assert tokenizer.decode(tokenizer(RESPONSE)["input_ids"]) == RESPONSE
    special = [(t.pad_token_id, t.eos_token_id, t.bos_token_id) for t in (tokenizer, built)]
    assert special[0] == special[1]


def test_chat_template_gives_the_prompt_text(saved: tuple[LabModel, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(saved[1])
    prompt = build_hidden_programs(HiddenProgramsConfig()).train[0]
    text = tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, tokenize=False)
    assert text == prompt.text
    assert tokenizer(text)["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_configs_agree_with_the_tokenizer(saved: tuple[LabModel, Path]) -> None:
    network = AutoModelForCausalLM.from_pretrained(saved[1])
    tokenizer = AutoTokenizer.from_pretrained(saved[1])
    for config in (network.config, network.generation_config):
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id
        assert config.bos_token_id == tokenizer.bos_token_id
    assert (network.generation_config.top_k, network.generation_config.temperature) == (0, 1.0)
    assert network.config.vocab_size == len(tokenizer)


def test_seed_decides_the_weights_and_leaves_the_global_random_state() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, same, other = (build_model(LAB_MODELS["A"], seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


def test_models_without_dropout() -> None:
    for model in LAB_MODELS.values():
        network = build_model(model, seed=0)
        assert all(module.p == 0 for module in network.modules() if isinstance(module, torch.nn.Dropout))

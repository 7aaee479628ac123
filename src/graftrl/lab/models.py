"""Tiny language models in Hugging Face format, built from a seed: same task, different architectures and tokens.

All write one alphabet, and their merges give responses of about the same length with different token boundaries, so
that a comparison of two models on one text is not confounded by compression.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from graftrl.lab.programs import FAMILY_LETTERS, LETTERS, SEPARATOR_CHARACTERS

Architecture = Literal["llama", "gpt2", "gpt_neox"]
TokenizerStyle = Literal["digit_comma", "comma_digit", "letter_colon"]

_DIGITS = "0123456789"
ALPHABET = _DIGITS + LETTERS + FAMILY_LETTERS + ",:>" + SEPARATOR_CHARACTERS
UNKNOWN = "<unk>"
CONTENT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

# Tokens of a response of 8 digits, EOS included: 22, 20 and 20.
_MERGES: dict[TokenizerStyle, list[tuple[str, str]]] = {
    "digit_comma": [(digit, ",") for digit in _DIGITS],
    "comma_digit": [(mark, digit) for mark in ",:" for digit in _DIGITS],
    "letter_colon": [*((",", digit) for digit in _DIGITS), *((letter, ":") for letter in LETTERS)],
}


@dataclass(frozen=True, slots=True)
class LabModel:
    """What a model is made of; weights follow from this and a seed.

    hidden_size, intermediate_size: widths of the residual stream and of the feed-forward layer.
    positions: longest sequence in tokens.
    initializer_range: standard deviation of initial weights. The usual 0.02 is small for these widths and nearly
        doubles the steps of a warm-up.
    pad_is_eos: whether padding has a token of its own. Both kinds occur in practice.
    """

    name: str
    architecture: Architecture
    tokenizer: TokenizerStyle
    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    intermediate_size: int = 128
    positions: int = 128
    initializer_range: float = 0.06
    pad_is_eos: bool = False


LAB_MODELS: dict[str, LabModel] = {
    "A": LabModel("A", "llama", "digit_comma"),
    "B": LabModel("B", "gpt2", "comma_digit", intermediate_size=256, pad_is_eos=True),
    "C": LabModel("C", "gpt_neox", "letter_colon", hidden_size=96, intermediate_size=256),
    # Smaller ones of A's architecture and tokenizer. S, M and A are a family: they are strong in the same families of
    # the task, and the smaller, the worse at executing programs. P executes well and is strong where A is weak.
    "S": LabModel("S", "llama", "digit_comma", hidden_size=32, intermediate_size=64),
    "M": LabModel("M", "llama", "digit_comma", hidden_size=48, intermediate_size=96),
    "P": LabModel("P", "llama", "digit_comma", hidden_size=40, intermediate_size=96),
    # Ten times the weights of P, another architecture and tokenizer, strong in the other families.
    "D": LabModel("D", "gpt2", "comma_digit", hidden_size=128, intermediate_size=512, pad_is_eos=True),
}


def build_tokenizer(model: LabModel) -> PreTrainedTokenizerFast:
    """A tokenizer of characters and the style's merges; lossless on `ALPHABET`, `<unk>` beyond it.

    It adds no special token to a text, and its chat template emits the messages' contents and nothing else: a prompt's
    tokens are those of its text.
    """
    eos = "<|endoftext|>" if model.pad_is_eos else "</s>"
    special = [UNKNOWN, eos] if model.pad_is_eos else [UNKNOWN, "<s>", eos, "<pad>"]
    merges = _MERGES[model.tokenizer]
    vocabulary = {token: i for i, token in enumerate([*special, *ALPHABET, *(a + b for a, b in merges)])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=UNKNOWN,
        eos_token=eos,
        pad_token=eos if model.pad_is_eos else "<pad>",
        bos_token=None if model.pad_is_eos else "<s>",
        chat_template=CONTENT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=model.positions,
        padding_side="left",
    )


def _rotary(model: LabModel) -> dict[str, Any]:
    return {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": model.positions,
        "tie_word_embeddings": False,
    }


def _llama(model: LabModel, common: dict[str, Any]) -> Any:
    return LlamaForCausalLM(LlamaConfig(**_rotary(model), **common))


def _gpt_neox(model: LabModel, common: dict[str, Any]) -> Any:
    """With layers in sequence and rotation of all dimensions: at this size the defaults (attention beside the
    feed-forward layer, a quarter of the dimensions) do not learn to execute programs."""
    rotation = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(**_rotary(model), use_parallel_residual=False, rope_parameters=rotation, **common)
    )


def _gpt2(model: LabModel, common: dict[str, Any]) -> Any:
    config = GPT2Config(
        n_embd=model.hidden_size,
        n_layer=model.layers,
        n_head=model.heads,
        n_inner=model.intermediate_size,
        n_positions=model.positions,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        summary_first_dropout=0.0,
        activation_function="gelu_pytorch_tanh",  # GPT-2's own function, in one kernel instead of eight
        **common,
    )
    return GPT2LMHeadModel(config)


_ARCHITECTURES: dict[Architecture, Callable[[LabModel, dict[str, Any]], Any]] = {
    "llama": _llama,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}


def build_model(model: LabModel, seed: int) -> Any:
    """The causal language model in float32 with random weights, a function of (`model`, `seed`).

    The global random state is left as it was. The generation config samples the plain distribution (temperature 1, no
    top-k or top-p), which transformers' defaults would cut at 50 tokens.
    """
    tokenizer = build_tokenizer(model)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: Any = _ARCHITECTURES[model.architecture](
            model, {"vocab_size": len(tokenizer), "initializer_range": model.initializer_range, **ids}
        )
    network.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ids)
    return network


def save_model(network: Any, model: LabModel, folder: Path) -> None:
    """Writes weights (safetensors), configs and tokenizer into `folder`, where transformers' Auto classes find them."""
    network.save_pretrained(folder)
    build_tokenizer(model).save_pretrained(folder)

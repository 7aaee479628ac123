"""Tiny random models of several architectures with a character tokenizer, built from configs: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing

from graftrl.objective import Objective, Term, TokenBatch, clipped, clipped_surrogate
from graftrl.objective.terms import TokenLoss
from graftrl.policies.config import OptimizerSettings
from graftrl.policies.hf import HFPolicy
from graftrl.rollout import Prompt, Row

VOCABULARY = 48
EOS, BOS = 2, 1
SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # far from uniform, so that an error in a position or a mask shows
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 128,
    "initializer_range": 0.3,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}


def tiny_config(kind: str) -> hf.PretrainedConfig:
    build: dict[str, Callable[[], hf.PretrainedConfig]] = {
        "llama": lambda: hf.LlamaConfig(**SIZE, tie_word_embeddings=False),
        "llama_tied": lambda: hf.LlamaConfig(**SIZE, tie_word_embeddings=True),
        "gpt2": lambda: hf.GPT2Config(**GPT2, tie_word_embeddings=True),
        "gpt_neox": lambda: hf.GPTNeoXConfig(
            **{k: v for k, v in SIZE.items() if k not in ("num_key_value_heads", "head_dim")}
        ),
        "qwen2": lambda: hf.Qwen2Config(**{k: v for k, v in SIZE.items() if k != "head_dim"}),
        "qwen3": lambda: hf.Qwen3Config(**SIZE),
        "mistral": lambda: hf.MistralConfig(**SIZE, sliding_window=None),
        "mistral_sliding": lambda: hf.MistralConfig(**SIZE, sliding_window=4),
        "llama3_rope": lambda: hf.LlamaConfig(
            **SIZE,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        "dynamic_rope": lambda: hf.LlamaConfig(
            **SIZE, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        ),
        "gemma2": lambda: hf.Gemma2Config(**SIZE, **SLIDING, final_logit_softcapping=3.0, attn_logit_softcapping=2.0),
        "gemma3": lambda: hf.Gemma3TextConfig(**SIZE, **SLIDING),
        "gemma3_wide": lambda: hf.Gemma3TextConfig(**SIZE, **{**SLIDING, "sliding_window": 32}),
        "cohere": lambda: hf.CohereConfig(**{k: v for k, v in SIZE.items() if k != "head_dim"}, logit_scale=0.25),
        "granite": lambda: hf.GraniteConfig(**{k: v for k, v in SIZE.items() if k != "head_dim"}, logits_scaling=2.0),
    }
    return build[kind]()


ARCHITECTURES = ("llama", "llama_tied", "gpt2", "gpt_neox", "qwen2", "gemma2", "gemma3", "cohere", "granite")


def character_tokenizer(*, template: str | None = None, adds_bos: bool = False, eos: bool = True) -> Any:
    """One token per character; ids 0 to 2 are `<unk>`, `<s>` and `</s>`, which is also the padding."""
    characters = "abcdefghijklmnopqrstuvwxyz0123456789 :?=+-\n."
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *characters])}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    if adds_bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    roles = {"eos_token": "</s>", "pad_token": "</s>"} if eos else {}
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", chat_template=template, **roles
    )


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(f"p{i}", ({"role": "user", "content": text},), "0", "test") for i, text in enumerate(texts)]


def random_rows(n: int, seed: int = 0, *, longest: int = 9, kind: str = "own") -> list[Row]:
    """Rows of mixed lengths with advantages, weights and old log-probabilities; about 1 in 4 has advantage 0."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        length = int(rng.integers(1, longest + 1))
        rows.append(
            Row(
                prompt_id=f"p{i}",
                prompt_token_ids=rng.integers(3, VOCABULARY - 2, int(rng.integers(1, 7))),
                response_token_ids=rng.integers(2, VOCABULARY - 2, length),
                advantages=0.0 if i % 4 == 3 else float(rng.normal()),
                kind=kind,
                source="m",
                old_logprobs=rng.normal(-3.5, 0.5, length).astype(np.float32),
                weight=float(rng.uniform(0.5, 1.0)),
            )
        )
    return rows


def grpo_objective(*, skip: bool = True) -> Objective:
    """The clipped surrogate, token mean. skip=False makes the policy pass rows that cannot add to the gradient."""

    def loss(batch: TokenBatch) -> TokenLoss:
        arguments = (batch.logprobs_BT, batch.old_logprobs_BT, batch.advantages_BT, 0.2, 0.28)
        return TokenLoss(-clipped_surrogate(*arguments), clipped(*arguments))

    return Objective((Term(("own",), loss, policy_gradient=skip),))


def gradients(policy: HFPolicy, rows: list[Row], objective: Objective | None = None) -> list[torch.Tensor]:
    """The accumulated gradient of a minibatch, before any optimizer step."""
    from graftrl.policies.hf import UpdateStats

    policy._accumulate(rows, objective or grpo_objective(), UpdateStats())
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in policy.parameters]


def weights(policy: HFPolicy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in policy.parameters]


def quick() -> OptimizerSettings:
    return OptimizerSettings(lr=1e-3)

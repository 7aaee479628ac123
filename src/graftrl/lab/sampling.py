"""Plain sampling at temperature 1 for prompts of one length: no padding, so a cache and a loop suffice."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


@torch.inference_mode()
def sample_fixed_length(
    network: Any, prompts: Tensor, samples: int, max_new_tokens: int, eos: int, generator: torch.Generator
) -> Tensor:
    """Samples `samples` responses to each prompt from the plain distribution.

    prompts: int64 `[N, P]`, no padding. Returns int64 `[N * samples, T]`, T <= max_new_tokens, the samples of a prompt
    next to each other; everything after a row's first `eos` is `eos`, and a row without one was cut.
    """
    # The cache's argument was renamed within transformers 5.
    cache_name = "cache" if "cache" in inspect.signature(network.forward).parameters else "past_key_values"
    mask = torch.ones((len(prompts) * samples, prompts.shape[1] + max_new_tokens), dtype=torch.int64)
    cache = DynamicCache(config=network.config)
    options = {"use_cache": True, cache_name: cache}
    seen = mask[::samples, : prompts.shape[1]]
    logits = network(input_ids=prompts, attention_mask=seen, logits_to_keep=1, **options).logits[:, -1]
    cache.batch_repeat_interleave(samples)
    logits = logits.repeat_interleave(samples, dim=0)
    finished = torch.zeros(len(logits), dtype=torch.bool)
    tokens: list[Tensor] = []
    while True:
        # Gumbel trick: the argmax of logits minus the logarithm of exponential noise is a sample of the softmax.
        noise = torch.empty_like(logits).exponential_(generator=generator).log_()
        token = (logits - noise).argmax(-1).masked_fill_(finished, eos)
        tokens.append(token)
        finished |= token == eos
        if finished.all() or len(tokens) == max_new_tokens:
            return torch.stack(tokens, dim=1)
        seen = mask[:, : prompts.shape[1] + len(tokens)]
        logits = network(input_ids=token[:, None], attention_mask=seen, **options).logits[:, -1]

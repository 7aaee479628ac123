"""Rows of one prompt read it once, and prompts read their common start once: its keys and values serve all of them,
with gradients.

A group's n rows differ only in their responses. Running the prompt n times costs most where prompts are long against
responses. Prompts of one task often begin alike: with a system message, or with solved examples. Shapes: B rows, U
different prompts, C tokens of their common start, W longest prompt, T longest response, H hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from graftrl.rollout import Row

WORTH_IT = 0.95  # of the tokens of whole rows; below it, sharing pays for its attention mask
_WORTH_A_PASS = 0.25  # of the tokens, spared by reading a common start once; above it, that pays for one pass more
PROBE_TOKENS = 12  # of the longest row of a check
_NO_LIMIT = 1 << 30  # tokens
_MASK_CELLS = 1 << 24  # B * T * (W + T): the attention mask that sharing needs and whole rows do not


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """prompt_ids_UW and response_ids_BT are padded on the right; prompt_of_B says which prompt a row has.

    common: C, tokens that all prompts begin with and that pass once; 0: none do.
    tokens: those that pass through the model, padding not counted.
    """

    prompt_ids_UW: Tensor
    prompt_lengths_U: Tensor
    prompt_of_B: Tensor
    response_ids_BT: Tensor
    common: int
    tokens: int

    @property
    def cells(self) -> int:
        """Tokens that pass, padding counted."""
        prompts = self.prompt_ids_UW
        return prompts.numel() - (len(prompts) - 1) * self.common + self.response_ids_BT.numel()

    @property
    def longest(self) -> int:
        """W + T."""
        return self.prompt_ids_UW.shape[1] + self.response_ids_BT.shape[1]


def common_start(prompts: Sequence[NDArray[np.int64]], others: int = 0, worth: float = _WORTH_A_PASS) -> int:
    """Tokens that all prompts begin with, short of the last of any; 0 where to read them once spares too little.

    others: tokens that pass besides. worth: the part of all tokens that must be spared.
    """
    shortest = min(len(ids) for ids in prompts) - 1
    starts = np.stack([ids[:shortest] for ids in prompts])
    common = int(np.logical_and.accumulate((starts == starts[0]).all(axis=0)).sum())
    tokens = len(prompts) * max(len(ids) for ids in prompts) + others
    return common if (len(prompts) - 1) * common > worth * tokens else 0


def shared_prompts(
    rows: Sequence[Row], device: torch.device, limit: int, worth: float = _WORTH_A_PASS
) -> SharedPrompts | None:
    """None where sharing would not pay or a row would exceed `limit` tokens (`longest_shared`).

    Of a response the last token is left out: it predicts nothing. worth: as of `common_start`.
    """
    prompts = {row.prompt_token_ids.tobytes(): row.prompt_token_ids for row in rows}
    index, different = {key: u for u, key in enumerate(prompts)}, list(prompts.values())
    prompt_of = [index[row.prompt_token_ids.tobytes()] for row in rows]
    width = max(len(ids) for ids in different)
    longest = max(len(row.response_token_ids) for row in rows)
    whole = max(len(row.prompt_token_ids) + len(row.response_token_ids) for row in rows)
    common = common_start(different, len(rows) * (longest - 1), worth)
    tokens = len(prompts) * width - (len(prompts) - 1) * common + len(rows) * (longest - 1)
    cells = len(rows) * (longest - 1) * (width + longest - 1)
    if (
        (len(prompts) == len(rows) and not common)
        or width + longest > limit
        or longest < 2
        or tokens > WORTH_IT * len(rows) * whole
        or cells > _MASK_CELLS
    ):
        return None
    prompt_ids = np.zeros((len(prompts), width), dtype=np.int64)
    response_ids = np.zeros((len(rows), longest - 1), dtype=np.int64)
    lengths = np.array([len(ids) for ids in different])
    for u, ids in enumerate(different):
        prompt_ids[u, : len(ids)] = ids
    for b, row in enumerate(rows):
        response_ids[b, : len(row.response_token_ids) - 1] = row.response_token_ids[:-1]
    return SharedPrompts(
        torch.from_numpy(prompt_ids).to(device),
        torch.from_numpy(lengths).to(device),
        torch.tensor(prompt_of, device=device),
        torch.from_numpy(response_ids).to(device),
        common,
        int(lengths.sum()) - (len(prompts) - 1) * common + sum(len(row.response_token_ids) - 1 for row in rows),
    )


def hidden_of_responses(decoder: Any, shared: SharedPrompts) -> Tensor:
    """[B, T, H]: the final hidden states that predict response token 0, 1, ... of each row; differentiable."""
    cache = DynamicCache(config=decoder.config)
    argument = cache_argument(decoder)
    width, new = shared.prompt_ids_UW.shape[1], shared.response_ids_BT.shape[1]
    device = shared.prompt_of_B.device
    prompts_U = torch.arange(len(shared.prompt_ids_UW), device=device)
    # Embedded in one go: the gradient of a lookup is as large as the whole table.
    parts = (
        shared.prompt_ids_UW[:1, : shared.common],
        shared.prompt_ids_UW[:, shared.common :],
        shared.response_ids_BT,
    )
    embedded = decoder.get_input_embeddings()(torch.cat([ids.flatten() for ids in parts]))
    common, own_UWH, responses_BTH = (
        flat.view(*ids.shape, flat.shape[-1])
        for flat, ids in zip(embedded.split([ids.numel() for ids in parts]), parts, strict=True)
    )
    if shared.common:
        decoder(inputs_embeds=common, use_cache=True, **{argument: cache})
        _repeat(cache, torch.zeros_like(prompts_U))
    read = decoder(inputs_embeds=own_UWH, use_cache=True, **{argument: cache}).last_hidden_state
    first_UH = read[prompts_U, shared.prompt_lengths_U - shared.common - 1]
    _repeat(cache, shared.prompt_of_B)
    lengths_B = shared.prompt_lengths_U[shared.prompt_of_B]
    of_prompt_BW = torch.arange(width, device=device)[None] < lengths_B[:, None]
    mask = torch.cat([of_prompt_BW, of_prompt_BW.new_ones(len(lengths_B), new)], dim=1)
    rest_BTH = decoder(
        inputs_embeds=responses_BTH,
        attention_mask=mask.long(),
        position_ids=lengths_B[:, None] + torch.arange(new, device=device),
        use_cache=True,
        **{argument: cache},
    ).last_hidden_state
    return torch.cat([first_UH[shared.prompt_of_B][:, None], rest_BTH], dim=1)


def _repeat(cache: DynamicCache, index: Tensor) -> None:
    """The sequences of the given indices, in their order; gradients of a sequence that is used repeatedly add up."""
    for layer in cache.layers:
        layer.keys = layer.keys.index_select(0, index)
        layer.values = layer.values.index_select(0, index)


def longest_shared(decoder: nn.Module) -> int:
    """Prompt and response together may have this many tokens: the shortest sliding window, 0 for recurrent layers."""
    config: Any = decoder.config
    layers = DynamicCache(config=config).layers
    if len(layers) != config.get_text_config().num_hidden_layers:
        return 0
    limits = [_NO_LIMIT]
    for layer in layers:
        if type(layer) is DynamicSlidingWindowLayer:
            limits.append(int(layer.sliding_window))
        elif type(layer) is not DynamicLayer:
            return 0
    return min(limits)


@torch.no_grad()
def sharing_difference(decoder: nn.Module, tokens: int = PROBE_TOKENS // 2) -> float:
    """Largest relative difference of final hidden states between shared prompts and whole rows, on a few ids."""
    rows = probe_rows(decoder, tokens)
    shared = shared_prompts(rows, next(decoder.parameters()).device, _NO_LIMIT, worth=0.0)
    assert shared is not None and shared.common
    hidden_BTH = hidden_of_responses(decoder, shared)
    parts = [hidden[: len(row.response_token_ids)] for row, hidden in zip(rows, hidden_BTH, strict=True)]
    return difference_to_whole(decoder, rows, torch.cat(parts))


def probe_rows(decoder: nn.Module, tokens: int = PROBE_TOKENS // 2) -> list[Row]:
    """Three rows, of which two share a prompt and all a start."""
    ids = probe_ids(decoder, 3, 2 * tokens)
    ids[1, :tokens] = ids[0, :tokens]
    ids[2, : tokens // 2] = ids[0, : tokens // 2]
    return [
        Row(str(b), ids[b, :start], ids[b, start:], 0.0, "own", "")
        for b, start in enumerate((tokens, tokens, tokens - 2))
    ]


def difference_to_whole(decoder: Any, rows: Sequence[Row], hidden_NH: Tensor) -> float:
    """Largest relative difference to the final hidden states before response tokens of rows that pass one by one."""
    worst = 0.0
    for row, hidden in zip(rows, hidden_NH.split([len(row.response_token_ids) for row in rows]), strict=True):
        whole = torch.from_numpy(np.concatenate([row.prompt_token_ids, row.response_token_ids])).to(hidden.device)
        expected = decoder(input_ids=whole[None], use_cache=False).last_hidden_state[
            0, len(row.prompt_token_ids) - 1 : -1
        ]
        worst = max(worst, float((hidden - expected).abs().max() / expected.abs().max()))
    return worst


def probe_ids(decoder: nn.Module, rows: int, tokens: int) -> NDArray[np.int64]:
    """int64 [rows, tokens], spread over the vocabulary; none is the padding's, which transformers warns about."""
    config: Any = decoder.config
    config = config.get_text_config()
    ids = np.arange(rows * tokens, dtype=np.int64).reshape(rows, tokens) * 7919 % config.vocab_size
    return np.where(ids == getattr(config, "pad_token_id", None), (ids + 1) % config.vocab_size, ids)


def cache_argument(decoder: nn.Module) -> str:
    """The name of the forward pass's argument for a cache: transformers renamed it."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"

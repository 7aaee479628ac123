"""The sequences under way during sampling: reading the prompts, then one token more per row, with a KV cache.

Two ways to do the second part, with the same numbers to float tolerance. `TransformersSequences` calls the model's own
forward pass and serves every architecture. `LlamaSequences` runs the layers of Llama-shaped models itself: with one
token per row the small operations around the matrix products dominate a model's own forward pass, and the attention
kernels are made for many queries, not for one.
Shapes: R rows under way, P prompts, W padded prompt width, K key-value heads, G query heads per key-value head, D head
dimension, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm
from transformers.cache_utils import Cache, DynamicLayer

from graftrl.policies.logprobs import compute_dtype
from graftrl.policies.prefix import cache_argument, probe_ids

_LLAMA_SHAPED = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the sequence's length


class Sequences(Protocol):
    def read_prompts(self) -> Tensor:
        """Final hidden state after each prompt, [P, H]."""
        ...

    def append(self, token_ids_R: Tensor) -> Tensor:
        """Final hidden state after one more token per row, [R, H]."""
        ...

    def repeat(self, n: int) -> None:
        """n rows of each prompt, side by side; once, after `read_prompts`."""
        ...

    def keep_rows(self, index: Tensor) -> None:
        """Only the rows of the given indices go on."""
        ...


class _PreallocatedLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer that writes into a buffer of the final length, so that a step copies one position, not all."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows, heads, new, _ = key_states.shape
        if self.key_buffer is None or self.value_buffer is None:
            self.lazy_initialization(key_states, value_states)
            self.key_buffer = key_states.new_empty(rows, heads, self.capacity, key_states.shape[-1])
            self.value_buffer = value_states.new_empty(rows, heads, self.capacity, value_states.shape[-1])
        stop = self.length + new
        self.key_buffer[:, :, self.length : stop] = key_states
        self.value_buffer[:, :, self.length : stop] = value_states
        self.length = stop
        self.keys, self.values = self.key_buffer[:, :, :stop], self.value_buffer[:, :, :stop]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def keep_rows(self, index: Tensor) -> None:
        if self.key_buffer is None or self.value_buffer is None:
            return
        for name in ("key_buffer", "value_buffer"):
            old = getattr(self, name)
            new = old.new_empty(len(index), *old.shape[1:])
            new[:, :, : self.length] = old[:, :, : self.length][index]
            setattr(self, name, new)
        self.keys, self.values = self.key_buffer[:, :, : self.length], self.value_buffer[:, :, : self.length]


class TransformersSequences:
    """The decoder's own forward pass with the state of the sequences: cache, attention mask, positions.

    common: tokens that all prompts begin with and that are read once; short of the last of any prompt.
    """

    def __init__(self, decoder: Any, prompts: Sequence[NDArray[np.int64]], new_tokens: int, common: int = 0) -> None:
        device = next(decoder.parameters()).device
        lengths = torch.tensor([len(ids) for ids in prompts], device=device)
        self.width = width = int(lengths.max())
        self.decoder, self.capacity, self.common = decoder, width + new_tokens, common
        layers = int(decoder.config.get_text_config().num_hidden_layers)
        self.cache = Cache(layers=[_PreallocatedLayer(self.capacity) for _ in range(layers)])
        self.cache_argument = cache_argument(decoder)
        # Padding stands on the left, after the common start, so that all rows go on at the same cache position. Without
        # padding no mask is needed, and attention takes its fastest path.
        self.padded = bool((lengths != width).any())
        columns = torch.arange(width, device=device)[None, :]
        self.mask = (columns < common) | (columns >= (width - lengths + common)[:, None])
        self.lengths = lengths
        tokens = np.zeros((len(prompts), width), dtype=np.int64)
        for row, ids in enumerate(prompts):
            tokens[row, :common], tokens[row, width - len(ids) + common :] = ids[:common], ids[common:]
        self.prompt_tokens = torch.from_numpy(tokens).to(device)

    def read_prompts(self) -> Tensor:
        positions = (self.mask.long().cumsum(-1) - 1).clamp(min=0)
        if self.common:
            self._forward(self.prompt_tokens[:1, : self.common], positions[:1, : self.common], padded=False)
            self._keep_cached(torch.zeros_like(self.lengths))
        return self._forward(self.prompt_tokens[:, self.common :], positions[:, self.common :], self.padded)

    def append(self, token_ids_R: Tensor) -> Tensor:
        if self.padded:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=-1)
        positions = self.lengths[:, None]
        self.lengths = self.lengths + 1
        return self._forward(token_ids_R[:, None], positions, self.padded)

    def repeat(self, n: int) -> None:
        self.keep_rows(torch.arange(len(self.mask), device=self.mask.device).repeat_interleave(n))

    def keep_rows(self, index: Tensor) -> None:
        self._keep_cached(index)
        self.mask, self.lengths = self.mask[index], self.lengths[index]

    def _keep_cached(self, index: Tensor) -> None:
        for layer in self.cache.layers:
            layer.keep_rows(index)

    def _forward(self, tokens: Tensor, positions: Tensor, padded: bool) -> Tensor:
        output = self.decoder(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self.mask.long() if padded else None,
            use_cache=True,
            **{self.cache_argument: self.cache},
        )
        return output.last_hidden_state[:, -1]


@dataclass(slots=True)
class _LlamaLayer:
    """One layer's module, its query, key and value projections as one matrix, and its cache.

    A prompt's keys and values are kept once for all its rows: prompt_keys [B * K, D, W], prompt_values [B * K, W, D];
    the rows' own are keys [B * K * N, D, T] and values [B * K * N, T, D] for B prefixes with N rows each and T new
    tokens. Keys have positions last: the product with one query then reads memory in order.
    """

    module: Any
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    prompt_keys: Tensor
    prompt_values: Tensor
    keys: Tensor
    values: Tensor


class LlamaSequences:
    """Llama-shaped layers run here, one token per row; prompts are read by the model's own forward pass."""

    def __init__(self, decoder: Any, prompts: Sequence[NDArray[np.int64]], new_tokens: int, common: int = 0) -> None:
        self.prefill = TransformersSequences(decoder, prompts, 0, common)
        self.decoder, config = decoder, decoder.config
        attention = decoder.layers[0].self_attn
        self.head_dim, self.scaling = int(attention.head_dim), float(attention.scaling)
        self.heads, self.kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self.prefixes, self.rows_each = len(prompts), 1  # B and N
        self.capacity, self.length = new_tokens, 0
        self.positions_R = self.prefill.lengths
        device = self.positions_R.device
        positions = torch.arange(self.prefill.width + new_tokens, device=device)
        cos, sin = decoder.rotary_emb(torch.zeros(1, device=device), positions[None])
        half = self.head_dim // 2
        self.cos, self.signed_sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
        self.padding: Tensor | None = None  # [B * K, 1, W]: 0, and -inf where a prompt has no token
        self.layers: list[_LlamaLayer] = []
        self.casts: dict[int, Tensor] = {}

    def read_prompts(self) -> Tensor:
        hidden_PH = self.prefill.read_prompts()
        self.dtype = compute_dtype(hidden_PH)
        for module, cached in zip(self.decoder.layers, self.prefill.cache.layers, strict=True):
            a = module.self_attn
            bias = None if a.q_proj.bias is None else torch.cat([a.q_proj.bias, a.k_proj.bias, a.v_proj.bias])
            weight = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
            keys, values = cached.keys.transpose(-1, -2).flatten(0, 1), cached.values.flatten(0, 1)
            self.layers.append(
                _LlamaLayer(
                    module,
                    weight.to(self.dtype),
                    None if bias is None else bias.to(self.dtype),
                    keys.to(self.dtype).contiguous(),
                    values.to(self.dtype).contiguous(),
                    hidden_PH.new_empty(0),
                    hidden_PH.new_empty(0),
                )
            )
        if self.prefill.padded:
            mask = self.prefill.mask
            padding = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)
            self.padding = padding.repeat_interleave(self.kv_heads, dim=0)[:, None]
        del self.prefill
        return hidden_PH

    def repeat(self, n: int) -> None:
        self.positions_R = self.positions_R.repeat_interleave(n)
        self.rows_each = n
        cells = self.prefixes * self.kv_heads * n
        for layer in self.layers:
            layer.keys = layer.prompt_keys.new_empty(cells, self.head_dim, self.capacity)
            layer.values = layer.prompt_keys.new_empty(cells, self.capacity, self.head_dim)

    def keep_rows(self, index: Tensor) -> None:
        """Groups become uneven, so that each row then has a prefix of its own."""
        prefix, member = index // self.rows_each, index % self.rows_each
        by_prefix, by_row = (self.prefixes, self.kv_heads), (self.prefixes, self.kv_heads, self.rows_each)
        for layer in self.layers:
            layer.prompt_keys = layer.prompt_keys.unflatten(0, by_prefix)[prefix].flatten(0, 1)
            layer.prompt_values = layer.prompt_values.unflatten(0, by_prefix)[prefix].flatten(0, 1)
            layer.keys = layer.keys.unflatten(0, by_row)[prefix, :, member].flatten(0, 1)
            layer.values = layer.values.unflatten(0, by_row)[prefix, :, member].flatten(0, 1)
        if self.padding is not None:
            self.padding = self.padding.unflatten(0, by_prefix)[prefix].flatten(0, 1)
        self.positions_R = self.positions_R[index]
        self.prefixes, self.rows_each = len(index), 1

    def append(self, token_ids_R: Tensor) -> Tensor:
        hidden_RH = embedding(token_ids_R, self.decoder.embed_tokens.weight)
        cos_R1D, sin_R1D = self.cos[self.positions_R][:, None], self.signed_sin[self.positions_R][:, None]
        self.positions_R = self.positions_R + 1
        self.length += 1
        with torch.autocast(hidden_RH.device.type, enabled=False):
            for layer in self.layers:
                module = layer.module
                attended = self._attend(layer, _norm(module.input_layernorm, hidden_RH), cos_R1D, sin_R1D)
                hidden_RH = hidden_RH + self._linear(module.self_attn.o_proj, attended)
                normed, mlp = _norm(module.post_attention_layernorm, hidden_RH), module.mlp
                gated = mlp.act_fn(self._linear(mlp.gate_proj, normed)) * self._linear(mlp.up_proj, normed)
                hidden_RH = hidden_RH + self._linear(mlp.down_proj, gated)
            return _norm(self.decoder.norm, hidden_RH)

    def _attend(self, layer: _LlamaLayer, normed_RH: Tensor, cos_R1D: Tensor, sin_R1D: Tensor) -> Tensor:
        rows, half, dim = len(normed_RH), self.head_dim // 2, self.head_dim
        rotated = self.heads + self.kv_heads
        qkv = linear(normed_RH.to(self.dtype), layer.qkv_weight, layer.qkv_bias)
        qkv = qkv.view(rows, rotated + self.kv_heads, dim)
        qk, module = qkv[:, :rotated], layer.module.self_attn
        if hasattr(module, "q_norm"):  # Qwen3 normalises each head
            qk = torch.cat(
                [_norm(module.q_norm, qk[:, : self.heads]), _norm(module.k_norm, qk[:, self.heads :])], dim=1
            )
        turned = torch.cat([qk[..., half:], qk[..., :half]], dim=-1)
        qk = torch.addcmul(qk * cos_R1D, turned, sin_R1D).to(self.dtype)
        # From [B, N, heads] to [B, K, N, G]: one flattening of it serves the prompts' keys, another the rows' own.
        by_row = (self.prefixes, self.rows_each, self.kv_heads, -1, dim)
        queries = (qk[:, : self.heads] * self.scaling).view(by_row).transpose(1, 2).flatten(0, 1)  # [B * K, N, G, D]
        cells = (self.prefixes, self.kv_heads, self.rows_each)
        layer.keys.unflatten(0, cells)[..., self.length - 1] = (
            qk[:, self.heads :].view(by_row).squeeze(3).transpose(1, 2)
        )
        layer.values.unflatten(0, cells)[..., self.length - 1, :] = (
            qkv[:, rotated:].view(by_row).squeeze(3).transpose(1, 2)
        )
        keys, values = layer.keys[:, :, : self.length], layer.values[:, : self.length]
        before = torch.bmm(queries.flatten(1, 2), layer.prompt_keys)
        if self.padding is not None:
            before = before + self.padding
        own = torch.bmm(queries.flatten(0, 1), keys)
        scores = torch.cat([before.view(-1, own.shape[1], before.shape[-1]), own], dim=-1)
        weights = scores.float().softmax(dim=-1).to(self.dtype)
        before, own = weights.split([before.shape[-1], self.length], dim=-1)
        attended = torch.bmm(before.reshape(len(layer.prompt_keys), -1, before.shape[-1]), layer.prompt_values)
        attended = torch.baddbmm(attended.view(len(keys), -1, dim), own, values)
        by_prefix = (self.prefixes, self.kv_heads, self.rows_each, -1)
        return attended.view(by_prefix).transpose(1, 2).reshape(rows, -1)

    def _linear(self, module: nn.Linear, x: Tensor) -> Tensor:
        if module.weight.dtype == self.dtype:
            return linear(x, module.weight, module.bias)
        if id(module) not in self.casts:  # once per batch of prompts, not once per token
            self.casts[id(module)] = module.weight.to(self.dtype)
        bias = None if module.bias is None else module.bias.to(self.dtype)
        return linear(x.to(self.dtype), self.casts[id(module)], bias)


def _norm(module: Any, x: Tensor) -> Tensor:
    """The module's RMS norm by torch's function: one call in place of eight small operations."""
    return rms_norm(x.float(), module.weight.shape, module.weight, module.variance_epsilon)


def llama_shaped(decoder: nn.Module) -> bool:
    """Whether `LlamaSequences` computes what this decoder computes, judged by its type and settings."""
    config: Any = decoder.config
    if type(decoder).__name__ not in _LLAMA_SHAPED or config.model_type not in ("llama", "mistral", "qwen2", "qwen3"):
        return False
    module: Any = decoder
    if module.rotary_emb.rope_type not in _FIXED_ROPE:
        return False
    for layer in module.layers:
        a, mlp = layer.self_attn, layer.mlp
        parts = (a.q_proj, a.k_proj, a.v_proj, a.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        if any(type(part) is not nn.Linear for part in parts):  # adapters, quantised weights
            return False
        if getattr(a, "sliding_window", None) is not None:
            return False
    return getattr(config, "sliding_window", None) is None or config.model_type != "mistral"


@torch.no_grad()
def agreement(decoder: nn.Module, tokens: int = 12) -> float:
    """Largest relative difference of the final hidden states between the two ways on a padded batch of a few ids."""
    ids = probe_ids(decoder, 2, tokens)
    prompts = [ids[0, : tokens // 2], ids[1, : tokens // 2 - 2]]
    device = next(decoder.parameters()).device
    found = []
    for kind in (TransformersSequences, LlamaSequences):
        sequences = kind(decoder, prompts, tokens)
        hidden = [sequences.read_prompts()]
        sequences.repeat(2)
        rows = [0, 1, 0, 1]
        for t in range(tokens // 2, tokens):
            hidden.append(sequences.append(torch.from_numpy(ids[rows, t]).to(device)))
            if t == tokens - 3:
                sequences.keep_rows(torch.tensor([0, 1, 3], device=device))
                rows = [1, 0, 1]
        found.append(torch.cat(hidden).float())
    theirs, ours = found
    return float((theirs - ours).abs().max() / theirs.abs().max())

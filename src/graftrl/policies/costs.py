"""What a pass of a model costs: floating-point operations, bytes and activations, counted from its shape alone.

One place for these rules: the memory estimate of a dry run, `graftrl plan` and the benchmarks' floor read them here.
Symbols: h hidden size, q = heads x head size, kv = key-value heads x head size, f feed-forward size, V vocabulary.
Operations count a multiplication and an addition as two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from graftrl.policies.config import LoraSettings, ModelSettings
from graftrl.policies.sampling import TILED_ABOVE

WIDTH = {"float32": 4, "bfloat16": 2}  # bytes of a value in a pass


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer in numbers.

    parameters: all of them, a tied embedding once. matrices: entries of the decoder's matrices, which every token is
    multiplied with; embedding, norms and output head are not among them. matrix_sides: sum over these matrices of
    inputs + outputs. gated: the feed-forward has a gate (three matrices, not two). head_norms: queries and keys are
    normalised (Qwen3). experts: has a mixture of experts; all of them are then counted as if every token met them.
    """

    parameters: int
    matrices: int
    matrix_sides: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    gated: bool = True
    head_norms: bool = False
    experts: bool = False

    @property
    def head(self) -> int:
        """Entries of the output head."""
        return self.vocabulary * self.hidden

    @property
    def queries(self) -> int:
        return self.heads * self.head_size

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def cached(self) -> int:
        """Values that the cache keeps of a token: a key and a value in every layer."""
        return 2 * self.layers * self.kv


def llama_shape(
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    feed_forward: int,
    vocabulary: int,
    head_size: int | None = None,
    tied: bool = True,
    head_norms: bool = False,
    qkv_bias: bool = False,
) -> ModelShape:
    """Of a Llama-shaped model (Llama, Qwen 2 and 3, SmolLM3, Mistral) from the numbers of its config."""
    size = head_size or hidden // heads
    q, kv = heads * size, kv_heads * size
    pairs = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), *[(hidden, feed_forward)] * 3]
    matrices = layers * sum(a * b for a, b in pairs)
    vectors = layers * (2 * hidden + (2 * size if head_norms else 0) + (q + 2 * kv if qkv_bias else 0)) + hidden
    return ModelShape(
        parameters=matrices + vectors + vocabulary * hidden * (1 if tied else 2),
        matrices=matrices,
        matrix_sides=layers * sum(a + b for a, b in pairs),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        feed_forward=feed_forward,
        vocabulary=vocabulary,
        head_norms=head_norms,
    )


def shape_of(causal_lm: Any) -> ModelShape:
    """The shape of a transformers model, which may live on the meta device. Weights are counted, not derived."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    config = causal_lm.config.get_text_config()
    head = causal_lm.get_output_embeddings()
    sides: list[tuple[int, int]] = []
    names = set()
    for name, module in causal_lm.named_modules():
        names.add(name.rpartition(".")[2])
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            rows, columns = module.weight.shape
            sides.append((int(rows), int(columns)))
    experts = any(getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    heads = int(config.num_attention_heads)
    vocabulary, hidden = causal_lm.get_input_embeddings().weight.shape
    feed_forward = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return ModelShape(
        parameters=sum(p.numel() for p in causal_lm.parameters()),
        matrices=sum(rows * columns for rows, columns in sides),
        matrix_sides=sum(rows + columns for rows, columns in sides),
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_size=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        feed_forward=int(feed_forward or 4 * hidden),
        vocabulary=int(vocabulary),
        gated=bool(names & {"gate_proj", "gate_up_proj"}),
        head_norms="q_norm" in names,
        experts=bool(experts),
    )


def trainable_parameters(shape: ModelShape, lora: LoraSettings | None) -> int:
    """All weights; with LoRA an upper limit, adapters on every matrix of the decoder."""
    return shape.parameters if lora is None else lora.rank * shape.matrix_sides


# Work -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """decoder, attention, head: operations. exps: exponentials of logits. bytes: weights, keys and values that stream
    past the products. traffic: bytes between the products. layers: layers that are run one after the other. searches:
    tokens drawn from a vocabulary so large that a CPU draws it by tiles, and then computes one tile of a row again."""

    decoder: float = 0.0
    attention: float = 0.0
    head: float = 0.0
    exps: float = 0.0
    bytes: float = 0.0
    traffic: float = 0.0
    layers: float = 0.0
    searches: float = 0.0

    @property
    def operations(self) -> float:
        return self.decoder + self.attention + self.head

    def __add__(self, other: Work) -> Work:
        return Work(
            self.decoder + other.decoder,
            self.attention + other.attention,
            self.head + other.head,
            self.exps + other.exps,
            self.bytes + other.bytes,
            self.traffic + other.traffic,
            self.layers + other.layers,
            self.searches + other.searches,
        )


def pairs(length: int, before: int = 0) -> int:
    """Query-key pairs of `length` tokens in a row, each of which sees itself and all before; `before`: tokens that were
    read earlier."""
    return length * before + length * (length + 1) // 2


def attention_operations(shape: ModelShape, query_key_pairs: float) -> float:
    """Scores and weighted values of all layers."""
    return 4 * shape.layers * shape.queries * query_key_pairs


def weight_bytes(shape: ModelShape, width: int) -> int:
    """Of one pass over the decoder's matrices."""
    return width * shape.matrices


def read_work(shape: ModelShape, lengths: Iterable[int], width: int, passes: int = 1) -> Work:
    """Reading rows of these lengths without the head, in so many passes over the weights."""
    tokens = query_keys = 0
    for length in lengths:
        tokens += length
        query_keys += pairs(length)
    return Work(
        decoder=2 * shape.matrices * tokens,
        attention=attention_operations(shape, query_keys),
        bytes=passes * weight_bytes(shape, width),
        traffic=tokens * shape.layers * layer_activation_bytes(shape, width),
        layers=passes * shape.layers,
    )


def head_work(shape: ModelShape, positions: float, width: int, passes: int = 1) -> Work:
    """Logits at so many positions, and one exponential each."""
    return Work(
        head=2 * shape.head * positions, exps=positions * shape.vocabulary, bytes=passes * width * shape.head, layers=1
    )


def decode_work(shape: ModelShape, rows: float, keys: float, width: int) -> Work:
    """One more token for each of `rows` responses whose contexts hold `keys` tokens together."""
    decoder = Work(
        decoder=2 * shape.matrices * rows,
        attention=attention_operations(shape, keys),
        bytes=weight_bytes(shape, width) + width * shape.cached * keys,
        layers=shape.layers,
    )
    return decoder + head_work(shape, rows, width) + _searches(shape, rows)


def sampling_work(shape: ModelShape, prompts: Iterable[int], rows: Iterable[tuple[int, int]], width: int) -> Work:
    """All of sampling: each prompt is read once, and every token of a response (prompt length, response length) is
    drawn and passed on. Responses go side by side, so that there are as many passes as the longest has tokens."""
    drawn = keys = steps = 0
    for prompt, length in rows:
        drawn += length
        keys += pairs(length, prompt)
        steps = max(steps, length)
    decoding = Work(
        decoder=2 * shape.matrices * drawn,
        attention=attention_operations(shape, keys),
        bytes=steps * weight_bytes(shape, width) + width * shape.cached * keys,
        layers=steps * shape.layers,
    )
    heads = head_work(shape, drawn, width, passes=steps)
    return read_work(shape, prompts, width) + decoding + heads + _searches(shape, drawn)


def _searches(shape: ModelShape, drawn: float) -> Work:
    return Work(searches=drawn if shape.vocabulary > TILED_ABOVE else 0.0)


def training_work(
    shape: ModelShape,
    rows: Iterable[tuple[int, int]],
    settings: ModelSettings,
    *,
    microbatches: int = 1,
    shared_prompts: Iterable[int] | None = None,
) -> Work:
    """Forward and backward passes over rows (prompt length, response length); the optimizer's step is apart.

    A matrix costs three products: forward, gradient of the input, gradient of the weight; frozen weights (LoRA) spare
    the third, checkpointing adds a forward pass. Fused attention computes its scores again on the way back: 3.5 times
    the forward pass (Dao et al., 2022). The head is applied to response positions only, and its logits are computed
    again where there are too many to keep.

    shared_prompts: lengths of the prompts, where rows of one prompt share its pass.
    """
    width = WIDTH[settings.dtype]
    tokens = responses = query_keys = 0
    for prompt, length in rows:
        responses += length
        tokens += length if shared_prompts is not None else prompt + length
        query_keys += pairs(length, prompt) if shared_prompts is not None else pairs(prompt + length)
    for prompt in shared_prompts or ():
        tokens += prompt
        query_keys += pairs(prompt)
    again = 1 if settings.gradient_checkpointing else 0
    products = (2 if settings.lora is not None else 3) + again
    return Work(
        decoder=2 * shape.matrices * tokens * products,
        attention=attention_operations(shape, query_keys) * (3.5 + again),
        head=2 * shape.head * responses * (3 if settings.lora is not None else 4),
        exps=2 * responses * shape.vocabulary,
        bytes=microbatches * products * (weight_bytes(shape, width) + width * shape.head),
        traffic=tokens * shape.layers * layer_activation_bytes(shape, width) * (3 + again),
        layers=microbatches * (3 + again) * shape.layers,
    )


ADAM_BYTES = 4 * 7  # a weight: AdamW reads it, both moments and the gradient, and writes the first three
CLIP_BYTES = 4 * 3  # the gradient's norm reads it, and scaling it reads and writes


def optimizer_work(trainable: float) -> Work:
    """One step of AdamW, gradients clipped by their norm."""
    return Work(traffic=(ADAM_BYTES + CLIP_BYTES) * trainable)


# Activations ----------------------------------------------------------------------------------------------------------


def layer_activation_bytes(shape: ModelShape, width: int) -> int:
    """Bytes that one layer keeps of one token for its backward pass, in float32 or (2) under bfloat16 autocast.

    Counted on transformers' Llama, Qwen3 and GPT-2 with fused attention, by the tensors that autograd saves; other
    architectures with a gate are taken for Llama's, without one for GPT-2's. Norms keep float32 in either precision.
    """
    h, q, kv, f = shape.hidden, shape.queries, shape.kv, shape.feed_forward
    if not shape.gated:
        products = 32 * h + 20 * f if width == 4 else 20 * h + 10 * f
        return products + 4 * shape.heads + 16
    products = 24 * h + 8 * (q + kv) + 16 * f if width == 4 else 26 * h + 4 * (q + kv) + 8 * f
    of_heads = (8 if width == 4 else 6) * (q + kv) + 4 * (shape.heads + shape.kv_heads) if shape.head_norms else 0
    return products + of_heads + 4 * shape.heads + 8


def activation_bytes(shape: ModelShape, tokens: int, settings: ModelSettings) -> int:
    """Kept by a forward pass over so many tokens (padding included). With checkpointing the float32 input of every
    layer, and one layer in full while it is computed again."""
    of_layer = layer_activation_bytes(shape, WIDTH[settings.dtype])
    if settings.gradient_checkpointing:
        return tokens * (4 * shape.hidden * shape.layers + of_layer)
    return tokens * shape.layers * of_layer


def microbatches(tokens: float, settings: ModelSettings) -> int:
    """At least so many microbatches for so many padded tokens."""
    return max(1, math.ceil(tokens / settings.microbatch_tokens))

"""Sums over the vocabulary under a policy and frozen models, without ever holding [rows, tokens, vocabulary].

Positions are worked through in chunks: each chunk's logits exist only while its sums are made, and the backward pass
makes them again. Shapes: N positions, H hidden, V vocabulary, K tokens of a support.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graftrl.objective.distillation import LogMixture, entropy, expected_signal
from graftrl.policies.logprobs import Head, HeadGradients, compute_dtype


@dataclass(frozen=True)
class Distribution:
    """A model's distributions at N positions, as the hidden states [N, H] that its output head turns into logits."""

    hidden_NH: Tensor
    head: Head

    @property
    def vocabulary(self) -> int:
        return self.head.weight.shape[0]

    def logits(self, positions: slice, vocabulary: int) -> Tensor:
        """float32 [positions, vocabulary]: the first entries, which models of one tokenizer share."""
        return self.head.columns(0, vocabulary).logits(self.hidden_NH[positions])


def mixture_signal(
    own: Distribution, frozen: Mapping[str, Distribution], mixture: LogMixture, max_elements: int
) -> tuple[Tensor, Tensor]:
    """E_{a ~ pi}[signal(a)] at each position, differentiable in `own`, and the policy's entropy, a constant.

    Models of one tokenizer may have output heads of different sizes, padded to a round number. All are cut to the
    smallest, and their distributions normalised on it.

    Args:
        own: of the policy pi. frozen: of the mixture's other models, at the same positions.
        max_elements: at most this many logits exist at once, of all models together.

    Returns:
        float32 [N] each.
    """
    return _MixtureSignal.apply(  # type: ignore[no-untyped-call]
        own.hidden_NH, own.head.weight, own.head.bias, own.head, frozen, mixture, max_elements
    )


def top_logprobs(distribution: Distribution, k: int, max_elements: int) -> tuple[Tensor, Tensor]:
    """The k most likely tokens at each position, int64 [N, k], and their log-probabilities, float32 [N, k]."""
    size = distribution.vocabulary
    found = [
        distribution.logits(part, size).log_softmax(-1).topk(k, dim=-1)
        for part in _chunks(len(distribution.hidden_NH), max(1, max_elements // size))
    ]
    return torch.cat([top.indices for top in found]), torch.cat([top.values for top in found])


class _MixtureSignal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        frozen: Mapping[str, Distribution],
        mixture: LogMixture,
        max_elements: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(hidden)
        own = Distribution(hidden.to(dtype), Head(weight.to(dtype), bias, head.scale, head.cap))
        vocabulary = min(model.vocabulary for model in (own, *frozen.values()))
        chunk = max(1, max_elements // (vocabulary * (len(frozen) + 1)))
        signal = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(signal)
        for part in _chunks(len(hidden), chunk):
            logits = own.logits(part, vocabulary)
            signal[part], _ = _on_support(logits, _target(frozen, mixture, part, vocabulary), mixture)
            entropies[part] = entropy(logits)
        ctx.save_for_backward(own.hidden_NH, own.head.weight, bias)
        ctx.models = own.head.scale, own.head.cap, frozen, mixture, vocabulary, chunk
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(entropies)
        return signal, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_N = grads[0]
        hidden, weight, bias = ctx.saved_tensors
        scale, cap, frozen, mixture, vocabulary, chunk = ctx.models
        own = Distribution(hidden, Head(weight, bias, scale, cap))
        gradients = HeadGradients(hidden, own.head, ctx.needs_input_grad[:3])
        columns = slice(0, vocabulary)
        for part in _chunks(len(hidden), chunk):
            logits = own.logits(part, vocabulary)
            _, grad = _on_support(logits, _target(frozen, mixture, part, vocabulary), mixture)
            slope = None if cap is None else 1 - (logits / cap).square()
            gradients.add(part, columns, grad.mul_(grad_N[part, None]), slope)
        return (*gradients.results(*ctx.dtypes), None, None, None, None)


def _target(frozen: Mapping[str, Distribution], mixture: LogMixture, part: slice, vocabulary: int) -> Tensor:
    """sum_i weight_i * log q_i, [positions, V], one model's logits at a time."""
    total: Tensor | None = None
    for name, weight in mixture.weights.items():
        term = frozen[name].logits(part, vocabulary).log_softmax(-1).mul_(weight)
        total = term if total is None else total.add_(term)
    assert total is not None
    return total


def _on_support(logits_NV: Tensor, target_NV: Tensor, mixture: LogMixture) -> tuple[Tensor, Tensor]:
    """The expected signal [N] and its gradient in the logits [N, V], summed over the mixture's support."""
    if mixture.support is None or mixture.support >= logits_NV.shape[-1]:
        return expected_signal(logits_NV, target_NV, mixture.own)
    target_NK, tokens_NK = target_NV.topk(mixture.support, dim=-1)
    expected_N, grad_NK = expected_signal(logits_NV.gather(-1, tokens_NK), target_NK, mixture.own)
    return expected_N, torch.zeros_like(logits_NV).scatter_(-1, tokens_NK, grad_NK)


def _chunks(positions: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, positions, size))

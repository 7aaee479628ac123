"""Log-probabilities of given tokens without ever holding [rows, tokens, vocabulary].

The output head is applied to tiles: some positions times some of the vocabulary. The forward pass keeps one number per
token (the log of the normaliser); the backward pass computes each tile's logits again and turns them into gradients in
place. On a CPU a tile fits the cache, so that logits never travel to memory. Shapes: N positions, H hidden, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

_CACHED = 1 << 18  # elements of a tile in a core's cache (1 MiB)
_KEPT = 1 << 22  # up to this many probabilities are kept for the backward pass rather than computed again


@dataclass(frozen=True)
class Head:
    """The output head: logits = cap * tanh(scale * (hidden @ weight^T + bias) / cap).

    scale: Cohere multiplies its logits, Granite divides them. cap: Gemma 2's soft cap, None where there is none.
    """

    weight: Tensor  # [V, H]
    bias: Tensor | None
    scale: float = 1.0
    cap: float | None = None

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """float32 [N, V]."""
        dtype = compute_dtype(hidden_NH)
        return self._transform(_linear(hidden_NH.to(dtype), self.weight.to(dtype), self.bias).float())

    def cast(self, dtype: torch.dtype) -> Head:
        """The same head in another precision, for many small calls: casting a large weight at each would dominate."""
        return replace(self, weight=self.weight.to(dtype))

    def columns(self, start: int, stop: int) -> Head:
        """The head of the vocabulary entries start to stop - 1; a view."""
        return replace(self, weight=self.weight[start:stop], bias=None if self.bias is None else self.bias[start:stop])

    def _transform(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Autocast's precision where it is on, else that of the hidden states."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def token_logprobs(hidden_NH: Tensor, targets_N: Tensor, head: Head, max_elements: int) -> Tensor:
    """log pi(target) at each position, float32 [N], differentiable in hidden and the head's weight.

    Args:
        hidden_NH: final hidden states at the positions that predict the targets.
        targets_N: int64.
        max_elements: at most this many logits exist at once.
    """
    return _TokenLogprobs.apply(hidden_NH, head.weight, head.bias, targets_N, head, max_elements)  # type: ignore[no-untyped-call]


def _tile_shape(hidden: Tensor, vocabulary: int, max_elements: int) -> tuple[int, int]:
    """Positions and vocabulary entries of a tile.

    Only float32 on a CPU splits the vocabulary: elsewhere the products of a split would be rounded before they are
    summed, and there is no cache to fit.
    """
    positions = len(hidden)
    if positions * vocabulary <= min(max_elements, _KEPT):
        return max(positions, 1), vocabulary
    if hidden.device.type != "cpu" or hidden.dtype != torch.float32:
        return max(1, max_elements // vocabulary), vocabulary
    elements = min(max_elements, _CACHED)
    rows = max(1, min(positions, elements // min(vocabulary, 512)))
    return rows, min(vocabulary, max(64, elements // rows))


class HeadGradients:
    """Gradients of hidden states, weight and bias of an output head, added up tile by tile from those of the logits.

    Args:
        hidden: [N, H], in the precision of the products. wants: which of the three are needed.
    """

    def __init__(self, hidden: Tensor, head: Head, wants: Sequence[bool]) -> None:
        self._inputs, self._head = hidden, head
        weight, bias = head.weight, head.bias
        self.hidden = torch.zeros_like(hidden) if wants[0] else None
        self.weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wants[1] else None
        self.bias = torch.zeros_like(bias) if bias is not None and wants[2] else None

    def add(self, part: slice, tile: slice, grad: Tensor, slope: Tensor | None) -> None:
        """What flows back from the logits of positions `part` and vocabulary entries `tile`; `grad` is overwritten.

        slope: the cap's derivative at these logits, None where there is no cap.
        """
        if slope is not None:
            grad.mul_(slope)
        if self._head.scale != 1.0:
            grad.mul_(self._head.scale)
        if self.bias is not None:
            self.bias[tile] += grad.sum(dim=0)
        grad = grad.to(self._inputs.dtype)
        if self.hidden is not None:
            self.hidden[part].addmm_(grad, self._head.weight[tile])
        if self.weight is not None:
            if grad.dtype == torch.float32:
                self.weight[tile].addmm_(grad.t(), self._inputs[part])
            else:
                self.weight[tile] += grad.t() @ self._inputs[part]

    def results(
        self, hidden_dtype: torch.dtype, weight_dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of hidden states, weight and bias; None for those not wanted."""
        return (
            None if self.hidden is None else self.hidden.to(hidden_dtype),
            None if self.weight is None else self.weight.to(weight_dtype),
            self.bias,
        )


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        max_elements: int,
    ) -> Tensor:
        dtype = compute_dtype(hidden)
        hidden_c, weight_c = hidden.to(dtype), weight.to(dtype)
        head = replace(head, weight=weight_c, bias=bias)
        vocabulary = weight.shape[0]
        rows, columns = _tile_shape(hidden_c, vocabulary, max_elements)
        keeps = rows >= len(targets) and columns == vocabulary and head.cap is None and any(ctx.needs_input_grad)
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        normaliser = torch.empty_like(logprobs)
        probabilities: Tensor | None = None
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            highest, totals, chosen = [], [], torch.zeros_like(logprobs[part])
            for first in range(0, vocabulary, columns):
                logits = head.columns(first, first + columns).logits(hidden_c[part])
                place, here = _within(targets[part], first, logits.shape[-1])
                chosen = torch.where(here, logits.gather(-1, place[:, None]).squeeze(-1), chosen)
                highest.append(logits.amax(dim=-1))
                exponentials = logits.sub_(highest[-1][:, None]).exp_()
                totals.append(exponentials.sum(dim=-1))
            top = torch.stack(highest).amax(dim=0)
            total = (torch.stack(totals) * (torch.stack(highest) - top).exp()).sum(dim=0)
            normaliser[part] = top + total.log()
            logprobs[part] = chosen - top - total.log()
            if keeps:
                probabilities = exponentials.div_(total[:, None])
        ctx.save_for_backward(hidden_c, weight_c, bias, targets, normaliser, probabilities)
        ctx.head, ctx.tile = replace(head, weight=hidden_c.new_empty(0), bias=None), (rows, columns)
        ctx.dtypes = hidden.dtype, weight.dtype
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_N,) = grads
        hidden, weight, bias, targets, normaliser, kept = ctx.saved_tensors
        head: Head = replace(ctx.head, weight=weight, bias=bias)
        rows, columns = ctx.tile
        gradients = HeadGradients(hidden, head, ctx.needs_input_grad[:3])
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            hidden_part, grad_part = hidden[part], grad_N[part]
            for first in range(0, len(weight), columns):
                tile = slice(first, first + columns)
                slope = None
                if kept is None:
                    logits = head.columns(first, first + columns).logits(hidden_part)
                    if head.cap is not None:
                        slope = 1 - (logits / head.cap).square()
                    probabilities = logits.sub_(normaliser[part, None]).exp_()
                else:
                    probabilities = kept
                # d log p(target) / d logits = onehot(target) - p
                grad = probabilities.mul_(-grad_part[:, None])
                place, here = _within(targets[part], first, grad.shape[-1])
                grad.scatter_add_(-1, place[:, None], (grad_part * here)[:, None])
                gradients.add(part, tile, grad, slope)
        return (*gradients.results(*ctx.dtypes), None, None, None)


def _within(targets: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Each target's column in the tile that starts at `first` (clamped into it), and whether it lies there."""
    place = targets - first
    return place.clamp(0, size - 1), (place >= 0) & (place < size)


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(hidden, weight, None if bias is None else bias.to(weight.dtype))

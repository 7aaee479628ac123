"""Log-probabilities of given tokens without ever holding [rows, tokens, vocabulary].

The output head is applied to chunks of positions. The forward pass keeps one number per token (the log of the
normaliser); the backward pass computes each chunk's logits again and turns them into gradients in place. Shapes: N
positions, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


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
        chunk = max(1, max_elements // weight.shape[0])
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        normaliser = torch.empty_like(logprobs)
        probabilities: Tensor | None = None
        for start in range(0, len(targets), chunk):
            stop = start + chunk
            logits = head._transform(_linear(hidden_c[start:stop], weight_c, bias).float())
            highest = logits.amax(dim=-1, keepdim=True)
            chosen = logits.gather(-1, targets[start:stop, None])
            exponentials = logits.sub_(highest).exp_() if head.cap is None else (logits - highest).exp()
            total = exponentials.sum(dim=-1, keepdim=True)
            normaliser[start:stop] = (highest + total.log()).squeeze(-1)
            logprobs[start:stop] = (chosen - highest - total.log()).squeeze(-1)
            if len(targets) <= chunk and head.cap is None and any(ctx.needs_input_grad):
                probabilities = exponentials.div_(total)  # fits: saves the second matrix product
        ctx.save_for_backward(hidden_c, weight_c, bias, targets, normaliser, probabilities)
        ctx.head, ctx.chunk = head, chunk
        ctx.dtypes = hidden.dtype, weight.dtype
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_N,) = grads
        hidden, weight, bias, targets, normaliser, kept = ctx.saved_tensors
        head: Head = ctx.head
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wants_weight else None
        grad_bias = torch.zeros_like(bias) if wants_bias else None
        for start in range(0, len(targets), ctx.chunk):
            stop = start + ctx.chunk
            if kept is None:
                logits = head._transform(_linear(hidden[start:stop], weight, bias).float())
                slope = None if head.cap is None else 1 - (logits / head.cap).square()
                probabilities = logits.sub_(normaliser[start:stop, None]).exp_()
            else:
                slope, probabilities = None, kept
            # d log p(target) / d logits = onehot(target) - p
            grad = probabilities.mul_(-grad_N[start:stop, None])
            grad.scatter_add_(-1, targets[start:stop, None], grad_N[start:stop, None])
            if slope is not None:
                grad.mul_(slope)
            if head.scale != 1.0:
                grad.mul_(head.scale)
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[start:stop])
            if grad_weight is not None:
                if grad.dtype == torch.float32:
                    grad_weight.addmm_(grad.t(), hidden[start:stop])
                else:
                    grad_weight += grad.t() @ hidden[start:stop]
        hidden_dtype, weight_dtype = ctx.dtypes
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_dtype),
            None if grad_weight is None else grad_weight.to(weight_dtype),
            grad_bias,
            None,
            None,
            None,
        )


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(hidden, weight, None if bias is None else bias.to(weight.dtype))

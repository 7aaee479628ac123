"""Per-token surrogates and ratios. Each takes log-probabilities in nats and returns one value per token.

Surrogates are to be *maximised*; a method's token loss is their negative.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LOG_RATIO_LIMIT = 20.0  # nats; exp of more overflows float32 and turns a gradient into NaN. verl clamps there too


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """rho = exp(logprobs - old_logprobs), the log-ratio clamped to +-20 nats (GRAFT, equation 3)."""
    return torch.exp((logprobs - old_logprobs).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))


def _bounded(ratio: Tensor, clip_low: float, clip_high: float | Tensor) -> Tensor:
    """clip(ratio, 1 - clip_low, 1 + clip_high)."""
    if isinstance(clip_high, Tensor):
        return torch.minimum(ratio.clamp(min=1 - clip_low), 1 + clip_high)
    return ratio.clamp(1 - clip_low, 1 + clip_high)


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float | Tensor
) -> Tensor:
    """min(rho * a, clip(rho, 1 - clip_low, 1 + clip_high) * a), rho = exp(logprobs - old_logprobs) (GRAFT, equation 2).

    Args:
        logprobs: [..., tokens] under the weights being trained.
        old_logprobs: [..., tokens] under the receiver's weights at the start of the step.
        advantages: broadcastable to logprobs. A row's weight w >= 0 may be folded in:
            w * min(rho a, clip(rho) a) = min(rho (w a), clip(rho) (w a)).
        clip_high: a number, or a tensor that broadcasts to logprobs (a bound for each row).

    Returns:
        [..., tokens], to be maximised.
    """
    ratio = importance_ratio(logprobs, old_logprobs)
    return torch.minimum(ratio * advantages, _bounded(ratio, clip_low, clip_high) * advantages)


def clipped(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float | Tensor
) -> Tensor:
    """bool [..., tokens]: the clipped surrogate is strictly smaller than the unclipped one (GRAFT, appendix H)."""
    ratio = importance_ratio(logprobs, old_logprobs)
    return _bounded(ratio, clip_low, clip_high) * advantages < ratio * advantages


def dual_clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float | Tensor,
    dual_clip: float,
) -> Tensor:
    """The clipped surrogate bounded below by `dual_clip * a` where a < 0 (Ye et al., 2020), dual_clip > 1."""
    surrogate = clipped_surrogate(logprobs, old_logprobs, advantages, clip_low, clip_high)
    return torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)


def k3_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(pi || pi_ref) per token: exp(d) - d - 1 with d = ref_logprobs - logprobs; >= 0."""
    difference = ref_logprobs - logprobs
    return torch.expm1(difference) - difference  # exp(d) - 1 would cancel to a negative residue near d = 0


def damping(logprobs: Tensor, tau: float) -> Tensor:
    """c = min(p / tau, 1) per token, a truncated importance weight (SCION); tau = 0 damps nothing."""
    return torch.ones_like(logprobs) if tau == 0 else (logprobs.exp() / tau).clamp(max=1.0)


def damped_nll(logprobs: Tensor, tau: float) -> Tensor:
    """The function whose gradient is that of stopgrad(c) * -log p, c = min(p / tau, 1) (SCION).

    -log p where p >= tau, else 1 - log(tau) - p / tau: linear in p below tau, so one token's influence is bounded.
    """
    if tau == 0:
        return -logprobs
    log_tau = math.log(tau)
    # Both branches are finite everywhere, so the one not chosen cannot spoil the gradient.
    return torch.where(logprobs >= log_tau, -logprobs, 1 - log_tau - logprobs.exp() / tau)


def sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log of the length-normalised sequence ratio, per token with the token's own gradient (GSPO-token).

    The value at every token of a row is mean_t(logprobs - old_logprobs) over its masked tokens; the gradient flows
    through the token's log-probability alone, the sequence value being detached (Zheng et al., 2025, section 4.3).

    Args:
        logprobs, old_logprobs: [rows, tokens].
        mask: bool [rows, tokens].

    Returns:
        [rows, tokens]; exp of it is the ratio.
    """
    lengths = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    difference = (logprobs - old_logprobs).detach()
    # Chosen, not multiplied: 0 * NaN on padding would reach every token of the row.
    mean = torch.where(mask, difference, torch.zeros_like(difference)).sum(dim=-1, keepdim=True) / lengths
    return logprobs - logprobs.detach() + mean

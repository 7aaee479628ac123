"""On-policy distillation: what frozen models ask of a policy, as one signed sum of log-probabilities per token.

    signal(a) = sum_i weight_i * log q_i(a)  -  own * log pi(a)

Each method of the family is a choice of the weights. Maximising the policy's expected signal in every state minimises
own * KL(pi || pi*), pi* proportional to exp(sum_i weight_i log q_i / own). Shapes: B rows, T response tokens, V
vocabulary, M views; everything in nats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

REFERENCE = "@reference"  # in a mixture: the trained model's own frozen start; no scorer can have this name


@dataclass(frozen=True)
class LogMixture:
    """The weights of a signal.

    weights: by scorer; `REFERENCE` stands for the model's own frozen start. own: of the policy that trains, >= 0.
    support: sums over the vocabulary run over the tokens that the target holds most likely, so many of them, with the
        policy normalised on them; None: over all tokens.
    """

    weights: Mapping[str, float]
    own: float
    support: int | None = None

    def target(self, logprobs: Mapping[str, Tensor]) -> Tensor:
        """sum_i weight_i * log q_i: the signal's part that does not change with the policy. Any one shape."""
        return sum(weight * logprobs[name] for name, weight in self.weights.items())  # type: ignore[return-value]

    def signal(self, logprobs: Mapping[str, Tensor], own_logprobs: Tensor) -> Tensor:
        """The signal at given tokens, under the policy's log-probabilities of the same shape."""
        return self.target(logprobs) - self.own * own_logprobs


def transfer_mixture(positive: str, negative: str, calibration: float) -> LogMixture:
    """log q+ - log q- - lambda * (log pi - log pi_ref), lambda = calibration (P-OPD, section 4).

    Per state lambda * KL(pi || pi*), pi* proportional to pi_ref * (q+ / q-)^(1 / lambda); with lambda = 0 the argmax of
    q+ / q-.
    """
    reference = {REFERENCE: calibration} if calibration else {}
    return LogMixture({positive: 1.0, negative: -1.0, **reference}, calibration)


def expected_signal(logits_V: Tensor, target_V: Tensor, own: float) -> tuple[Tensor, Tensor]:
    """E_{a ~ pi}[signal(a)] and its gradient in the logits, pi = softmax(logits).

    The gradient is p * (signal - its expectation): the part through log pi itself adds up to 0.

    Args:
        logits_V, target_V: [..., V].

    Returns:
        [...] and [..., V].
    """
    logprobs_V = logits_V.log_softmax(-1)
    signal_V = target_V - own * logprobs_V
    probabilities_V = logprobs_V.exp()
    expected = (probabilities_V * signal_V).sum(-1)
    return expected, probabilities_V * (signal_V - expected[..., None])


def entropy(logits_V: Tensor) -> Tensor:
    """Entropy of softmax(logits), [...]."""
    logprobs_V = logits_V.log_softmax(-1)
    return -(logprobs_V.exp() * logprobs_V).sum(-1)


def agrees(signal: Tensor, outcomes: Tensor) -> Tensor:
    """OPD-URM: bool, the signal has the sign of the trajectory's outcome 2r - 1; False where either is 0."""
    return outcomes * signal > 0


def view_consensus(views_M: Tensor, logprobs: Tensor) -> Tensor:
    """AVSD's signal at given tokens, from what several privileged views q_m of a model hold of them.

    D_m = log q_m - log p, A = mean D_m, J = log mean q_m - mean log q_m >= 0 (the views' disagreement),
    g = (|A| / mean |D_m|) * |A| / (|A| + J); the signal is A + g * J, and 0 where all D_m are.

    Args:
        views_M: [M, ...]. logprobs: [...].
    """
    differences_M = views_M - logprobs
    consensus = differences_M.mean(0)
    residual = (views_M.logsumexp(0) - math.log(len(views_M)) - views_M.mean(0)).clamp(min=0.0)
    size, spread = consensus.abs(), differences_M.abs().mean(0)
    tiny = torch.finfo(views_M.dtype).tiny
    gate = size / spread.clamp(min=tiny) * size / (size + residual).clamp(min=tiny)
    return consensus + gate * residual


def drift_gate(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor, tau: float, block: int) -> Tensor:
    """Blockwise drift gating: position weights that fall where the policy has left the one that sampled.

    exp(-tau * |mean over a block of (old_logprobs - logprobs)|), blocks of `block` tokens from the response's start,
    divided by its mean over the response's tokens. Constant; [B, T].
    """
    rows, tokens = logprobs_BT.shape
    padding = -tokens % block
    mask_BKb = torch.nn.functional.pad(mask_BT, (0, padding)).view(rows, -1, block)
    drift_BT = torch.where(mask_BT, old_logprobs_BT - logprobs_BT, 0.0).detach()
    drift_BKb = torch.nn.functional.pad(drift_BT, (0, padding)).view(rows, -1, block)
    mean_BK = drift_BKb.sum(-1) / mask_BKb.sum(-1).clamp(min=1)
    gate_BT = (-tau * mean_BK.abs()).exp().repeat_interleave(block, dim=-1)[:, :tokens]
    total_B1 = torch.where(mask_BT, gate_BT, 0.0).sum(-1, keepdim=True)
    return gate_BT * mask_BT.sum(-1, keepdim=True) / total_B1.clamp(min=torch.finfo(gate_BT.dtype).tiny)


def token_importance(entropy_BT: Tensor, divergence_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """RSTG: 1 - (1 - H)(1 - D), large where the student is unsure or far from the teacher; [B, T].

    H, D: entropy and divergence over their largest value among the response's tokens, so that either can reach 1.
    """
    unsure, far = (_over_largest(values, mask_BT) for values in (entropy_BT, divergence_BT))
    return 1 - (1 - unsure) * (1 - far)


def _over_largest(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    inside_BT = torch.where(mask_BT, values_BT, 0.0).clamp(min=0.0)
    return inside_BT / inside_BT.amax(-1, keepdim=True).clamp(min=torch.finfo(values_BT.dtype).tiny)


def top_share(scores_BT: Tensor, mask_BT: Tensor, share: float) -> Tensor:
    """bool [B, T]: the ceil(share * tokens) highest scores among each row's tokens; of equal ones the earlier."""
    ranked = torch.where(mask_BT, scores_BT, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank_BT = torch.empty_like(ranked).scatter_(
        -1, ranked, torch.arange(scores_BT.shape[1]).to(ranked).expand_as(ranked)
    )
    return mask_BT & (rank_BT < (share * mask_BT.sum(-1, keepdim=True).double() - 1e-9).ceil())


def span_sums(values_BT: Tensor, spans_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """At every token the sum over its span: [B, T].

    spans_BT: int64, which span of its row a token belongs to, from 0.
    """
    inside_BT = torch.where(mask_BT, values_BT, 0.0)
    sums = torch.zeros_like(inside_BT).scatter_add(-1, spans_BT, inside_BT)
    return sums.gather(-1, spans_BT)

"""HACPO: every prompt's peer responses are appended to the receiver's own, with capability-aware advantages.

Zhang et al. (2026). Sequence-level ratios in the GSPO-token form: the value is the whole response's, the gradient flows
through each token's log-probability.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field

from graftrl.errors import ConfigError
from graftrl.exchange import Rejected
from graftrl.methods.base import (
    Exchange,
    Groups,
    StepContext,
    cut_by_prompt,
    direction_stats,
    own_rows,
    peer_row,
    transfer_of,
)
from graftrl.methods.grpo import kl_loss
from graftrl.objective import Objective, Term, TokenBatch, sequence_log_ratio, sequence_mean
from graftrl.objective.capability import capability, capability_advantages, capability_ratio
from graftrl.objective.terms import TokenLoss
from graftrl.rollout import Group, Row
from graftrl.settings import Settings


class HACPOSettings(Settings):
    """clip_low, clip_high: of own rows' sequence ratio. cross_low + cross_step * b: lower bound of a peer row's ratio
    in minibatch b of the step; the upper bound is 1. alpha: exponent of the detached ratio. window: steps that a
    model's capability is averaged over."""

    name: str = "hacpo"
    clip_low: float = Field(3e-4, ge=0, lt=1)
    clip_high: float = Field(4e-4, ge=0)
    cross_low: float = Field(0.8, ge=0, le=1)
    cross_step: float = Field(0.025, ge=0)
    alpha: float = Field(1.0, ge=0)
    window: int = Field(5, ge=1)
    kl_coefficient: float = Field(1e-3, ge=0)


class HACPO:
    settings_type: ClassVar[type[Settings]] = HACPOSettings
    fewest_models: ClassVar[int] = 2
    filter: Callable[[Group], bool] | None = None
    sampling_rounds = 1

    def __init__(self, settings: HACPOSettings) -> None:
        self.settings = settings

    def exchange(self, groups: Groups, context: StepContext) -> Exchange:
        if len(groups) != 2:
            raise ConfigError(f"hacpo is defined for two models; the recipe has {len(groups)}")
        exchange = Exchange({})
        candidates: Counter[tuple[str, str]] = Counter()
        shared = self.shared(groups, context)
        strength = {m: capability(context.mean_rewards[m], self.settings.window) for m in groups}
        for receiver, of_receiver in groups.items():
            (source,) = (model for model in groups if model != receiver)
            omega = capability_ratio(strength[source], strength[receiver])
            peer_of = {group.prompt.id: group for group in groups[source]}
            rows: list[Row] = []
            for group in of_receiver:
                if group.prompt.id not in shared[receiver]:
                    rows += own_rows(group, context.codecs[receiver])
                    continue
                peer = peer_of[group.prompt.id]
                candidates[source, receiver] += 1
                advantages, peer_advantages = capability_advantages(group.rewards, peer.rewards, omega)
                own = own_rows(group, context.codecs[receiver])
                for row, advantage in zip(own, advantages.tolist(), strict=True):
                    row.advantages = advantage
                rows += own
                for index, advantage in enumerate(peer_advantages.tolist()):
                    appended = peer_row(peer, index, receiver, context, advantage=advantage, kind="peer")
                    if isinstance(appended, Rejected) or not np.isfinite(appended.source_logprob):
                        reason = appended.reason if isinstance(appended, Rejected) else "not finite"
                        rejected = transfer_of(receiver, peer, index, "rejected", reason, advantage=advantage)
                        exchange.transfers.append(rejected)
                        continue
                    appended.weight = omega
                    # The cross ratio compares with the source at generation, not with the receiver's old policy.
                    appended.old_logprobs = np.zeros(len(appended.response_token_ids), np.float32)
                    rows.append(appended)
                    exchange.transfers.append(
                        transfer_of(
                            receiver, peer, index, "admitted", advantage=advantage, weight=omega,
                            receiver_tokens=len(appended.response_token_ids),
                        )
                    )  # fmt: skip
            exchange.rows[receiver] = rows
        exchange.directions = direction_stats(exchange.transfers, groups, candidates)
        return exchange

    def shared(self, groups: Groups, context: StepContext) -> Mapping[str, Container[str]]:
        """Per receiver the prompts whose peer group joins its own: every one."""
        return {receiver: {group.prompt.id for group in of_receiver} for receiver, of_receiver in groups.items()}

    def order(self, rows: Sequence[Row], minibatch_prompts: int, rng: np.random.Generator) -> list[list[Row]]:
        """Own minibatches first, then the peer's."""
        own = [row for row in rows if row.kind == "own"]
        peer = [row for row in rows if row.kind == "peer"]
        return [*cut_by_prompt(own, minibatch_prompts), *cut_by_prompt(peer, minibatch_prompts)]

    def objective(self, minibatch_index: int) -> Objective:
        s = self.settings
        lower = min(s.cross_low + s.cross_step * minibatch_index, 1.0)

        def own_loss(tokens: TokenBatch) -> TokenLoss:
            ratio = sequence_log_ratio(tokens.logprobs_BT, tokens.old_logprobs_BT, tokens.mask_BT).exp()
            bounded = ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
            a = tokens.advantages_BT
            return TokenLoss(-torch.minimum(ratio * a, bounded * a), bounded * a < ratio * a)

        def peer_loss(tokens: TokenBatch) -> TokenLoss:
            source = tokens.source_logprobs_B[:, None].expand_as(tokens.logprobs_BT)
            # exp(l(pi_theta) - l(pi_S)), both means without EOS; no pessimistic minimum: outside the bounds no gradient
            ratio = sequence_log_ratio(tokens.logprobs_BT, source, tokens.content_mask_BT).exp()
            bounded = ratio.clamp(lower, 1.0)
            return TokenLoss(-tokens.advantages_BT * bounded * bounded.detach() ** s.alpha, bounded != ratio)

        terms = [
            Term(("own",), own_loss, sequence_mean, policy_gradient=True),
            Term(("peer",), peer_loss, sequence_mean, policy_gradient=True),
        ]
        if s.kl_coefficient > 0:
            terms.append(Term(("own",), kl_loss, sequence_mean, coefficient=s.kl_coefficient))
        return Objective(tuple(terms), needs_reference=s.kl_coefficient > 0)

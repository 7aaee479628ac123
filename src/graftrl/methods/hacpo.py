"""HACPO: every prompt's peer responses are appended to the receiver's own, with capability-aware advantages.

Zhang et al. (2026). Sequence-level ratios in the GSPO-token form: the value is the whole response's, the gradient flows
through each token's log-probability. The paper has two models; with more, the receiver's group and all peers' groups on
a prompt are pooled, each peer with its own capability ratio.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from graftrl.exchange import Rejected
from graftrl.methods.base import (
    Exchange,
    Groups,
    StepContext,
    cut_by_prompt,
    direction_stats,
    groups_by_prompt,
    own_rows,
    peer_row,
    receiving,
    transfer_of,
)
from graftrl.methods.grpo import kl_loss
from graftrl.objective import Objective, Term, TokenBatch, sequence_log_ratio, sequence_mean
from graftrl.objective.capability import capability, capability_ratio, pooled_advantages
from graftrl.objective.terms import TokenLoss
from graftrl.rollout import Group, Row
from graftrl.settings import Settings


class HACPOSettings(Settings):
    """clip_low, clip_high: of own rows' sequence ratio.
    cross_low: lower bound of a peer row's ratio in the step's first minibatch; the upper bound is 1.
    cross_step: what each further minibatch of the step adds to it.
    alpha: exponent of the detached ratio.
    window: steps that a model's capability is averaged over.
    kl_coefficient: of the k3 estimate of KL(pi || reference) on own rows; 0 means no reference is loaded.
    """

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
        exchange = Exchange({})
        candidates: Counter[tuple[str, str]] = Counter()
        shared = self.shared(groups, context)
        strength = {m: capability(context.mean_rewards.get(m, ()), self.settings.window) for m in groups}
        for receiver, of_receiver in receiving(groups, context).items():
            omega = {m: capability_ratio(strength[m], strength[receiver]) for m in groups if m != receiver}
            rows: list[Row] = []
            for group in of_receiver:
                own = own_rows(group, context.codecs[receiver])
                rows += own
                peers = shared[receiver].get(group.prompt.id, [])
                if not peers:
                    continue
                candidates.update((peer.model, receiver) for peer in peers)
                advantages, of_peers = pooled_advantages(
                    group.rewards, [(peer.rewards, omega[peer.model]) for peer in peers]
                )
                for row, advantage in zip(own, advantages.tolist(), strict=True):
                    row.advantages = advantage
                for peer, peer_advantages in zip(peers, of_peers, strict=True):
                    rows += self._append(peer, peer_advantages, omega[peer.model], receiver, context, exchange)
            exchange.rows[receiver] = rows
        exchange.directions = direction_stats(exchange.transfers, groups, candidates, context.receivers)
        return exchange

    def _append(
        self,
        peer: Group,
        advantages: NDArray[np.float64],
        omega: float,
        receiver: str,
        context: StepContext,
        exchange: Exchange,
    ) -> list[Row]:
        """A peer's group as rows of the receiver, each weighted with the peer's capability ratio."""
        rows: list[Row] = []
        for index, advantage in enumerate(advantages.tolist()):
            row = peer_row(peer, index, receiver, context, advantage=advantage, kind="peer")
            if isinstance(row, Rejected) or not np.isfinite(row.source_logprob):
                reason = row.reason if isinstance(row, Rejected) else "not finite"
                rejected = transfer_of(receiver, peer, index, "rejected", reason, advantage=advantage)
                exchange.transfers.append(rejected)
                continue
            row.weight = omega
            # The cross ratio compares with the source at generation, not with the receiver's old policy.
            row.old_logprobs = np.zeros(len(row.response_token_ids), np.float32)
            rows.append(row)
            exchange.transfers.append(
                transfer_of(
                    receiver, peer, index, "admitted", advantage=advantage, weight=omega,
                    receiver_tokens=len(row.response_token_ids),
                )
            )  # fmt: skip
        return rows

    def shared(self, groups: Groups, context: StepContext) -> dict[str, dict[str, list[Group]]]:
        """Per receiver and prompt the peer groups that join its own: all there are."""
        of_prompt = groups_by_prompt(groups)
        return {
            receiver: {
                group.prompt.id: [peer for peer in of_prompt[group.prompt.id] if peer.model != receiver]
                for group in of_receiver
            }
            for receiver, of_receiver in receiving(groups, context).items()
        }

    def usable(self, own: Group, successes: int, size: int) -> bool:
        return True

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

"""SCION: one success of a better peer is imitated on every prompt, as strongly as the peer is better there.

A candidate rule of this project's own; the laboratory tells where it helps. GRPO trains on own groups. Where a peer
succeeds more often, one of its correct responses adds to the loss of a minibatch of P prompts

    lambda * (1 / P) * sum_q a_q * mean_t( c_t * -log p_t ),  a_q = (k_S - k_R) / n,  c_t = stopgrad(min(p_t / tau, 1))

Tokens that the receiver holds nearly impossible (habits of style, format or vocabulary) are damped like a truncated
importance weight. As the receiver learns a prompt, a_q goes to 0 and the rule becomes plain GRPO.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from graftrl.methods.base import (
    Exchange,
    Groups,
    StepContext,
    cut_by_prompt,
    direction_stats,
    groups_by_prompt,
    own_rows,
    receiving,
)
from graftrl.methods.grpo import ClipSettings, clip_objective
from graftrl.methods.sgt import draw_successes
from graftrl.objective import Objective, Term, TokenBatch, damped_nll, damping, row_mean
from graftrl.objective.terms import TokenLoss
from graftrl.rollout import Group, Row
from graftrl.seeds import generator
from graftrl.settings import Settings


class SCIONSettings(ClipSettings):
    """advantage: a_q as the "gap" in success rate, (k_S - k_R) / n, or the receiver's "headroom", 1 - k_R / n.
    tau: the probability below which a token is damped; 0 damps none. sft_coefficient: lambda. draws: distinct peer
    successes per prompt, whose mean counts. scope: "better", every prompt on which a peer succeeds more often, or only
    those that the receiver fails entirely, "all_fail"."""

    name: str = "scion"
    advantage: Literal["gap", "headroom"] = "gap"
    tau: float = Field(0.1, ge=0, le=1)
    sft_coefficient: float = Field(1.0, ge=0)
    draws: int = Field(1, ge=1)
    scope: Literal["better", "all_fail"] = "better"


def damped_loss(tau: float) -> Callable[[TokenBatch], TokenLoss]:
    """a * c_t * -log p_t in closed form; logs the mean of c_t, the share of damped tokens and the loss before a."""

    def loss(tokens: TokenBatch) -> TokenLoss:
        c = damping(tokens.logprobs_BT.detach(), tau)
        per_token = damped_nll(tokens.logprobs_BT, tau)
        means = {"damping": c, "damped": (c < 1).float(), "peer_loss": per_token.detach()}
        return TokenLoss(tokens.advantages_BT * per_token, means_BT=means)

    return loss


class SCION:
    settings_type: ClassVar[type[Settings]] = SCIONSettings
    fewest_models: ClassVar[int] = 2
    filter: Callable[[Group], bool] | None = None
    sampling_rounds = 1

    def __init__(self, settings: SCIONSettings) -> None:
        self.settings = settings
        own = clip_objective(settings, ("own",))
        peer = Term(
            ("sft",), damped_loss(settings.tau), row_mean, settings.sft_coefficient,
            policy_gradient=True, over_prompts=True,
        )  # fmt: skip
        self._objective = Objective((*own.terms, peer), own.needs_reference)

    def exchange(self, groups: Groups, context: StepContext) -> Exchange:
        exchange = Exchange({})
        candidates: Counter[tuple[str, str]] = Counter()
        of_prompt = groups_by_prompt(groups)
        for receiver, of_receiver in receiving(groups, context).items():
            rows: list[Row] = []
            for own in of_receiver:
                rows += own_rows(own, context.codecs[receiver], normalize_std=self.settings.normalize_std)
                peer = self.better_peer(own, of_prompt[own.prompt.id], context.seed)
                if peer is not None:
                    candidates[peer.model, receiver] += 1
                    rows += draw_successes(
                        [peer], receiver, context, exchange,
                        count=self.settings.draws, distinct=True, advantage=self.strength(own, peer),
                    )  # fmt: skip
            exchange.rows[receiver] = rows
        exchange.directions = direction_stats(exchange.transfers, groups, candidates, context.receivers)
        return exchange

    def usable(self, own: Group, successes: int, size: int) -> bool:
        return successes / size > _rate(own) and (self.settings.scope == "better" or own.all_fail)

    def better_peer(self, own: Group, groups: Sequence[Group], seed: int) -> Group | None:
        """The peer's group with the largest success rate, if that exceeds the receiver's; a tie is drawn."""
        peers = [group for group in groups if group.model != own.model]
        better = [peer for peer in peers if self.usable(own, peer.successes, peer.size)]
        if not better:
            return None
        best = max(_rate(group) for group in better)
        tied = sorted((group for group in better if _rate(group) == best), key=lambda group: group.model)
        return tied[generator(seed, "better peer", own.model, own.prompt.id).integers(len(tied))]

    def strength(self, own: Group, peer: Group) -> float:
        """a_q."""
        return (_rate(peer) if self.settings.advantage == "gap" else 1.0) - _rate(own)

    def order(self, rows: Sequence[Row], minibatch_prompts: int, rng: np.random.Generator) -> list[list[Row]]:
        return cut_by_prompt(rows, minibatch_prompts)

    def objective(self, minibatch_index: int) -> Objective:
        return self._objective


def _rate(group: Group) -> float:
    """k / n."""
    return group.successes / group.size

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
from pydantic import Field, model_validator

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
from graftrl.objective import Objective, Reduction, Term, TokenBatch, damped_nll, damping, row_mean, token_mean
from graftrl.objective.terms import TokenLoss
from graftrl.rollout import Group, Row
from graftrl.seeds import generator
from graftrl.settings import Settings

Normalization = Literal["prompts", "transferred", "tokens"]


class SCIONSettings(ClipSettings):
    """What a peer's success adds to GRPO.

    advantage: a_q as the "gap" in success rate, (k_S - k_R) / n; the gap "rated" by the peer's success rate, so that a
        peer that is seldom right says less; the receiver's "headroom", 1 - k_R / n; or "one".
    tau: the probability below which a token is damped; 0 damps none. sft_coefficient: lambda.
    draws: distinct peer successes per prompt, whose mean counts.
    scope: "better": every prompt on which a peer succeeds more often. "any": on which it succeeds at all, and the
        receiver not always. "all_fail": on which it succeeds at all, and the receiver never.
    imitate: whose success. "own_first": the receiver's own where it has one, else the peer's. "own": the receiver's own
        on every prompt that it solves in part, whatever the peers do. Both are controls.
    normalization: what the sum over prompts is divided by: all "prompts" of the minibatch, or those "transferred";
        "tokens": no mean over a response, but one over all imitated tokens of the minibatch (as in SGT).
    """

    name: str = "scion"
    advantage: Literal["gap", "rated", "headroom", "one"] = "gap"
    tau: float = Field(0.1, ge=0, le=1)
    sft_coefficient: float = Field(1.0, ge=0)
    draws: int = Field(1, ge=1)
    scope: Literal["better", "any", "all_fail"] = "better"
    imitate: Literal["peer", "own_first", "own"] = "peer"
    normalization: Normalization = "prompts"

    @model_validator(mode="after")
    def _fits_together(self) -> SCIONSettings:
        if self.advantage in ("gap", "rated") and (self.scope == "any" or self.imitate == "own"):
            why = "scope any" if self.scope == "any" else "imitate own"
            raise ValueError(f"{why} needs advantage headroom or one: where no peer is better, the gap is not above 0")
        if self.imitate != "peer" and self.scope == "all_fail":
            raise ValueError(f"imitate {self.imitate} needs another scope: on all-fail prompts there is no own success")
        if self.normalization == "tokens" and self.draws > 1:
            raise ValueError("normalization tokens needs draws 1: draws share a weight, their tokens would not")
        return self


def damped_loss(tau: float) -> Callable[[TokenBatch], TokenLoss]:
    """a * c_t * -log p_t in closed form; logs the mean of c_t, the share of damped tokens and the loss before a."""

    def loss(tokens: TokenBatch) -> TokenLoss:
        c = damping(tokens.logprobs_BT.detach(), tau)
        per_token = damped_nll(tokens.logprobs_BT, tau)
        means = {"damping": c, "damped": (c < 1).float(), "peer_loss": per_token.detach()}
        return TokenLoss(tokens.advantages_BT * per_token, means_BT=means)

    return loss


def imitation_term(tau: float, coefficient: float, normalization: Normalization = "prompts") -> Term:
    """The loss on imitated successes, rows of the kind "sft" with their a_q as advantage."""
    reduction: Reduction = token_mean if normalization == "tokens" else row_mean
    over: dict[Normalization, Literal["all", "kinds", "none"]]
    over = {"prompts": "all", "transferred": "kinds", "tokens": "none"}
    return Term(
        ("sft",), damped_loss(tau), reduction, coefficient, policy_gradient=True, over_prompts=over[normalization]
    )


class SCION:
    settings_type: ClassVar[type[Settings]] = SCIONSettings
    fewest_models: ClassVar[int] = 2
    filter: Callable[[Group], bool] | None = None
    sampling_rounds = 1

    def __init__(self, settings: SCIONSettings) -> None:
        self.settings = settings
        own = clip_objective(settings, ("own",))
        peer = imitation_term(settings.tau, settings.sft_coefficient, settings.normalization)
        self._objective = Objective((*own.terms, peer), own.needs_reference)

    def exchange(self, groups: Groups, context: StepContext) -> Exchange:
        exchange = Exchange({})
        candidates: Counter[tuple[str, str]] = Counter()
        of_prompt = groups_by_prompt(groups)
        for receiver, of_receiver in receiving(groups, context).items():
            rows: list[Row] = []
            for own in of_receiver:
                rows += own_rows(own, context.codecs[receiver], normalize_std=self.settings.normalize_std)
                better = self.better_group(own, of_prompt[own.prompt.id], context.seed)
                if better is not None:
                    source = self.imitated(own, better)
                    candidates[source.model, receiver] += 1
                    rows += draw_successes(
                        [source], receiver, context, exchange,
                        count=self.settings.draws, distinct=True, advantage=self.strength(own, better),
                    )  # fmt: skip
            exchange.rows[receiver] = rows
            exchange.diagnostics[receiver] = {"own_imitated": candidates[receiver, receiver]}
        exchange.transfers = [t for t in exchange.transfers if t.source != t.receiver]
        exchange.directions = direction_stats(exchange.transfers, groups, candidates, context.receivers)
        return exchange

    def usable(self, own: Group, successes: int, size: int) -> bool:
        """Whether a peer's group with so many successes of so many responses may give."""
        match self.settings.scope:
            case "better":
                return successes / size > _rate(own)
            case "any":
                return successes > 0 and not own.all_success
            case "all_fail":
                return successes > 0 and own.all_fail

    def better_group(self, own: Group, groups: Sequence[Group], seed: int) -> Group | None:
        """The usable peer group with the largest success rate, a tie being drawn; with `imitate: own` the own group."""
        if self.settings.imitate == "own":
            return own if 0 < own.successes < own.size else None
        peers = [group for group in groups if group.model != own.model]
        usable = [peer for peer in peers if self.usable(own, peer.successes, peer.size)]
        if not usable:
            return None
        best = max(_rate(group) for group in usable)
        tied = sorted((group for group in usable if _rate(group) == best), key=lambda group: group.model)
        return tied[generator(seed, "better peer", own.model, own.prompt.id).integers(len(tied))]

    def imitated(self, own: Group, better: Group) -> Group:
        """The group that the success is drawn from."""
        return own if self.settings.imitate == "own_first" and own.successes else better

    def strength(self, own: Group, better: Group) -> float:
        """a_q."""
        match self.settings.advantage:
            case "gap":
                return _rate(better) - _rate(own)
            case "rated":
                return _rate(better) * (_rate(better) - _rate(own))
            case "headroom":
                return 1.0 - _rate(own)
            case "one":
                return 1.0

    def order(self, rows: Sequence[Row], minibatch_prompts: int, rng: np.random.Generator) -> list[list[Row]]:
        return cut_by_prompt(rows, minibatch_prompts)

    def objective(self, minibatch_index: int) -> Objective:
        return self._objective


def _rate(group: Group) -> float:
    """k / n; groups of a log may be of another size."""
    return group.successes / group.size

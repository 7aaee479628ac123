"""SGT, success-guided transfer: GRPO on own groups, plus imitation of one peer success where the receiver fails.

Liu et al. (2026), "Mutual RL"; the form that the GRAFT paper compares with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
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
from graftrl.methods.grpo import ClipSettings, clip_objective
from graftrl.objective import Objective, Term, TokenBatch, token_mean
from graftrl.objective.terms import TokenLoss
from graftrl.rollout import Group, Row
from graftrl.seeds import generator
from graftrl.settings import Settings


class SGTSettings(ClipSettings):
    """sft_coefficient: of the imitation term, the token-mean likelihood loss of a minibatch's peer successes."""

    name: str = "sgt"
    sft_coefficient: float = Field(0.1, ge=0)


def nll(tokens: TokenBatch) -> TokenLoss:
    """Negative log-likelihood per token."""
    return TokenLoss(-tokens.logprobs_BT)


def draw_successes(
    peers: Sequence[Group],
    receiver: str,
    context: StepContext,
    exchange: Exchange,
    *,
    count: int = 1,
    distinct: bool = False,
    advantage: float = 0.0,
) -> list[Row]:
    """Up to `count` uniformly drawn successes of the peers' groups on a prompt, without repetition, as "sft" rows.

    A drawn response that cannot be put into the receiver's tokens is logged as rejected and another is drawn. The rows'
    weights add up to 1.

    Args:
        distinct: responses of the same text count as one.
        advantage: of every row; what a likelihood loss makes of it is the method's business.
    """
    successes = [(group, i) for group in peers for i, r in enumerate(group.responses) if r.reward == 1.0]
    if distinct:
        first = {group.responses[i].text: (group, i) for group, i in reversed(successes)}
        successes = list(reversed(first.values()))
    if not successes:
        return []
    drawn: list[tuple[Row, Group, int]] = []
    rng = generator(context.seed, "success", receiver, successes[0][0].prompt.id)
    for choice in rng.permutation(len(successes)):
        if len(drawn) == count:
            break
        group, index = successes[choice]
        row = peer_row(group, index, receiver, context, advantage=advantage, kind="sft")
        if isinstance(row, Rejected):
            exchange.transfers.append(transfer_of(receiver, group, index, "rejected", row.reason, advantage=advantage))
            continue
        row.old_logprobs = np.zeros(len(row.response_token_ids), np.float32)  # a likelihood has no ratio
        drawn.append((row, group, index))
    for row, group, index in drawn:
        row.weight = 1 / len(drawn)
        exchange.transfers.append(
            transfer_of(
                receiver, group, index, "admitted", advantage=advantage, weight=row.weight,
                receiver_tokens=len(row.response_token_ids),
            )
        )  # fmt: skip
    return [row for row, _, _ in drawn]


class SGT:
    settings_type: ClassVar[type[Settings]] = SGTSettings
    fewest_models: ClassVar[int] = 2
    filter: Callable[[Group], bool] | None = None
    sampling_rounds = 1

    def __init__(self, settings: SGTSettings) -> None:
        self.settings = settings
        own = clip_objective(settings, ("own",))
        imitation = Term(("sft",), nll, token_mean, coefficient=settings.sft_coefficient)
        self._objective = Objective((*own.terms, imitation), needs_reference=own.needs_reference)

    def exchange(self, groups: Groups, context: StepContext) -> Exchange:
        exchange = Exchange({})
        candidates: Counter[tuple[str, str]] = Counter()
        offered = self.offered(groups, context)
        for receiver, of_receiver in receiving(groups, context).items():
            rows: list[Row] = []
            for group in of_receiver:
                rows += own_rows(group, context.codecs[receiver], normalize_std=self.settings.normalize_std)
                peers = offered[receiver].get(group.prompt.id, [])
                candidates.update((peer.model, receiver) for peer in peers)
                rows += draw_successes(peers, receiver, context, exchange)
            exchange.rows[receiver] = rows
        exchange.directions = direction_stats(exchange.transfers, groups, candidates, context.receivers)
        return exchange

    def offered(self, groups: Groups, context: StepContext) -> dict[str, dict[str, list[Group]]]:
        """Per receiver and prompt the peer groups it may imitate: where all of its own responses fail and a peer's do
        not."""
        of_prompt = groups_by_prompt(groups)
        return {
            receiver: {
                group.prompt.id: [p for p in of_prompt[group.prompt.id] if p.model != receiver and p.successes]
                for group in of_receiver
                if group.all_fail
            }
            for receiver, of_receiver in receiving(groups, context).items()
        }

    def usable(self, own: Group, successes: int, size: int) -> bool:
        return own.all_fail and successes > 0

    def order(self, rows: Sequence[Row], minibatch_prompts: int, rng: np.random.Generator) -> list[list[Row]]:
        return cut_by_prompt(rows, minibatch_prompts)

    def objective(self, minibatch_index: int) -> Objective:
        return self._objective

"""LUFFY: one off-policy trace in every group, its tokens shaped towards the unlikely (Yan et al., 2025).

The trace is a peer's success and takes the place of the last own response. A prompt that no peer solves keeps its n own
responses.
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
from graftrl.methods.sgt import draw_successes
from graftrl.objective import Objective, Term, TokenBatch, group_advantages, importance_ratio
from graftrl.objective.terms import TokenLoss
from graftrl.rollout import Group, Row
from graftrl.settings import Settings


class LUFFYSettings(Settings):
    """shaping: gamma of f(x) = x / (x + gamma)."""

    name: Literal["luffy"] = "luffy"
    shaping: float = Field(0.1, gt=0)


def shaped_loss(shaping: float) -> Callable[[TokenBatch], TokenLoss]:
    """-f(pi_theta(token)) * a with f(x) = x / (x + shaping): neither ratio nor clip."""

    def loss(tokens: TokenBatch) -> TokenLoss:
        p = tokens.logprobs_BT.exp()
        return TokenLoss(-p / (p + shaping) * tokens.advantages_BT)

    return loss


def unclipped_loss(tokens: TokenBatch) -> TokenLoss:
    """-rho * a."""
    return TokenLoss(-importance_ratio(tokens.logprobs_BT, tokens.old_logprobs_BT) * tokens.advantages_BT)


class LUFFY:
    settings_type: ClassVar[type[Settings]] = LUFFYSettings
    fewest_models: ClassVar[int] = 2
    filter: Callable[[Group], bool] | None = None
    sampling_rounds = 1

    def __init__(self, settings: LUFFYSettings) -> None:
        self.settings = settings
        both = ("own", "trace")
        self._objective = Objective(
            (
                Term(("own",), unclipped_loss, policy_gradient=True, counted=both),
                Term(("trace",), shaped_loss(settings.shaping), policy_gradient=True, counted=both),
            )
        )

    def exchange(self, groups: Groups, context: StepContext) -> Exchange:
        exchange = Exchange({})
        candidates: Counter[tuple[str, str]] = Counter()
        of_prompt = groups_by_prompt(groups)
        for receiver, of_receiver in receiving(groups, context).items():
            rows: list[Row] = []
            for group in of_receiver:
                peers = [peer for peer in of_prompt[group.prompt.id] if peer.model != receiver]
                candidates.update((peer.model, receiver) for peer in peers if peer.successes)
                of_group = own_rows(group, context.codecs[receiver])
                rewards = group.rewards.tolist()
                for trace in draw_successes(peers, receiver, context, exchange):
                    trace.kind = "trace"
                    of_group[-1], rewards[-1] = trace, 1.0
                advantages = group_advantages(rewards, normalize_std=False).tolist()
                for row, advantage in zip(of_group, advantages, strict=True):
                    row.advantages = advantage
                rows += of_group
            exchange.rows[receiver] = rows
        exchange.directions = direction_stats(exchange.transfers, groups, candidates, context.receivers)
        return exchange

    def usable(self, own: Group, successes: int, size: int) -> bool:
        return successes > 0

    def order(self, rows: Sequence[Row], minibatch_prompts: int, rng: np.random.Generator) -> list[list[Row]]:
        return cut_by_prompt(rows, minibatch_prompts)

    def objective(self, minibatch_index: int) -> Objective:
        return self._objective

"""RSTG: where reinforcement learning has no signal, a teacher gives one, on the tokens that matter.

GRPO on all groups. On a prompt that the model fails entirely and its teacher does not, each token has the advantage

    k_T / n_T * 1[token in the top share by 1 - (1 - H)(1 - D)] * (log pi_T - log pi)

H the student's entropy and D = KL(pi || pi_T), each over its largest value in the response. The teacher's own successes
there are imitated besides. Formalised from the abstract and public summaries of the paper; constants are options.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import Field

from graftrl.methods.base import (
    CodecLike,
    Exchange,
    Groups,
    StepContext,
    cut_by_prompt,
    direction_stats,
    own_rows,
    receiving,
)
from graftrl.methods.distillation import (
    Candidate,
    DistillationSettings,
    ScorerName,
    check_tokenizers,
    gated,
    policy_gradient,
    read_by,
    sampled_signal,
)
from graftrl.methods.grpo import ClipSettings, clip_objective
from graftrl.methods.sgt import draw_successes, nll
from graftrl.objective import Objective, Term, TokenBatch, token_mean
from graftrl.objective.distillation import LogMixture, token_importance, top_share
from graftrl.objective.terms import TokenLoss
from graftrl.rollout import Group, Row
from graftrl.settings import Settings


class RSTGSettings(ClipSettings, DistillationSettings):
    """teacher: name of the scorer, and of the peer or model whose responses to the same prompts are the teacher's.
    top_share: of a response's tokens, those that are distilled. opd_coefficient, sft_coefficient: of the two terms
    besides GRPO's. single_minibatch: off, as in GRPO."""

    name: str = "rstg"
    teacher: ScorerName = "teacher"
    top_share: float = Field(0.2, gt=0, le=1)
    opd_coefficient: float = Field(1.0, ge=0)
    sft_coefficient: float = Field(0.1, ge=0)
    single_minibatch: bool = False


class RSTG:
    settings_type: ClassVar[type[Settings]] = RSTGSettings
    fewest_models: ClassVar[int] = 2
    filter: Callable[[Group], bool] | None = None
    sampling_rounds = 1

    def __init__(self, settings: RSTGSettings) -> None:
        self.settings = settings
        self.mixture = LogMixture({settings.teacher: 1.0}, 1.0, settings.support)
        fresh = ("own", "distilled")
        clip, *penalties = clip_objective(settings, ("own",)).terms
        distillation = Term(
            ("distilled",), self.loss, clip.reduction, settings.opd_coefficient, policy_gradient=True, counted=fresh
        )
        imitation = Term(("sft",), nll, token_mean, settings.sft_coefficient)
        self._objective = Objective(
            (replace(clip, counted=fresh), *penalties, distillation, imitation),
            needs_reference=bool(penalties),
            mixture=self.mixture,
        )

    @property
    def scorers(self) -> tuple[str, ...]:
        return (self.settings.teacher,)

    @property
    def rollouts_of(self) -> tuple[str, ...]:
        """Peers or models whose responses the method cannot do without."""
        return (self.settings.teacher,)

    def check_scorers(self, codecs: Mapping[str, CodecLike], scorers: Mapping[str, CodecLike]) -> list[str]:
        refused = "rstg chooses tokens by sums over one vocabulary; use a teacher with the model's tokenizer"
        return check_tokenizers(self.scorers, codecs, scorers, refused)

    def exchange(self, groups: Groups, context: StepContext) -> Exchange:
        exchange = Exchange({})
        candidates: Counter[tuple[str, str]] = Counter()
        s = self.settings
        taught = {group.prompt.id: group for group in groups[s.teacher] if group.successes}
        for model, of_model in receiving(groups, context).items():
            rows: list[Row] = []
            distilled: list[Candidate] = []
            for group in of_model:
                own = own_rows(group, context.codecs[model], normalize_std=s.normalize_std)
                teacher = taught.get(group.prompt.id) if group.all_fail and model != s.teacher else None
                if teacher is None:
                    rows += own
                    continue
                candidates[s.teacher, model] += 1
                for row in own:
                    row.kind, row.advantages = "distilled", teacher.successes / teacher.size
                    distilled.append(Candidate(group.prompt, 0.0, row))
                rows += draw_successes([teacher], model, context, exchange, count=teacher.size)
            read, rejected = read_by(self.scorers, model, distilled, context, contexts=True)
            exchange.rows[model] = [*rows, *(candidate.row for candidate in read)]
            exchange.diagnostics[model] = {"distilled": len(read), "rejected": dict(rejected)}
        exchange.directions = direction_stats(exchange.transfers, groups, candidates, context.receivers)
        return exchange

    def usable(self, own: Group, successes: int, size: int) -> bool:
        return own.all_fail and successes > 0

    def order(self, rows: Sequence[Row], minibatch_prompts: int, rng: np.random.Generator) -> list[list[Row]]:
        if self.settings.single_minibatch:
            return [list(rows)] if rows else []
        return cut_by_prompt(rows, minibatch_prompts)

    def objective(self, minibatch_index: int) -> Objective:
        return self._objective

    def loss(self, tokens: TokenBatch) -> TokenLoss:
        s = self.settings
        assert tokens.expected_signal_BT is not None and tokens.entropy_BT is not None
        divergence = -tokens.expected_signal_BT.detach()  # KL(pi || pi_T)
        chosen = top_share(token_importance(tokens.entropy_BT, divergence, tokens.mask_BT), tokens.mask_BT, s.top_share)
        if s.estimator == "sampled":
            surrogate = policy_gradient(tokens, sampled_signal(tokens, self.mixture))
        else:
            surrogate = tokens.expected_signal_BT
        weights, means = gated(tokens.advantages_BT * chosen, tokens, s)
        means |= {"distilled": chosen.float(), "signal": surrogate.detach(), "divergence": divergence}
        return TokenLoss(-weights * surrogate, means_BT=means)

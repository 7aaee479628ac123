"""GRPO with DAPO's options: every model learns from its own groups alone.

Shao et al. (2024), "DeepSeekMath"; Yu et al. (2025), "DAPO": clip-higher, token-mean, dynamic sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from graftrl.methods.base import Exchange, Groups, StepContext, cut_by_prompt, own_rows
from graftrl.objective import (
    Objective,
    Reduction,
    Term,
    TokenBatch,
    clipped,
    clipped_surrogate,
    dual_clipped_surrogate,
    k3_kl,
    sequence_mean,
    token_mean,
)
from graftrl.objective.reduction import response_limit
from graftrl.objective.terms import TokenLoss
from graftrl.rollout import Group, Row
from graftrl.settings import Settings


class ClipSettings(Settings):
    """The clipped policy gradient that GRPO and the methods on top of it share.

    kl_coefficient: of the k3 estimate of KL(pi || reference) on own rows; 0 means no reference is loaded.
    reduction: "token_mean" (DAPO), "sequence_mean" (GRPO's original), "response_limit": the sum over tokens divided by
        rows times `response_limit` (Dr. GRPO).
    """

    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.28, ge=0)
    dual_clip: float | None = Field(None, gt=1)
    kl_coefficient: float = Field(0.0, ge=0)
    normalize_std: bool = True
    reduction: Literal["token_mean", "sequence_mean", "response_limit"] = "token_mean"
    response_limit: int = Field(4096, ge=1)


class GRPOSettings(ClipSettings):
    """dynamic_sampling: drop zero-variance groups and sample further prompts, at most `max_sampling_rounds` batches a
    step, then train on what there is."""

    name: Literal["grpo"] = "grpo"
    dynamic_sampling: bool = False
    max_sampling_rounds: int = Field(10, ge=1)


def kl_loss(tokens: TokenBatch) -> TokenLoss:
    """The k3 estimate of KL(pi || reference) per token."""
    assert tokens.ref_logprobs_BT is not None
    return TokenLoss(k3_kl(tokens.logprobs_BT, tokens.ref_logprobs_BT))


def clip_objective(settings: ClipSettings, kinds: tuple[str, ...]) -> Objective:
    """The clipped surrogate over rows of `kinds` with one shared denominator, plus the KL term where it is on."""

    def clip_loss(tokens: TokenBatch) -> TokenLoss:
        arguments = (tokens.logprobs_BT, tokens.old_logprobs_BT, tokens.advantages_BT)
        bounds = (settings.clip_low, settings.clip_high)
        if settings.dual_clip is None:
            surrogate = clipped_surrogate(*arguments, *bounds)
        else:
            surrogate = dual_clipped_surrogate(*arguments, *bounds, settings.dual_clip)
        return TokenLoss(-surrogate, clipped(*arguments, *bounds))

    reductions: dict[str, Reduction] = {
        "token_mean": token_mean,
        "sequence_mean": sequence_mean,
        "response_limit": response_limit(settings.response_limit),
    }
    reduction = reductions[settings.reduction]
    terms = [Term(kinds, clip_loss, reduction, policy_gradient=True)]
    if settings.kl_coefficient > 0:
        terms.append(Term(("own",), kl_loss, reduction, coefficient=settings.kl_coefficient))
    return Objective(tuple(terms), needs_reference=settings.kl_coefficient > 0)


def has_contrast(group: Group) -> bool:
    """False for a zero-variance group, kept or dropped as a whole."""
    return bool(group.rewards.min() < group.rewards.max())


class GRPO:
    settings_type: ClassVar[type[Settings]] = GRPOSettings
    fewest_models: ClassVar[int] = 1

    def __init__(self, settings: GRPOSettings) -> None:
        self.settings = settings
        self.filter: Callable[[Group], bool] | None = has_contrast if settings.dynamic_sampling else None
        self.sampling_rounds = settings.max_sampling_rounds if settings.dynamic_sampling else 1
        self._objective = clip_objective(settings, ("own",))

    def exchange(self, groups: Groups, context: StepContext) -> Exchange:
        return Exchange(
            {
                model: [
                    row
                    for group in of_model
                    for row in own_rows(group, context.codecs[model], normalize_std=self.settings.normalize_std)
                ]
                for model, of_model in groups.items()
            }
        )

    def order(self, rows: Sequence[Row], minibatch_prompts: int, rng: np.random.Generator) -> list[list[Row]]:
        return cut_by_prompt(rows, minibatch_prompts)

    def objective(self, minibatch_index: int) -> Objective:
        return self._objective

"""GRPO with DAPO's options: every model learns from its own groups alone.

Shao et al. (2024), "DeepSeekMath"; Yu et al. (2025), "DAPO": clip-higher, token-mean, dynamic sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from graftrl.methods.base import CodecLike, Exchange, Groups, StepContext, cut_by_prompt, own_rows, receiving
from graftrl.objective import (
    Objective,
    Reduction,
    Term,
    TokenBatch,
    clipped,
    clipped_surrogate,
    dual_clipped_surrogate,
    k3_kl,
    sequence_log_ratio,
    sequence_mean,
    token_mean,
)
from graftrl.objective.reduction import response_limit
from graftrl.objective.terms import TokenLoss
from graftrl.rollout import Group, Row
from graftrl.settings import Settings


class ClipSettings(Settings):
    """The clipped policy gradient that GRPO and the methods on top of it share.

    ratio: "token", or "sequence" (GSPO): every token of a response carries the response's length-normalised ratio. That
        moves far less than a token's: set the clip range with it.
    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    dual_clip: c > 1: the surrogate of a negative advantage is at least c times it; none: off.
    normalize_std: divide advantages by the group's standard deviation; else they are only centred (Dr. GRPO).
    kl_coefficient: of the k3 estimate of KL(pi || reference) on own rows; 0 means no reference is loaded.
    reduction: "token_mean" (DAPO), "sequence_mean" (GRPO's original), "response_limit": the sum over tokens divided by
        rows times `response_limit` (Dr. GRPO).
    response_limit: tokens, for that reduction.
    """

    ratio: Literal["token", "sequence"] = "token"
    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.28, ge=0)
    dual_clip: float | None = Field(None, gt=1)
    kl_coefficient: float = Field(0.0, ge=0)
    normalize_std: bool = True
    reduction: Literal["token_mean", "sequence_mean", "response_limit"] = "token_mean"
    response_limit: int = Field(4096, ge=1)


class GRPOSettings(ClipSettings):
    """dynamic_sampling: drop zero-variance groups and sample further prompts.
    max_sampling_rounds: batches of prompts in a step at most; then it trains on what there is.
    """

    name: str = "grpo"
    dynamic_sampling: bool = False
    max_sampling_rounds: int = Field(10, ge=1)


def kl_loss(tokens: TokenBatch) -> TokenLoss:
    """The k3 estimate of KL(pi || reference) per token."""
    assert tokens.ref_logprobs_BT is not None
    return TokenLoss(k3_kl(tokens.logprobs_BT, tokens.ref_logprobs_BT))


def clip_objective(settings: ClipSettings, kinds: tuple[str, ...]) -> Objective:
    """The clipped surrogate over rows of `kinds` with one shared denominator, plus the KL term where it is on."""

    def clip_loss(tokens: TokenBatch) -> TokenLoss:
        logprobs, old_logprobs = tokens.logprobs_BT, tokens.old_logprobs_BT
        if settings.ratio == "sequence":
            logprobs = sequence_log_ratio(logprobs, old_logprobs, tokens.mask_BT)
            old_logprobs = torch.zeros_like(old_logprobs)
        arguments = (logprobs, old_logprobs, tokens.advantages_BT)
        bounds = (settings.clip_low, _upper_bound(tokens, settings.clip_high))
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


def _upper_bound(tokens: TokenBatch, clip_high: float) -> float | Tensor:
    """The rows' own upper clip bounds where they have one, as a column; the given one elsewhere."""
    if tokens.clip_high_B is None:
        return clip_high
    return torch.where(tokens.clip_high_B.isnan(), clip_high, tokens.clip_high_B)[:, None]


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
                model: [row for group in of_model for row in self.rows_of(group, context.codecs[model])]
                for model, of_model in receiving(groups, context).items()
            }
        )

    def usable(self, own: Group, successes: int, size: int) -> bool:
        return False

    def rows_of(self, group: Group, codec: CodecLike) -> list[Row]:
        return own_rows(group, codec, normalize_std=self.settings.normalize_std)

    def order(self, rows: Sequence[Row], minibatch_prompts: int, rng: np.random.Generator) -> list[list[Row]]:
        return cut_by_prompt(rows, minibatch_prompts)

    def objective(self, minibatch_index: int) -> Objective:
        return self._objective

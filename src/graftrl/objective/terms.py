"""A method's loss as a sum of terms: which rows, which token loss, how it is averaged.

The trainer adds the terms up without knowing the method. Shapes carry suffixes: B rows, T response tokens (padded on
the right; `mask_BT` is False on padding).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from graftrl.objective.distillation import LogMixture
from graftrl.objective.reduction import Reduction, token_mean
from graftrl.rollout import Row


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What a token loss may read of a microbatch's rows.

    logprobs_BT and expected_signal_BT carry gradients; all others are constants. advantages_BT has the row's weight
    folded in, so a surrogate of it is the weighted surrogate. content_mask_BT is the mask without the final EOS.
    ref_logprobs_BT is present iff the objective asks for a reference. clip_high_B holds the rows' own upper clip
    bounds, NaN where a row has none; None when no row has one. constants: the rows' own, by name, 0 where a row has
    none of that name. expected_signal_BT and the policy's entropy_BT are sums over the vocabulary, present iff the
    objective has a mixture, and 0 on rows without contexts.
    """

    logprobs_BT: Tensor
    old_logprobs_BT: Tensor
    advantages_BT: Tensor
    mask_BT: Tensor
    content_mask_BT: Tensor
    source_logprobs_B: Tensor
    ref_logprobs_BT: Tensor | None = None
    clip_high_B: Tensor | None = None
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    expected_signal_BT: Tensor | None = None
    entropy_BT: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """loss_BT: to be minimised, the value on padding is ignored. clipped_BT: bool, for the diagnostics, or None.
    means_BT: more diagnostics, name -> a constant per token, logged as the mean over the term's loss tokens."""

    loss_BT: Tensor
    clipped_BT: Tensor | None = None
    means_BT: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Term:
    """coefficient * reduction over the rows of `kinds` of token_loss.

    counted: kinds whose tokens the reduction counts (default: `kinds`), for terms that share one denominator.
    over_prompts: divide by a number of the minibatch's prompts as well: by that of "all", or of those that have rows of
        the counted "kinds".
    policy_gradient: the token loss is linear in the weighted advantage, so rows whose weighted advantages are all 0
        need neither forward nor backward pass; they only count in the denominator.
    """

    kinds: tuple[str, ...]
    token_loss: Callable[[TokenBatch], TokenLoss]
    reduction: Reduction = token_mean
    coefficient: float = 1.0
    policy_gradient: bool = False
    counted: tuple[str, ...] | None = None
    over_prompts: Literal["none", "all", "kinds"] = "none"

    def scales(self, rows: Sequence[Row]) -> list[float]:
        """One factor per row of the minibatch, 0 for rows of other kinds; coefficient included."""
        counted = [i for i, row in enumerate(rows) if row.kind in (self.counted or self.kinds)]
        scales = [0.0] * len(rows)
        over = {"none": [], "all": range(len(rows)), "kinds": counted}[self.over_prompts]
        coefficient = self.coefficient / max(len({rows[i].prompt_id for i in over}), 1)
        if counted:
            factors = self.reduction(np.array([rows[i].loss_tokens for i in counted], dtype=np.int64))
            for i, factor in zip(counted, factors, strict=True):
                if rows[i].kind in self.kinds:
                    scales[i] = float(factor) * coefficient
        return scales

    def needs_pass(self, row: Row) -> bool:
        """Whether this row can add to the gradient of this term."""
        return (
            row.kind in self.kinds and row.loss_tokens > 0 and (not self.policy_gradient or row.carries_policy_gradient)
        )


@dataclass(frozen=True)
class Objective:
    """The terms of one minibatch, all to be minimised. needs_reference: some term reads ref_logprobs_BT. mixture: of
    frozen models, where a term reads sums over the vocabulary."""

    terms: tuple[Term, ...]
    needs_reference: bool = False
    mixture: LogMixture | None = None


def weighted_sum(loss_BT: Tensor, mask_BT: Tensor, scales_B: Tensor) -> Tensor:
    """sum_j scale_j * sum_t mask_jt * loss_jt; padding of the loss may hold anything.

    Only the values: a token loss whose derivative on padding is not finite (exp of an overflow) still spoils the
    gradient, so log-probabilities on padding must be finite.
    """
    zero = torch.zeros((), dtype=loss_BT.dtype, device=loss_BT.device)
    return (torch.where(mask_BT, loss_BT, zero).sum(dim=-1) * scales_B).sum()

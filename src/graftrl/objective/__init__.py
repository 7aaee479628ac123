"""Objectives as pure torch functions: advantages, token losses, and how tokens are averaged."""

from graftrl.objective.advantages import group_advantages
from graftrl.objective.reduction import Reduction, constant_divisor, row_mean, sequence_mean, token_mean
from graftrl.objective.surrogates import (
    clipped,
    clipped_surrogate,
    damped_nll,
    damping,
    dual_clipped_surrogate,
    importance_ratio,
    k3_kl,
    sequence_log_ratio,
)
from graftrl.objective.terms import Objective, Term, TokenBatch

__all__ = [
    "Objective",
    "Reduction",
    "Term",
    "TokenBatch",
    "clipped",
    "clipped_surrogate",
    "constant_divisor",
    "damped_nll",
    "damping",
    "dual_clipped_surrogate",
    "group_advantages",
    "importance_ratio",
    "k3_kl",
    "row_mean",
    "sequence_log_ratio",
    "sequence_mean",
    "token_mean",
]

"""AVSD, adaptive-view self-distillation: a model with privileged views of the task teaches itself without them.

Views are scorers of one checkpoint in different contexts (a hint, a reference solution). What they agree on is the
signal; what they disagree on is added as far as they agree. See `view_consensus` for the formula. In this version the
views read with the checkpoint's frozen weights.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from graftrl.methods.distillation import SPAN, Distillation, DistillationSettings, ScorerName
from graftrl.objective import TokenBatch
from graftrl.objective.distillation import LogMixture, span_sums, view_consensus
from graftrl.settings import Settings


class AVSDSettings(DistillationSettings):
    """views: names of the scorers."""

    name: str = "avsd"
    estimator: Literal["sampled"] = "sampled"
    views: list[ScorerName] = Field(["view1", "view2"], min_length=1)

    @field_validator("views")
    @classmethod
    def _views_differ(cls, views: list[str]) -> list[str]:
        if len(set(views)) < len(views):
            raise ValueError("names a view twice")
        return views


class AVSD(Distillation):
    settings_type: ClassVar[type[Settings]] = AVSDSettings

    def __init__(self, settings: AVSDSettings) -> None:
        super().__init__(settings, LogMixture({view: 1 / len(settings.views) for view in settings.views}, 1.0))

    def signal(self, tokens: TokenBatch) -> Tensor:
        own = tokens.logprobs_BT.detach()
        if SPAN in tokens.constants:
            own = span_sums(own, tokens.constants[SPAN].long(), tokens.mask_BT)
        return view_consensus(torch.stack([tokens.constants[view] for view in self.settings.views]), own)

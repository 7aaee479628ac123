"""W2S-OPD, weak to strong: the direction between two small models, added to the student's base in logit space.

The proxy teacher is pi_ref * (pi_positive / pi_negative)^alpha, and the student minimises its reverse KL to it: P-OPD
with lambda = 1 / alpha. The contrast is the recipe's choice of scorers: a model after and before reinforcement
learning; a larger and a smaller base model; one small model with a right and with a wrong hint.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from graftrl.methods.distillation import Distillation, DistillationSettings, ScorerName
from graftrl.objective.distillation import transfer_mixture
from graftrl.settings import Settings


class W2SOPDSettings(DistillationSettings):
    """positive, negative: names of the scorers. strength: alpha, how far the direction is followed."""

    name: str = "w2s_opd"
    positive: ScorerName = "positive"
    negative: ScorerName = "negative"
    strength: float = Field(1.0, gt=0)


class W2SOPD(Distillation):
    settings_type: ClassVar[type[Settings]] = W2SOPDSettings

    def __init__(self, settings: W2SOPDSettings) -> None:
        super().__init__(settings, transfer_mixture(settings.positive, settings.negative, 1 / settings.strength))

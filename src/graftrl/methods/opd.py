"""OPD, on-policy distillation: the reverse KL to a teacher, on the student's own responses.

Agarwal et al. (2024); the baseline of P-OPD (arXiv 2607.11505, section 4.2). The signal is log pi_T - log pi.
"""

from __future__ import annotations

from typing import ClassVar

from graftrl.methods.distillation import Distillation, DistillationSettings, ScorerName
from graftrl.objective.distillation import LogMixture
from graftrl.settings import Settings


class OPDSettings(DistillationSettings):
    """teacher: name of the scorer."""

    name: str = "opd"
    teacher: ScorerName = "teacher"


class OPD(Distillation):
    settings_type: ClassVar[type[Settings]] = OPDSettings

    def __init__(self, settings: OPDSettings) -> None:
        super().__init__(settings, LogMixture({settings.teacher: 1.0}, 1.0))

"""P-OPD: what reinforcement learning changed in a small proxy is transferred to a larger target.

arXiv 2607.11505, section 4: the target samples its own responses, and the signal at each token is

    D_proxy - lambda * D_target,  D_proxy = log pi_expert - log pi_base,  D_target = log pi - log pi_ref

with pi_ref the target's frozen start. Per state this descends lambda * KL(pi || pi*), pi* proportional to
pi_ref * (pi_expert / pi_base)^(1 / lambda).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from graftrl.errors import ConfigError
from graftrl.methods.base import CodecLike
from graftrl.methods.distillation import Distillation, DistillationSettings, ScorerName
from graftrl.objective.distillation import transfer_mixture
from graftrl.settings import Settings


class POPDSettings(DistillationSettings):
    """expert, base: names of the scorers, the proxy after and before its reinforcement learning. calibration: lambda;
    larger is more conservative."""

    name: str = "p_opd"
    expert: ScorerName = "expert"
    base: ScorerName = "base"
    calibration: float = Field(1.0, ge=0)


class POPD(Distillation):
    settings_type: ClassVar[type[Settings]] = POPDSettings

    def __init__(self, settings: POPDSettings) -> None:
        super().__init__(settings, transfer_mixture(settings.expert, settings.base, settings.calibration))

    def check_scorers(self, codecs: Mapping[str, CodecLike], scorers: Mapping[str, CodecLike]) -> list[str]:
        notes = super().check_scorers(codecs, scorers)
        expert, base = (scorers[name].architecture for name in (self.settings.expert, self.settings.base))
        if expert and base and expert != base:
            raise ConfigError(
                f"method: scorer {self.settings.expert!r} is {expert}, and {self.settings.base!r} is {base}; p_opd "
                "transfers what training changed in one model. For the difference of two models use w2s_opd"
            )
        if self.settings.calibration == 0:
            notes.append(
                "method.calibration is 0: nothing holds the target near its start, and it collapses onto the tokens "
                "that the proxy's expert raised most; the paper uses 1 to 1.5"
            )
        return notes

"""RA-OPD, reward-aligned: distillation on the responses whose update goes the way of their reward.

A response's return is G = mean_t(log pi_T - log pi), pi the policy that sampled it; it is kept iff (2r - 1) * G >= 0.
Formalised from the abstract and public summaries of the paper.
"""

from __future__ import annotations

from typing import ClassVar

from graftrl.exchange.spans import total
from graftrl.methods.distillation import SPAN, Candidate
from graftrl.methods.opd import OPD, OPDSettings
from graftrl.settings import Settings


class RAOPDSettings(OPDSettings):
    name: str = "ra_opd"


class RAOPD(OPD):
    settings_type: ClassVar[type[Settings]] = RAOPDSettings
    reads_logprobs: ClassVar[bool] = True

    def admits(self, candidate: Candidate) -> bool:
        row = candidate.row
        assert row.old_logprobs is not None
        teacher = total(row.constants[self.settings.teacher], row.constants.get(SPAN))
        mean = (teacher - float(row.old_logprobs.sum())) / len(row.response_token_ids)
        return (2 * candidate.reward - 1) * mean >= 0

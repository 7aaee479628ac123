"""OPD-URM: on-policy distillation on the tokens whose signal agrees with the response's outcome.

"Update reward mask" in P-OPD (arXiv 2607.11505, section 3): a token counts where (2r - 1) * signal > 0. A right answer
is made likelier where the teacher holds more of it, a wrong one unlikelier where the teacher holds less. Masked tokens
stay in the mean.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from torch import Tensor

from graftrl.methods.distillation import Candidate
from graftrl.methods.opd import OPD, OPDSettings
from graftrl.objective import TokenBatch
from graftrl.objective.distillation import agrees
from graftrl.settings import Settings

OUTCOME = "@outcome"


class OPDURMSettings(OPDSettings):
    name: str = "opd_urm"


class OPDURM(OPD):
    settings_type: ClassVar[type[Settings]] = OPDURMSettings
    reads_logprobs: ClassVar[bool] = True

    def admits(self, candidate: Candidate) -> bool:
        row = candidate.row
        row.constants[OUTCOME] = np.full(len(row.response_token_ids), 2 * candidate.reward - 1, np.float32)
        return True

    def keeps(self, tokens: TokenBatch, signal: Tensor) -> Tensor | None:
        return agrees(signal, tokens.constants[OUTCOME])

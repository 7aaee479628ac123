"""OPD-FT: on-policy distillation without the groups that are right already.

"Filtered trajectories" in P-OPD (arXiv 2607.11505, section 3): a group in which every response succeeds is left out.
"""

from __future__ import annotations

from typing import ClassVar

from graftrl.methods.opd import OPD, OPDSettings
from graftrl.rollout import Group
from graftrl.settings import Settings


class OPDFTSettings(OPDSettings):
    name: str = "opd_ft"


class OPDFT(OPD):
    settings_type: ClassVar[type[Settings]] = OPDFTSettings

    def learns_from(self, group: Group) -> bool:
        return not group.all_success

"""GAPO: the upper clip bound of a response grows with the rarity of success in its group.

Group Adaptive Clipping Policy Optimization, a plug-in on GRPO. Formalised from the abstract and public summaries of the
paper, so both bounds are options.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from graftrl.methods.base import CodecLike, own_rows
from graftrl.methods.grpo import GRPO, GRPOSettings
from graftrl.rollout import Group, Row
from graftrl.settings import Settings


class GAPOSettings(GRPOSettings):
    """clip_high: upper bound where all responses succeed, and of every response that is not better than its group.
    clip_high_max: upper bound of a group's only success."""

    name: str = "gapo"
    clip_high: float = Field(0.2, ge=0)
    clip_high_max: float = Field(0.4, ge=0)
    normalize_std: bool = False

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> GAPOSettings:
        if self.clip_high_max < self.clip_high:
            raise ValueError(f"clip_high_max ({self.clip_high_max:g}) is below clip_high ({self.clip_high:g})")
        return self


def adaptive_clip_high(successes: int, group_size: int, clip_high: float, clip_high_max: float) -> float:
    """e_lo + (e_max - e_lo) * (n - k) / (n - 1) for k of n successes; e_max for k = 0 (partial credit alone)."""
    rarity = min((group_size - successes) / (group_size - 1), 1.0)
    return clip_high + (clip_high_max - clip_high) * rarity


class GAPO(GRPO):
    settings_type: ClassVar[type[Settings]] = GAPOSettings
    settings: GAPOSettings

    def rows_of(self, group: Group, codec: CodecLike) -> list[Row]:
        s = self.settings
        rows = own_rows(group, codec, normalize_std=s.normalize_std)
        wide = adaptive_clip_high(group.successes, group.size, s.clip_high, s.clip_high_max)
        for row, advantage in zip(rows, (float(row.advantages) for row in rows), strict=True):
            row.clip_high = wide if advantage > 0 else s.clip_high
        return rows

"""Rollout replay: GRPO on fresh rollouts plus single stored ones, drawn by the size of their advantage.

Yoo et al., "rollout-level replay buffer for GRPO". Formalised from the abstract and public summaries; all constants are
options. The buffer is the run's own rollout log, so nothing has to be kept or restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from graftrl.methods.base import CodecLike, Exchange, Groups, StepContext, cut_by_prompt, own_rows
from graftrl.methods.grpo import GRPO, GRPOSettings, clip_objective
from graftrl.objective import group_advantages
from graftrl.rollout import Group, Row
from graftrl.seeds import generator
from graftrl.settings import Settings


class ReplaySettings(GRPOSettings):
    """replay_ratio: replayed responses per fresh one. max_age: tau_max, the oldest that is replayed, in steps.
    priority: exponent of |advantage|; 0 draws uniformly."""

    name: str = "replay"
    replay_ratio: float = Field(0.5, ge=0)
    max_age: int = Field(10, ge=1)
    priority: float = Field(0.5, ge=0)


class Replay(GRPO):
    settings_type: ClassVar[type[Settings]] = ReplaySettings
    settings: ReplaySettings

    def __init__(self, settings: ReplaySettings) -> None:
        super().__init__(settings)
        self._objective = clip_objective(settings, ("own", "replay"))

    def exchange(self, groups: Groups, context: StepContext) -> Exchange:
        exchange = super().exchange(groups, context)
        for model, fresh in exchange.rows.items():
            stored = context.history(model, range(max(1, context.step - self.settings.max_age), context.step))
            drawn = self._draw(
                stored, round(self.settings.replay_ratio * len(fresh)), generator(context.seed, "replay", model)
            )
            ages = [context.step - (stored[g].log_step or 0) for g, _ in drawn]
            exchange.diagnostics[model] = {
                "stored": sum(group.size for group in stored),
                "replayed": len(drawn),
                "age_mean": float(np.mean(ages)) if drawn else None,
            }
            exchange.rows[model] = [*fresh, *self._replayed(stored, drawn, context.codecs[model])]
        return exchange

    def _draw(self, stored: Sequence[Group], count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """(group, response) of `count` stored responses, none twice, P proportional to (|a| + 1e-6)^priority."""
        places = [(g, i) for g, group in enumerate(stored) for i in range(group.size)]
        if not places or not count:
            return []
        advantages = np.concatenate([self._advantages(group) for group in stored])
        mass = (np.abs(advantages) + 1e-6) ** self.settings.priority
        chosen = rng.choice(len(places), min(count, len(places)), replace=False, p=mass / mass.sum())
        return [places[i] for i in np.sort(chosen)]

    def _advantages(self, group: Group) -> NDArray[np.float64]:
        return group_advantages(group.rewards, normalize_std=self.settings.normalize_std).numpy()

    def _replayed(self, stored: Sequence[Group], drawn: Sequence[tuple[int, int]], codec: CodecLike) -> list[Row]:
        """Rows with their stored advantage, whose ratio is anchored to the log-probabilities at generation."""
        rows: list[Row] = []
        for g, i in drawn:
            row = own_rows(stored[g], codec, normalize_std=self.settings.normalize_std)[i]
            row.kind = "replay"
            rows.append(row)
        return rows

    def order(self, rows: Sequence[Row], minibatch_prompts: int, rng: np.random.Generator) -> list[list[Row]]:
        """Fresh prompts are cut into minibatches as in GRPO; the replayed responses are spread evenly over them."""
        fresh = [row for row in rows if row.kind == "own"]
        replayed = [row for row in rows if row.kind != "own"]
        minibatches = cut_by_prompt(fresh, minibatch_prompts)
        if not minibatches:
            return cut_by_prompt(replayed, minibatch_prompts)
        shuffled = [replayed[i] for i in rng.permutation(len(replayed))]
        return [[*minibatch, *shuffled[i :: len(minibatches)]] for i, minibatch in enumerate(minibatches)]

"""Alternative designs of the GRAFT paper (Park et al., 2026, section 6.3 and appendix G).

Each changes one decision of GRAFT and inherits the rest. Those that are a mere option of GRAFT are presets of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from graftrl.exchange import compatibility_weights, is_complementary
from graftrl.methods.base import Groups, StepContext, groups_by_prompt, own_rows
from graftrl.methods.graft import GRAFT, GRAFTSettings, Origin, Selection, complementary_selection
from graftrl.methods.hacpo import HACPO
from graftrl.methods.luffy import shaped_loss
from graftrl.methods.sgt import SGT
from graftrl.objective import Objective, Term, group_advantages
from graftrl.rollout import Group, Row
from graftrl.seeds import generator
from graftrl.settings import Settings


class RandomPrompts(GRAFT):
    """As many prompts per direction as GRAFT selects, drawn uniformly from the batch whatever the rewards."""

    def select(self, groups: Groups, context: StepContext) -> Selection:
        of_prompt = groups_by_prompt(groups)
        drawn: Selection = {}
        for receiver, selected in super().select(groups, context).items():
            rng = generator(context.seed, "random prompts", receiver)
            chosen: dict[str, str] = {}
            for source, count in sorted(Counter(selected.values()).items()):
                free = sorted(group.prompt.id for group in groups[receiver] if group.prompt.id not in chosen)
                offered = [q for q in free if any(group.model == source for group in of_prompt[q])]
                chosen |= {offered[index]: source for index in rng.permutation(len(offered))[:count]}
            drawn[receiver] = chosen
        return drawn

    def usable(self, own: Group, successes: int, size: int) -> bool:
        return True


class RandomAdmission(GRAFT):
    """As many responses per direction as the gate admits, drawn uniformly from the transferred groups; w = min(s, 1).

    Only responses that have a score can be drawn.
    """

    def weigh(
        self, scores: NDArray[np.float64], receiver: str, origins: Sequence[Origin], context: StepContext
    ) -> NDArray[np.float64]:
        drawn = np.zeros(len(scores), dtype=np.bool_)
        for source in sorted({group.model for group, _ in origins}):
            scored = [i for i, (group, _) in enumerate(origins) if group.model == source and not np.isnan(scores[i])]
            scored.sort(key=lambda i: (origins[i][0].prompt.id, origins[i][1]))
            count = int((scores[scored] > self.settings.threshold).sum())
            rng = generator(context.seed, "random admission", source, receiver)
            drawn[rng.permutation(scored)[:count]] = True
        return np.where(drawn, compatibility_weights(scores, floor=False), 0.0)


class Pooled(GRAFT):
    """The receiver's failures stay, and advantages are taken over both groups together."""

    def combine(self, own: Group, peer: Group, context: StepContext) -> tuple[list[Row], list[float]]:
        pool = np.concatenate([own.rewards, peer.rewards])
        advantages = group_advantages(pool, normalize_std=self.settings.normalize_std).tolist()
        kept = own_rows(own, context.codecs[own.model])
        for row, advantage in zip(kept, advantages[: own.size], strict=True):
            row.advantages = advantage
        return kept, advantages[own.size :]


class SuccessOnly(GRAFT):
    """Only the successes of a selected group travel, with the advantages of the full group."""

    def transferred(self, peer: Group) -> Iterable[int]:
        return [index for index, response in enumerate(peer.responses) if response.reward == 1.0]


class LUFFYUpdateSettings(GRAFTSettings):
    """shaping: gamma of f(x) = x / (x + gamma)."""

    weighting: Literal["gate", "no_floor", "none"] = "none"
    shaping: float = Field(0.1, gt=0)


class LUFFYUpdate(GRAFT):
    """LUFFY's loss on grafted tokens, f(pi_theta(token)) * a, without gate or clip; own rows and denominator stay."""

    settings_type: ClassVar[type[Settings]] = LUFFYUpdateSettings

    def __init__(self, settings: LUFFYUpdateSettings) -> None:
        super().__init__(settings)
        clip, *others = self._objective.terms
        own = replace(clip, kinds=("own",), counted=clip.kinds)
        grafted = Term(
            ("grafted",), shaped_loss(settings.shaping), clip.reduction, policy_gradient=True, counted=clip.kinds
        )
        self._objective = Objective((own, grafted, *others), self._objective.needs_reference)


class HACPOUpdate(HACPO):
    """HACPO with GRAFT's selection: a peer's group joins only on selected prompts, elsewhere own groups stand alone.

    On the others the paper gives peer responses advantage 0 and leaves open whether they still count in baselines and
    means. Here they contribute nothing at all.
    """

    def shared(self, groups: Groups, context: StepContext) -> dict[str, dict[str, list[Group]]]:
        return _selected_groups(groups, context)

    def usable(self, own: Group, successes: int, size: int) -> bool:
        return is_complementary(own.successes, successes, size)


class SGTUpdate(SGT):
    """SGT with GRAFT's selection: one success is imitated on selected prompts only."""

    def offered(self, groups: Groups, context: StepContext) -> dict[str, dict[str, list[Group]]]:
        return _selected_groups(groups, context)

    def usable(self, own: Group, successes: int, size: int) -> bool:
        return is_complementary(own.successes, successes, size)


def _selected_groups(groups: Groups, context: StepContext) -> dict[str, dict[str, list[Group]]]:
    """Per receiver and prompt the one peer group that GRAFT selects."""
    of_prompt = groups_by_prompt(groups)
    return {
        receiver: {q: [group for group in of_prompt[q] if group.model == source] for q, source in selected.items()}
        for receiver, selected in complementary_selection(groups, context).items()
    }


GRAFT_VARIANTS = {
    "graft-random-prompts": RandomPrompts,
    "graft-random-admission": RandomAdmission,
    "graft-pooled": Pooled,
    "graft-success-only": SuccessOnly,
    "graft-luffy-update": LUFFYUpdate,
    "graft-hacpo-update": HACPOUpdate,
    "graft-sgt-update": SGTUpdate,
}

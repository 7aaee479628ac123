"""What a step has to do: how many responses of which lengths, how many are exchanged and trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from graftrl.config import Recipe
from graftrl.errors import ConfigError


@dataclass(frozen=True)
class Workload:
    """One step of every policy.

    prompt_tokens, response_tokens: means, the latter by policy; a response's length is log-normal with the coefficient
        of variation `spread` (1: that of an exponential distribution), at least 1 and cut at `limit`; the mean is the
        one before the cut. lengths: measured ones of some policies, to draw from instead.
    exchanged: share of prompts on which a receiver gets a peer's group. contrast: share of prompts whose own group has
        right and wrong responses, and so a gradient; the others are spared the pass.
    grade_seconds: of one response in one of `graders` processes. exchange_seconds_per_token: re-tokenising and checking
        on one CPU core.
    """

    prompts: int
    group: int
    prompt_tokens: int
    response_tokens: Mapping[str, float]
    limit: int
    spread: float = 1.0
    lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    minibatch_prompts: int = 32
    epochs: int = 1
    exchanged: float = 0.0
    contrast: float = 1.0
    grade_seconds: float = 0.01
    graders: int = 2
    exchange_seconds_per_token: float = 2e-6

    @property
    def responses(self) -> int:
        return self.prompts * self.group

    @property
    def minibatches(self) -> list[int]:
        """Prompts of each optimizer step of one pass."""
        whole, rest = divmod(self.prompts, self.minibatch_prompts)
        return [self.minibatch_prompts] * whole + ([rest] if rest else [])

    @property
    def passed(self) -> float:
        """Share of prompts whose rows go through training: own groups with contrast, and grafts in place of others."""
        return min(1.0, self.contrast + self.exchanged)

    def draw(self, policy: str, rng: np.random.Generator) -> NDArray[np.int64]:
        """Lengths of one policy's responses, int64 [prompts * group]; independent of each other."""
        if policy in self.lengths:
            return rng.choice(np.asarray(self.lengths[policy], dtype=np.int64), self.responses)
        variance = math.log1p(self.spread**2)
        drawn = rng.lognormal(
            math.log(self.response_tokens[policy]) - variance / 2, math.sqrt(variance), self.responses
        )
        return np.clip(np.rint(drawn), 1, self.limit).astype(np.int64)


def workload_of(
    recipe: Recipe,
    *,
    prompt_tokens: int | None = None,
    response_tokens: Mapping[str, float] | None = None,
    spread: float = 1.0,
    lengths: Mapping[str, Sequence[int]] | None = None,
    exchanged: float | None = None,
    contrast: float = 1.0,
    grade_seconds: float = 0.01,
) -> Workload:
    """The step of a recipe. What a recipe cannot know is assumed unless given: prompts take an eighth of their limit,
    responses a quarter of theirs; methods that exchange give a receiver a peer's group on a tenth of the prompts.

    Raises:
        ConfigError: a number outside its range.
    """
    sampling, training, means = recipe.sampling, recipe.training, response_tokens or {}
    default = max(1, sampling.max_response_tokens // 4)
    exchanges = recipe.build_method().fewest_models > 1
    found = Workload(
        prompts=training.prompts_per_step,
        group=training.group_size,
        prompt_tokens=prompt_tokens or max(1, sampling.max_prompt_tokens // 8),
        response_tokens={name: means.get(name, default) for name in recipe.models},
        limit=sampling.max_response_tokens,
        spread=spread,
        lengths=lengths or {},
        minibatch_prompts=training.minibatch_prompts,
        epochs=training.epochs_per_batch,
        exchanged=(0.1 if exchanges else 0.0) if exchanged is None else exchanged,
        contrast=contrast,
        grade_seconds=grade_seconds,
        graders=recipe.verification.workers,
    )
    for option, value, low, high in (
        ("--prompt-tokens", found.prompt_tokens, 1, sampling.max_prompt_tokens),
        *(("--response-tokens", mean, 1, sampling.max_response_tokens) for mean in found.response_tokens.values()),
        ("--spread", spread, 1e-3, 10),
        ("--exchanged", found.exchanged, 0, 1),
        ("--contrast", found.contrast, 0, 1),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{option} {value:g}: must lie between {low:g} and {high:g}")
    return found

"""What a method may do besides exchanging. The loop asks whether a method has these parts; most have none.

Steering prompts and searching weights need more than rows. Each part is a protocol of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from graftrl.methods.base import CodecLike
from graftrl.rollout import Group, Prompt


@dataclass(frozen=True)
class PromptContext:
    """progress: share of the run's steps that are finished, in [0, 1). codec: of the model that will answer. memory:
    what the method's last exchange left."""

    progress: float
    codec: CodecLike
    max_prompt_tokens: int
    memory: Mapping[str, Any]


@runtime_checkable
class PreparesPrompts(Protocol):
    """Changes a model's prompts before it answers them; their ids, number and order stay."""

    def prepare(self, model: str, prompts: Sequence[Prompt], context: PromptContext) -> list[Prompt]: ...


@runtime_checkable
class SearchesWeights(Protocol):
    """Moves the weights along random directions by how well each did, in place of a gradient.

    Every prompt is answered `group_size` times under each of `population` perturbed weights theta + scale * eps_i. A
    prompt's group holds all these responses, member by member.
    """

    @property
    def population(self) -> int: ...

    @property
    def scale(self) -> float: ...

    def coefficients(self, fitness: NDArray[np.float64]) -> NDArray[np.float64]:
        """How far to go along each direction eps_i, given the mean reward of each member; both float64 [population]."""
        ...


@runtime_checkable
class UsesScorers(Protocol):
    """Reads frozen models, which the recipe names under `scorers`."""

    @property
    def scorers(self) -> tuple[str, ...]: ...

    def check_scorers(self, codecs: Mapping[str, CodecLike], scorers: Mapping[str, CodecLike]) -> list[str]:
        """Notes for people on what models and scorers are together. Raises ConfigError where they cannot work."""
        ...


def member_fitness(groups: Sequence[Group], population: int) -> NDArray[np.float64]:
    """Mean reward of each member, float64 [population], from groups that hold their responses member by member."""
    rewards = np.stack([group.rewards.reshape(population, -1) for group in groups])
    return rewards.mean(axis=(0, 2))

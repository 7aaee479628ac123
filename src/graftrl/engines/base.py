"""Where policies live. The loop speaks to an engine in whole steps, for all models at once, so that an engine may work
on several models at the same time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graftrl.config import Recipe
from graftrl.objective import Objective
from graftrl.objective.importance import Gap
from graftrl.policies.codec import Codec
from graftrl.policies.config import SamplingSettings
from graftrl.policies.hf import UpdateStats
from graftrl.policies.scorers import ScorerCodec
from graftrl.rollout import Group, Prompt, Row


class Writing(Protocol):
    """A checkpoint whose files are written beside training."""

    def done(self, *, wait: bool) -> bool:
        """Whether all files are there. wait: until they are; raises GraftrlError where they never will be."""
        ...


class Engine(Protocol):
    @property
    def codecs(self) -> Mapping[str, Codec]: ...

    @property
    def scorers(self) -> Mapping[str, ScorerCodec]:
        """The frozen models that the recipe's method reads."""
        ...

    @property
    def notes(self) -> Sequence[str]: ...

    def sample(
        self,
        prompts: Mapping[str, Sequence[Prompt]],
        n: int,
        seeds: Mapping[str, int],
        sampling: SamplingSettings | None = None,
    ) -> dict[str, list[Group]]: ...

    def score(self, model: str, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Log-probabilities under a model's current weights or under a scorer, which reads no row twice in a step."""
        ...

    def generation_gap(self, model: str, rows: Sequence[Row]) -> float: ...

    def sync_gaps(self) -> Mapping[str, Gap]:
        """Per model how far its sampler was from its trainer when last compared; empty where they are one."""
        ...

    def update(
        self, minibatches: Mapping[str, Sequence[Sequence[Row]]], objective_of: Callable[[int], Objective]
    ) -> dict[str, UpdateStats]: ...

    def perturbed(self, seeds: Mapping[str, int], scale: float) -> AbstractContextManager[None]:
        """Every model's weights moved by scale * eps, eps standard normal from its seed; then restored bit for bit."""
        ...

    def add_directions(self, model: str, seeds: Sequence[int], coefficients: Sequence[float]) -> None:
        """theta += sum_i coefficients_i * eps_i with the directions of these seeds."""
        ...

    def save(self, folder: Path) -> Writing | None:
        """Write a checkpoint of all models; None when it is written, else what will be."""
        ...

    def restore(self, recipe: Recipe, checkpoint: Path | None, lost: Collection[str]) -> None:
        """Go back to a checkpoint (None: to the start), with this recipe's models, which may be fewer than before.

        Args:
            lost: models whose workers are made anew.

        Raises:
            WorkerLost: some cannot be, or were lost again. With fewer models another attempt may succeed.
        """
        ...

    def news(self) -> list[str]:
        """What befell the engine since this was last asked, for people."""
        ...

    def close(self) -> None:
        """Let go of whatever the engine holds outside of this process. Nothing can be asked of it afterwards."""
        ...

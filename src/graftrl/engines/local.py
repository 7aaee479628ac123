"""The local engine: every policy in this process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from graftrl.config import Recipe
from graftrl.engines.scorers import open_scorers
from graftrl.objective import Objective
from graftrl.objective.importance import Gap
from graftrl.policies.config import SamplingSettings
from graftrl.policies.frozen import FrozenWeights
from graftrl.policies.hf import HFPolicy, UpdateStats
from graftrl.policies.loading import check_context
from graftrl.policies.perturbation import add_directions, perturbed
from graftrl.rollout import Group, Prompt, Row


class LocalEngine:
    """Policies of a recipe; from `checkpoint` (a folder with one subfolder a model) when it is given."""

    def __init__(self, recipe: Recipe, checkpoint: Path | None = None) -> None:
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        self.restore(recipe, checkpoint)

    def restore(self, recipe: Recipe, checkpoint: Path | None, lost: Collection[str] = ()) -> None:
        self.frozen = FrozenWeights()
        self.policies = {
            name: HFPolicy(
                name, settings, recipe.sampling, None if checkpoint is None else checkpoint / name, self.frozen
            )
            for name, settings in recipe.models.items()
        }
        for name, policy in self.policies.items():
            check_context(name, policy.loaded.causal_lm, recipe.sampling)
        self.codecs = {name: policy.codec for name, policy in self.policies.items()}
        self.scorers = open_scorers(recipe, self.frozen)
        self.notes = [
            *(note for policy in self.policies.values() for note in policy.notes),
            *(note for scorer in self.scorers.values() for note in scorer.notes),
        ]

    def sample(
        self,
        prompts: Mapping[str, Sequence[Prompt]],
        n: int,
        seeds: Mapping[str, int],
        sampling: SamplingSettings | None = None,
    ) -> dict[str, list[Group]]:
        return {
            model: self.policies[model].sample(given, n, seeds[model], sampling) for model, given in prompts.items()
        }

    def score(self, model: str, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        return self.scorers[model].model.logprobs(rows) if model in self.scorers else self.policies[model].score(rows)

    def generation_gap(self, model: str, rows: Sequence[Row]) -> float:
        return self.policies[model].generation_gap(rows)

    def sync_gaps(self) -> Mapping[str, Gap]:
        return {}

    def update(
        self, minibatches: Mapping[str, Sequence[Sequence[Row]]], objective_of: Callable[[int], Objective]
    ) -> dict[str, UpdateStats]:
        models = {name: scorer.model for name, scorer in self.scorers.items()}
        try:
            return {
                model: self.policies[model].update(batches, objective_of, models)
                for model, batches in minibatches.items()
            }
        finally:
            self.frozen.forget()  # the step's rows will not come again

    @contextmanager
    def perturbed(self, seeds: Mapping[str, int], scale: float) -> Iterator[None]:
        with ExitStack() as stack:
            for model, seed in seeds.items():
                stack.enter_context(perturbed(self.policies[model].parameters, seed, scale))
            yield

    def add_directions(self, model: str, seeds: Sequence[int], coefficients: Sequence[float]) -> None:
        add_directions(self.policies[model].parameters, seeds, coefficients)

    def save(self, folder: Path) -> None:
        for name, policy in self.policies.items():
            policy.save(folder / name)

    def news(self) -> list[str]:
        return []

    def close(self) -> None:
        """Nothing lives elsewhere."""

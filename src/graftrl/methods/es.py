"""Evolution strategies: no gradient; weights move along random directions by how well each direction does.

    theta <- theta + eta / (N sigma) * sum_i z(F_i) eps_i,    F_i = mean reward under theta + sigma eps_i

with eps_i standard normal, regenerated from its seed, and z the fitness minus its mean over its standard deviation.
Formalised from the abstract and public summaries of Hayes et al., on evolution strategies for the post-training of
language models; all constants are options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from graftrl.methods.base import Exchange, Groups, StepContext, receiving
from graftrl.methods.extensions import member_fitness
from graftrl.objective import Objective, group_advantages
from graftrl.rollout import Group, Row
from graftrl.settings import Settings


class ESSettings(Settings):
    """population: N, perturbed weights per step and model; each answers every prompt `training.group_size` times.
    sigma: standard deviation of a perturbation. eta: step size; eta / sigma is the length per direction and unit of z.
    """

    name: str = "es"
    population: int = Field(30, ge=2)
    sigma: float = Field(1e-3, gt=0)
    eta: float = Field(5e-7, gt=0)


class ES:
    settings_type: ClassVar[type[Settings]] = ESSettings
    fewest_models: ClassVar[int] = 1
    filter: Callable[[Group], bool] | None = None
    sampling_rounds = 1

    def __init__(self, settings: ESSettings) -> None:
        self.settings = settings

    @property
    def population(self) -> int:
        return self.settings.population

    @property
    def scale(self) -> float:
        return self.settings.sigma

    def coefficients(self, fitness: NDArray[np.float64]) -> NDArray[np.float64]:
        """eta / (N sigma) * z; all 0 where every member did equally well."""
        z = group_advantages(fitness).numpy()
        return self.settings.eta / (self.settings.population * self.settings.sigma) * z

    def exchange(self, groups: Groups, context: StepContext) -> Exchange:
        """No rows: the weights have moved already. What is left is to say how the members did."""
        exchange = Exchange({})
        for model, of_model in receiving(groups, context).items():
            exchange.rows[model] = []
            fitness = member_fitness(of_model, self.settings.population)
            exchange.diagnostics[model] = {
                "fitness_mean": float(fitness.mean()),
                "fitness_best": float(fitness.max()),
                "fitness_deviation": float(fitness.std(ddof=1)),
            }
        return exchange

    def usable(self, own: Group, successes: int, size: int) -> bool:
        return False

    def order(self, rows: Sequence[Row], minibatch_prompts: int, rng: np.random.Generator) -> list[list[Row]]:
        return []

    def objective(self, minibatch_index: int) -> Objective:
        return Objective(())

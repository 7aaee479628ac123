import numpy as np
import pytest
import torch
from scorer import Scorer

from graftrl.methods import build_method
from graftrl.methods.extensions import SearchesWeights, member_fitness


def test_coefficients_are_the_normalised_fitness_times_the_step():
    method = build_method({"name": "es", "population": 4, "sigma": 0.1, "eta": 0.02})
    assert isinstance(method, SearchesWeights) and (method.population, method.scale) == (4, 0.1)
    fitness = np.array([0.5, 0.25, 0.25, 0.0])
    z = (fitness - 0.25) / (fitness.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(method.coefficients(fitness), 0.02 / (4 * 0.1) * z)
    assert (method.coefficients(np.full(4, 0.1)) == 0).all()  # exactly: the weights stay


def test_the_update_climbs_a_known_fitness():
    method = build_method({"name": "es", "population": 20, "sigma": 0.05, "eta": 0.004})
    generator = torch.Generator().manual_seed(0)
    target, theta = torch.randn(10, generator=generator), torch.zeros(10)
    for _ in range(200):
        directions = torch.randn(20, 10, generator=generator)
        fitness = -((theta + method.scale * directions - target) ** 2).sum(dim=1)
        theta = theta + torch.from_numpy(method.coefficients(fitness.double().numpy())).float() @ directions
    assert (theta - target).norm() < 0.2 * target.norm()


def test_fitness_is_the_mean_reward_of_each_members_responses(make_group):
    groups = [make_group("A", "q0", [1, 1, 0, 0, 1, 0]), make_group("A", "q1", [1, 0, 0, 0, 1, 1])]
    np.testing.assert_allclose(member_fitness(groups, 3), [0.75, 0.0, 0.75])


def test_no_row_is_trained_and_the_members_are_reported(make_group, context):
    method = build_method({"name": "es", "population": 2})
    groups = {"A": [make_group("A", "q0", [1, 1, 0, 0])]}
    exchange = method.exchange(groups, context(Scorer(0.0), 2))
    assert exchange.rows == {"A": []} and method.order([], 4, np.random.default_rng(0)) == []
    assert exchange.diagnostics["A"] == pytest.approx(
        {"fitness_mean": 0.5, "fitness_best": 1.0, "fitness_deviation": 0.5**0.5}
    )


def test_a_population_of_one_is_refused():
    with pytest.raises(ValueError, match="population"):
        build_method({"name": "es", "population": 1})

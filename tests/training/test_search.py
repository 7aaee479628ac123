"""Sampling and moving belong together: what a member earned moves the weights along that member's direction."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from graftrl.methods import build_method
from graftrl.policies.perturbation import add_directions, perturbed
from graftrl.rollout import Group, Prompt, Response
from graftrl.training.search import move_weights, sample_members


class Quadratic:
    """An engine whose models are vectors; every response earns how near the vector is to the model's target."""

    def __init__(self, targets):
        self.targets = targets
        self.theta = {model: torch.nn.Parameter(torch.zeros(len(target))) for model, target in targets.items()}
        self.sampling_seeds = []

    def reward(self, model):
        return float(1 / (1 + (self.theta[model].detach() - self.targets[model]).square().sum()))

    def sample(self, prompts, n, seeds):
        self.sampling_seeds.append(dict(seeds))
        return {
            model: [Group(model, prompt, [self.response(model) for _ in range(n)]) for prompt in of_model]
            for model, of_model in prompts.items()
        }

    def response(self, model):
        return Response("", np.array([1]), np.zeros(1, np.float32), "stop", self.reward(model))

    @contextmanager
    def perturbed(self, seeds, scale):
        with perturbed([self.theta["A"]], seeds["A"], scale), perturbed([self.theta["B"]], seeds["B"], scale):
            yield

    def add_directions(self, model, seeds, coefficients):
        add_directions([self.theta[model]], seeds, coefficients)


@pytest.fixture
def engine():
    return Quadratic({"A": torch.full((5,), 0.5), "B": torch.full((3,), -0.5)})


PROMPTS = {model: [Prompt(f"q{i}", (), "", "t") for i in range(2)] for model in "AB"}


def test_groups_hold_the_responses_member_by_member_and_the_weights_are_as_before(engine):
    method = build_method({"name": "es", "population": 4, "sigma": 0.1})
    groups = sample_members(engine, method, PROMPTS, 3, {"A": 1, "B": 2})
    assert {model: [group.size for group in of] for model, of in groups.items()} == {"A": [12, 12], "B": [12, 12]}
    rewards = groups["A"][0].rewards.reshape(4, 3)
    assert (rewards == rewards[:, :1]).all() and len(set(rewards[:, 0])) == 4  # a member has its own weights
    assert all((theta == 0).all() for theta in engine.theta.values())
    assert engine.sampling_seeds == [{"A": 1, "B": 2}] * 4  # the same random numbers for all members


def test_steps_bring_every_model_nearer_to_its_target(engine):
    method = build_method({"name": "es", "population": 16, "sigma": 0.1, "eta": 0.01})
    before = {model: engine.reward(model) for model in "AB"}
    for step in range(60):
        seeds = {"A": step, "B": 1000 + step}
        move_weights(engine, method, sample_members(engine, method, PROMPTS, 1, seeds), seeds)
    assert all(engine.reward(model) > 0.9 > before[model] for model in "AB")

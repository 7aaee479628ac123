"""Steps of a method that searches weight space: sample under perturbed weights, then move along what did well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graftrl.engines.base import Engine
from graftrl.methods.extensions import SearchesWeights, member_fitness
from graftrl.rollout import Group, Prompt
from graftrl.seeds import derive_seed


def sample_members(
    engine: Engine,
    method: SearchesWeights,
    prompts: Mapping[str, Sequence[Prompt]],
    n: int,
    seeds: Mapping[str, int],
) -> dict[str, list[Group]]:
    """n responses to each prompt under each member's weights, in one group per prompt, member by member.

    All members draw with the same random numbers, so that they differ by their weights alone.
    """
    merged: dict[str, list[Group]] = {
        model: [Group(model, prompt, []) for prompt in of] for model, of in prompts.items()
    }
    for member in range(method.population):
        directions = {model: _direction(seeds[model], member) for model in prompts}
        with engine.perturbed(directions, method.scale):
            sampled = engine.sample(prompts, n, seeds)
        for model, groups in sampled.items():
            for whole, part in zip(merged[model], groups, strict=True):
                whole.responses += part.responses
    return merged


def move_weights(
    engine: Engine, method: SearchesWeights, groups: Mapping[str, Sequence[Group]], seeds: Mapping[str, int]
) -> None:
    """theta += sum_i c_i eps_i for every model, from graded groups of `sample_members` and the same seeds."""
    for model, of_model in groups.items():
        coefficients = method.coefficients(member_fitness(of_model, method.population)).tolist()
        directions = [_direction(seeds[model], member) for member in range(method.population)]
        engine.add_directions(model, directions, coefficients)


def _direction(seed: int, member: int) -> int:
    return derive_seed(seed, "direction", member)

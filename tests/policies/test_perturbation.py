import numpy as np
import pytest
import torch
from tiny_models import prompts, weights

from graftrl.policies.perturbation import add_directions, perturbed


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def test_a_direction_is_standard_normal_and_a_function_of_its_seed():
    directions = []
    for seed in (1, 1, 2):
        parameters = [torch.nn.Parameter(torch.zeros(200, 50)), torch.nn.Parameter(torch.zeros(300))]
        add_directions(parameters, [seed], [1.0])
        directions.append(flat(parameters))
    assert torch.equal(directions[0], directions[1])
    assert abs(torch.dot(directions[0], directions[2]) / len(directions[0])) < 0.03
    assert abs(directions[0].mean()) < 0.03 and abs(directions[0].std() - 1) < 0.03
    assert not torch.equal(directions[0][:300], directions[0][10_000:])  # parameters do not share their draws


def test_a_weighted_sum_of_directions_equals_adding_each_alone():
    together, alone = ([torch.nn.Parameter(torch.ones(20, 3)), torch.nn.Parameter(torch.ones(7))] for _ in range(2))
    seeds, coefficients = [3, 4, 5], [0.5, -1.0, 2.0]
    add_directions(together, seeds, coefficients)
    for seed, coefficient in zip(seeds, coefficients, strict=True):
        add_directions(alone, [seed], [coefficient])
    torch.testing.assert_close(flat(together), flat(alone))


def test_perturbed_weights_are_restored_bit_for_bit_even_after_an_error(policy):
    p = policy("llama")
    before = weights(p)
    for _ in range(3):
        with perturbed(p.parameters, 7, 0.37):
            moved = flat(weights(p)) - flat(before)
        assert abs(moved.std() - 0.37) < 0.02
    with pytest.raises(ZeroDivisionError), perturbed(p.parameters, 7, 0.37):
        _ = 1 / 0
    assert all(torch.equal(a, b) for a, b in zip(before, weights(p), strict=True))


def test_samples_under_a_perturbation_come_from_the_perturbed_weights(policy):
    p = policy("llama")
    plain = p.sample(prompts("a"), 8, seed=1)[0]
    with perturbed(p.parameters, 3, 0.5):
        other = p.sample(prompts("a"), 8, seed=1)[0]
    again = p.sample(prompts("a"), 8, seed=1)[0]
    assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(plain.responses, again.responses, strict=True))
    assert any(a.logprobs[0] != b.logprobs[0] for a, b in zip(plain.responses, other.responses, strict=True))

"""Surrogates, their gradients and the estimators, against hand values and a NumPy transcription of the formulas."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftrl.objective import clipped, clipped_surrogate, dual_clipped_surrogate, k3_kl, sequence_log_ratio

LOW, HIGH, DUAL = 0.2, 0.28, 3.0

ratio = st.floats(0.01, 20)
advantage = st.floats(-5, 5)


def at_ratio(*ratios):
    """(logprobs, old_logprobs) with the given ratios; logprobs is a leaf."""
    old = torch.full((len(ratios),), -1.5, dtype=torch.float64)
    return (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(), old


def reference_surrogate(logprobs, old, advantages):
    rho = np.exp(logprobs - old)
    return np.minimum(rho * advantages, np.clip(rho, 1 - LOW, 1 + HIGH) * advantages)


# Clipped surrogate


@pytest.mark.parametrize(
    ("rho", "a", "value", "gradient"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.0, -2.0, -2.0, -2.0),
        (1.2, 1.0, 1.2, 1.2),  # above 1 + clip_low, below 1 + clip_high
        (1.5, 1.0, 1.28, 0.0),
        (1.5, -1.0, -1.5, -1.5),  # the pessimistic side is never clipped
        (0.5, 1.0, 0.5, 0.5),
        (0.5, -1.0, -0.8, 0.0),
        (0.75, -1.0, -0.8, 0.0),  # above 1 - clip_high, below 1 - clip_low
        (7.0, 0.0, 0.0, 0.0),
    ],
)
def test_surrogate_and_gradient_at_hand_values(rho, a, value, gradient):
    logprobs, old = at_ratio(rho)
    advantages = torch.tensor([a], dtype=torch.float64)
    surrogate = clipped_surrogate(logprobs, old, advantages, LOW, HIGH)
    surrogate.sum().backward()
    assert surrogate.item() == pytest.approx(value, abs=1e-12)
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-12)
    assert clipped(logprobs, old, advantages, LOW, HIGH).item() is (gradient == 0 and a != 0)


def test_surrogate_equals_the_formula_in_numpy(make_minibatch):
    batch = make_minibatch()
    logprobs, old, advantages = batch.logprobs.detach().numpy(), batch.old.numpy(), batch.advantages.numpy()
    surrogate = clipped_surrogate(batch.logprobs, batch.old, batch.advantages, LOW, HIGH)
    np.testing.assert_allclose(surrogate.detach().numpy(), reference_surrogate(logprobs, old, advantages), rtol=1e-12)


def test_gradient_is_ratio_times_advantage_and_zero_exactly_where_clipped(make_minibatch):
    batch = make_minibatch()
    clipped_surrogate(batch.logprobs, batch.old, batch.advantages, LOW, HIGH).sum().backward()
    unclipped = ((batch.logprobs - batch.old).exp() * batch.advantages).detach()
    was_clipped = clipped(batch.logprobs, batch.old, batch.advantages, LOW, HIGH)
    assert 0 < was_clipped.sum() < was_clipped.numel()
    torch.testing.assert_close(batch.logprobs.grad, torch.where(was_clipped, 0.0, unclipped))


def test_before_the_first_update_nothing_is_clipped_and_the_gradient_is_the_advantage(make_minibatch):
    batch = make_minibatch()
    surrogate = clipped_surrogate(batch.logprobs, batch.logprobs.detach(), batch.advantages, LOW, HIGH)
    surrogate.sum().backward()
    expected = batch.advantages.expand_as(batch.logprobs)
    torch.testing.assert_close(surrogate.detach(), expected)
    torch.testing.assert_close(batch.logprobs.grad, expected)
    assert not clipped(batch.logprobs, batch.logprobs, batch.advantages, LOW, HIGH).any()


@given(st.lists(ratio, min_size=1, max_size=8), advantage, st.floats(0, 1))
def test_weight_in_front_equals_weight_folded_into_the_advantage(ratios, a, weight):
    logprobs, old = at_ratio(*ratios)
    in_front = weight * clipped_surrogate(logprobs, old, torch.tensor(a), LOW, HIGH)
    folded = clipped_surrogate(logprobs, old, torch.tensor(weight * a, dtype=torch.float64), LOW, HIGH)
    torch.testing.assert_close(folded, in_front, rtol=1e-6, atol=1e-9)


@given(ratio, advantage)
def test_clipping_only_lowers_and_is_reported_where_it_does(rho, a):
    logprobs, old = at_ratio(rho)
    a = torch.tensor([a], dtype=torch.float64)
    surrogate = clipped_surrogate(logprobs, old, a, LOW, HIGH)
    unclipped = (logprobs - old).exp() * a
    assert (surrogate <= unclipped).all()
    assert torch.equal(clipped(logprobs, old, a, LOW, HIGH), surrogate < unclipped)


# Dual clip


@pytest.mark.parametrize(
    ("rho", "a", "value", "gradient"),
    [
        (5.0, -1.0, -3.0, 0.0),  # bounded from below
        (2.0, -1.0, -2.0, -2.0),  # not yet bounded
        (0.5, -1.0, -0.8, 0.0),
        (5.0, 1.0, 1.28, 0.0),  # positive advantages know no dual clip
        (0.1, 1.0, 0.1, 0.1),
    ],
)
def test_dual_clip_bounds_negative_advantages_only(rho, a, value, gradient):
    logprobs, old = at_ratio(rho)
    surrogate = dual_clipped_surrogate(logprobs, old, torch.tensor([a], dtype=torch.float64), LOW, HIGH, DUAL)
    surrogate.sum().backward()
    assert surrogate.item() == pytest.approx(value, abs=1e-12)
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-12)


@given(ratio, advantage)
def test_dual_clip_is_the_clipped_surrogate_with_a_floor(rho, a):
    logprobs, old = at_ratio(rho)
    a = torch.tensor([a], dtype=torch.float64)
    expected = clipped_surrogate(logprobs, old, a, LOW, HIGH)
    expected = torch.maximum(expected, DUAL * a) if a < 0 else expected
    torch.testing.assert_close(dual_clipped_surrogate(logprobs, old, a, LOW, HIGH, DUAL), expected)


# KL


@given(st.floats(-10, 10), st.floats(-20, 0))
def test_k3_follows_its_definition(difference, logprob):
    d = torch.tensor([difference], dtype=torch.float64)
    value = k3_kl(torch.tensor([logprob], dtype=torch.float64) - d, torch.tensor([logprob], dtype=torch.float64)).item()
    assert value == pytest.approx(math.exp(difference) - difference - 1, rel=1e-9, abs=1e-12)


def test_k3_is_zero_where_equal_and_positive_elsewhere_in_single_precision():
    difference = torch.logspace(-8, 1, 2000)
    zero = torch.zeros_like(difference)
    for d in (difference, -difference):
        values = k3_kl(zero, d)
        assert (values >= 0).all()
        assert (values[d.abs() > 1e-3] > 0).all()
    logprobs = torch.linspace(-20, 0, 200)
    assert torch.equal(k3_kl(logprobs, logprobs), torch.zeros(200))


def test_k3_gradient_pulls_toward_the_reference():
    logprobs = torch.tensor([-2.0, -1.0, -0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    k3_kl(logprobs, ref).sum().backward()
    torch.testing.assert_close(logprobs.grad, 1 - (ref - logprobs.detach()).exp())


def test_k3_estimates_the_divergence_without_bias():
    policy = torch.log_softmax(torch.tensor([0.3, -1.0, 2.0, 0.5], dtype=torch.float64), dim=0)
    ref = torch.log_softmax(torch.tensor([1.0, 0.0, 0.5, -0.5], dtype=torch.float64), dim=0)
    expectation = (policy.exp() * k3_kl(policy, ref)).sum()
    divergence = (policy.exp() * (policy - ref)).sum()
    torch.testing.assert_close(expectation, divergence)


# Sequence ratio


def test_sequence_ratio_has_one_value_per_row_and_each_tokens_own_gradient(make_minibatch):
    batch = make_minibatch()
    log_ratio = sequence_log_ratio(batch.logprobs, batch.old, batch.mask)
    for row, length in enumerate(batch.lengths):
        difference = (batch.logprobs - batch.old)[row, :length].detach().numpy()
        np.testing.assert_allclose(log_ratio[row].detach().numpy(), difference.mean(), rtol=1e-12)
    coefficients = torch.arange(batch.mask.numel(), dtype=torch.float64).view_as(log_ratio)
    (coefficients * log_ratio).sum().backward()
    torch.testing.assert_close(batch.logprobs.grad, coefficients)  # the mean itself is a constant


def test_sequence_ratio_surrogate_keeps_or_drops_whole_rows():
    old = torch.zeros(2, 3, dtype=torch.float64)
    logprobs = torch.tensor([[0.9, 0.0, -0.3], [0.0, 0.03, 0.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones_like(old, dtype=torch.bool)
    surrogate = clipped_surrogate(sequence_log_ratio(logprobs, old, mask), old, torch.tensor(2.0), 0.02, 0.02)
    surrogate.sum().backward()
    assert logprobs.grad[0].tolist() == [0.0, 0.0, 0.0]
    assert logprobs.grad[1].tolist() == pytest.approx([2 * math.exp(0.01)] * 3)


@pytest.mark.parametrize("padding", [0.0, 1e30, math.inf, math.nan])
def test_padding_does_not_reach_the_sequence_ratio(padding):
    logprobs = torch.tensor([[-1.0, -2.0, -9.0]])
    old = torch.tensor([[-1.5, -1.0, padding]])
    mask = torch.tensor([[True, True, False]])
    log_ratio = sequence_log_ratio(logprobs, old, mask)
    assert log_ratio[mask].tolist() == pytest.approx([-0.25, -0.25])


def test_row_without_loss_tokens_has_a_finite_sequence_ratio():
    some = torch.tensor([[-1.0, -2.0]])
    assert sequence_log_ratio(some, some - 1, torch.zeros(1, 2, dtype=torch.bool)).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_extreme_ratio_gives_a_finite_value_and_gradient_in_float32(advantage):
    logprobs = torch.tensor([0.0], requires_grad=True)
    surrogate = clipped_surrogate(logprobs, torch.tensor([-120.0]), torch.tensor([advantage]), 0.2, 0.28)
    surrogate.sum().backward()
    assert torch.isfinite(surrogate).all() and torch.isfinite(logprobs.grad).all()

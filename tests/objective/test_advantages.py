"""Group-relative advantages: hand values, the closed form for 0/1 rewards, and what must never change them."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftrl.objective import group_advantages
from graftrl.rollout import Row

reward = st.floats(-100, 100)
rewards = st.lists(reward, min_size=2, max_size=16)


def reference(group, eps=1e-6):
    if max(group) == min(group):
        return [0.0] * len(group)
    mean, std = statistics.fmean(group), statistics.stdev(group)  # stdev has Bessel's correction
    return [(r - mean) / (std + eps) for r in group]


def in_float64(group, **options):
    return group_advantages(torch.tensor(group, dtype=torch.float64), **options)


def test_one_success_of_eight():
    advantages = group_advantages([1, 0, 0, 0, 0, 0, 0, 0])
    assert advantages[0].item() == pytest.approx(2.474867, abs=5e-6)
    assert advantages[1:].tolist() == pytest.approx([-0.353552] * 7, abs=5e-6)


@pytest.mark.parametrize("n", [2, 3, 8, 16])
def test_zero_one_rewards_follow_the_closed_form(n):
    for k in range(1, n):
        p = k / n
        std = math.sqrt(p * (1 - p) * n / (n - 1))
        expected = [(1 - p) / (std + 1e-6)] * k + [-p / (std + 1e-6)] * (n - k)
        assert in_float64([1.0] * k + [0.0] * (n - k)).tolist() == pytest.approx(expected, rel=1e-12)


@given(rewards)
def test_any_group_follows_the_definition(group):
    assert in_float64(group).tolist() == pytest.approx(reference(group), rel=1e-6, abs=1e-6)


@given(st.integers(2, 12), reward, st.sampled_from([torch.float32, torch.float64]), st.booleans())
def test_equal_rewards_give_exactly_zero(n, value, dtype, normalize_std):
    advantages = group_advantages(torch.full((n,), value, dtype=dtype), normalize_std=normalize_std)
    assert advantages.tolist() == [0.0] * n


def test_equal_rewards_without_an_exact_mean_give_exactly_zero():
    assert group_advantages([0.1, 0.1, 0.1]).tolist() == [0.0, 0.0, 0.0]
    assert in_float64([0.1, 0.1, 0.1]).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("normalize_std", [True, False])
def test_one_outlier_among_equal_rewards_stays_moderate(normalize_std):
    advantages = group_advantages([0.0] + [0.95] * 7, normalize_std=normalize_std)
    assert torch.isfinite(advantages).all()
    assert advantages.abs().max() < 10


@given(st.floats(0.1, 1), st.integers(1, 3))
def test_rounding_differences_between_rewards_are_not_blown_up(value, ulps):
    near = value
    for _ in range(ulps):
        near = math.nextafter(near, 2)
    assert in_float64([value, near, value, near]).abs().max() < 1e-6


@given(rewards)
def test_advantages_sum_to_zero_and_order_as_the_rewards_do(group):
    advantages = in_float64(group)
    assert advantages.sum().item() == pytest.approx(0, abs=1e-6)
    by_reward = advantages[torch.tensor(np.argsort(group, kind="stable"))]
    assert (by_reward.diff() >= -1e-9).all()


@given(rewards, st.randoms(use_true_random=False))
def test_order_of_responses_only_reorders_the_advantages(group, rng):
    order = rng.sample(range(len(group)), len(group))
    shuffled = in_float64([group[i] for i in order])
    torch.testing.assert_close(shuffled, in_float64(group)[torch.tensor(order)], rtol=1e-9, atol=1e-9)


@given(st.lists(st.lists(reward, min_size=4, max_size=4), min_size=1, max_size=6))
def test_groups_of_a_batch_do_not_touch_each_other(groups):
    together = in_float64(groups)
    torch.testing.assert_close(together, torch.stack([in_float64(group) for group in groups]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(in_float64(groups[::-1]), together.flip(0), rtol=1e-9, atol=1e-9)


def test_without_the_deviation_rewards_are_only_centred():
    assert group_advantages([1.0, 0.0, 0.0, 0.0], normalize_std=False).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_mixed_group_has_no_response_without_gradient_and_equal_group_has_none_with():
    def carries(group):
        ids = np.array([1])
        rows = [Row("q", ids, ids, float(a), "own", "A") for a in group_advantages(group)]
        return [row.carries_policy_gradient for row in rows]

    assert carries([1, 0, 0, 0]) == [True] * 4
    assert carries([0, 0, 0, 0]) == [False] * 4
    assert carries([1, 1, 1, 1]) == [False] * 4


@pytest.mark.parametrize(
    ("given_rewards", "dtype"),
    [
        ([1, 0], torch.float32),
        ([1.0, 0.0], torch.float32),
        (np.array([1.0, 0.0]), torch.float64),
        (np.array([1.0, 0.0], np.float32), torch.float32),
        (torch.tensor([True, False]), torch.float32),
        (torch.tensor([1.0, 0.0], dtype=torch.bfloat16), torch.bfloat16),
    ],
)
def test_floating_rewards_keep_their_dtype(given_rewards, dtype):
    assert group_advantages(given_rewards).dtype == dtype


@pytest.mark.parametrize("too_few", [[], [1.0], [[1.0], [0.0]], 1.0])
def test_fewer_than_two_rewards_are_refused_with_the_reason(too_few):
    with pytest.raises(ValueError, match="standard deviation of one sample is undefined"):
        group_advantages(torch.tensor(too_few))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_is_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, bad])

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from graftrl.evaluation.significance import holm, paired_t_test, sign_flip_test


def test_paired_test_by_hand() -> None:
    """Differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, t = 0.2 / (0.1 / sqrt 3) = 3.4641, t(2, .975) = 4.302653."""
    found = paired_t_test([0.5, 0.7, 0.9], [0.4, 0.5, 0.6])
    assert found.mean == pytest.approx(0.2)
    assert found.half_width == pytest.approx(4.302653 * 0.1 / np.sqrt(3), rel=1e-6)
    assert found.p == pytest.approx(0.0741799, rel=1e-5)
    assert found.n == 3


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=8))
def test_paired_test_equals_scipy(pairs: list[tuple[float, float]]) -> None:
    first, second = (list(values) for values in zip(*pairs, strict=True))
    differences = np.array(first) - np.array(second)
    if differences.std() < 1e-9:
        return
    found, expected = paired_t_test(first, second), stats.ttest_rel(first, second)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    low, high = expected.confidence_interval(0.95)
    assert found.half_width == pytest.approx((high - low) / 2, rel=1e-6)


def test_one_pair_has_no_interval_and_equal_differences_are_certain() -> None:
    assert paired_t_test([0.5], [0.25]).p is None
    assert paired_t_test([0.5], [0.25]).half_width is None
    assert paired_t_test([0.5, 0.75], [0.25, 0.5]).p == 0.0
    assert paired_t_test([0.5, 0.75], [0.5, 0.75]).p == 1.0
    with pytest.raises(ValueError, match="2 values paired with 1"):
        paired_t_test([0.5, 0.5], [0.5])


def test_holm_by_hand() -> None:
    """Sorted .01, .02, .03, .04: 4 x .01, 3 x .02, 2 x .03, then .04, which must not fall below .06."""
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
def test_holm_keeps_the_order_and_never_lowers(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(p <= a <= 1 for p, a in zip(p_values, adjusted, strict=True))
    order = np.argsort(p_values, kind="stable")
    assert (np.diff(np.array(adjusted)[order]) >= 0).all()
    assert min(adjusted) == pytest.approx(min(1.0, len(p_values) * min(p_values)))


def test_sign_flips_by_hand() -> None:
    """Differences 3, 2, 1: |+-3 +-2 +-1| is 6 for two of eight patterns, at least 4 for four of them."""
    assert sign_flip_test([[3.0, 2.0, 1.0]]) == 2 / 8
    assert sign_flip_test([[3.0, 2.0, -1.0]]) == 4 / 8
    assert sign_flip_test([[-3.0, -2.0, -1.0, 0.0, 0.0]]) == 2 / 8  # problems without a difference say nothing
    assert sign_flip_test([[0.0, 0.0]]) == 1.0
    cancels = [0, 0, 0, -5 / 8, -7 / 8, 6 / 8, 6 / 8]  # sums to 0 but for rounding: every pattern is as far
    assert sign_flip_test([cancels]) == 1.0


def test_sign_flips_of_a_score_weigh_benchmarks_equally() -> None:
    """A difference on one of two problems counts ten times one on one of twenty: .05 +- .005 by pattern."""
    strata = [[0.2, 0.0], [0.2, *[0.0] * 19]]
    assert sign_flip_test(strata) == 2 / 4
    assert sign_flip_test([[0.2, 0.0], [-0.2, *[0.0] * 19]]) == 4 / 4


@given(st.lists(st.integers(-8, 8), min_size=1, max_size=9))
def test_few_differences_are_flipped_in_all_ways(values: list[int]) -> None:
    found = abs(sum(values))
    sums = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    assert sign_flip_test([[v / 8 for v in values]]) == pytest.approx(np.mean([s >= found for s in sums]))


def test_many_differences_are_flipped_at_random_and_agree_with_the_normal_limit() -> None:
    rng = np.random.default_rng(1)
    differences = rng.normal(0.2, 1.0, size=200)
    z = differences.sum() / np.sqrt((differences**2).sum())
    expected = 2 * stats.norm.sf(abs(z))
    found = sign_flip_test([differences.tolist()])
    assert 0.01 < expected < 0.2 and found == pytest.approx(expected, abs=0.012)
    assert sign_flip_test([differences.tolist()]) == found  # the flips are drawn from a fixed seed
    assert sign_flip_test([[1.0] * 100]) == 1 / 10_001  # never 0


def test_no_problem_cannot_be_tested() -> None:
    for strata in ([], [[]], [[0.1], []]):
        with pytest.raises(ValueError, match="at least one problem"):
            sign_flip_test(strata)

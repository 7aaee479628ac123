from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from graftrl.evaluation import intervals
from graftrl.evaluation.intervals import bootstrap_interval, stratified_bootstrap_interval, wilson_interval


def test_the_wilson_interval_of_two_of_ten_is_the_textbooks():
    # z = 1.959964: middle (0.2 + z^2/20) / (1 + z^2/10), half z / (1 + z^2/10) * sqrt(0.016 + z^2/400)
    share, low, high = wilson_interval(2, 10)
    assert share == 0.2
    assert low == pytest.approx(0.0566822, abs=1e-6) and high == pytest.approx(0.5098375, abs=1e-6)


def test_no_success_and_no_failure_have_an_interval_that_ends_at_the_range():
    _, low, high = wilson_interval(0, 20)
    z2 = 1.959964**2
    assert low == 0.0 and high == pytest.approx(z2 / (20 + z2), abs=1e-6)
    assert wilson_interval(20, 20)[1:] == (pytest.approx(20 / (20 + z2), abs=1e-6), 1.0)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_bounds_are_scipys(counts):
    k, n = counts
    expected = stats.binomtest(k, n).proportion_ci(method="wilson")
    share, low, high = wilson_interval(k, n)
    assert 0.0 <= low <= share <= high <= 1.0
    assert math.isclose(low, expected.low, abs_tol=1e-9) and math.isclose(high, expected.high, abs_tol=1e-9)


@pytest.mark.parametrize("counts", [(0, 0), (3, 2), (-1, 4)])
def test_impossible_counts_are_refused(counts):
    with pytest.raises(ValueError, match="successes in"):
        wilson_interval(*counts)


def test_a_bootstrap_interval_of_ones_and_zeros_is_the_binomials():
    """Resampling 40 problems of which 10 are solved draws from Binomial(40, 1/4) / 40."""
    mean, low, high = bootstrap_interval([1.0] * 10 + [0.0] * 30, resamples=40_000)
    assert mean == 0.25
    assert low == pytest.approx(stats.binom.ppf(0.025, 40, 0.25) / 40, abs=0.026)
    assert high == pytest.approx(stats.binom.ppf(0.975, 40, 0.25) / 40, abs=0.026)


def test_a_score_is_the_unweighted_mean_and_resamples_each_benchmark_by_itself():
    small, large = [0.0, 1.0], [0.5] * 50
    mean, low, high = stratified_bootstrap_interval([small, large])
    assert mean == 0.5  # not the mean over 52 problems, which is the same only by chance of this data
    assert stratified_bootstrap_interval([[1.0, 1.0], [0.0] * 98])[0] == 0.5
    assert (low, high) == (0.25, 0.75)  # a quarter of the draws takes the failed problem twice, a quarter the other


def test_one_stratum_is_the_plain_interval_and_blocks_of_draws_change_nothing(monkeypatch):
    scores = np.random.default_rng(0).random(37).tolist()
    expected = bootstrap_interval(scores)
    assert stratified_bootstrap_interval([scores]) == expected
    monkeypatch.setattr(intervals, "_DRAWN_AT_ONCE", 100)
    assert bootstrap_interval(scores) == expected


@pytest.mark.parametrize("strata", [[], [[]], [[0.5], []]])
def test_no_problem_has_no_interval(strata):
    with pytest.raises(ValueError, match="at least one problem"):
        stratified_bootstrap_interval(strata)

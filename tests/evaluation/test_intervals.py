from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from graftrl.evaluation.intervals import wilson_interval


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

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from graftrl.evaluation.significance import holm, paired_t_test


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

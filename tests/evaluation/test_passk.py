"""pass@k against enumeration, and its unbiasedness."""

from itertools import combinations
from math import comb

import pytest

from graftrl.evaluation.passk import pass_at_k


@pytest.mark.parametrize(("k", "expected"), [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)])
def test_one_right_answer_of_four(k, expected):
    assert pass_at_k(4, 1, k) == expected


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_equals_the_share_of_draws_that_hold_a_right_answer(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            draws = list(combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
def test_expectation_over_samples_is_the_chance_that_k_tries_succeed(k, rate):
    n = 8
    expectation = sum(comb(n, c) * rate**c * (1 - rate) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert expectation == pytest.approx(1 - (1 - rate) ** k, rel=1e-12)


def test_one_try_is_the_mean_correctness():
    assert [pass_at_k(8, c, 1) for c in range(9)] == pytest.approx([c / 8 for c in range(9)], abs=1e-15)


def test_grows_with_right_answers_and_with_tries():
    for c in range(8):
        assert all(pass_at_k(8, c, k) <= pass_at_k(8, c + 1, k) for k in range(1, 9))
        assert all(pass_at_k(8, c, k) <= pass_at_k(8, c, k + 1) for k in range(1, 8))


def test_many_samples_do_not_overflow():
    assert pass_at_k(100_000, 1, 1000) == pytest.approx(0.01, rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5), (0, 0, 1)])
def test_impossible_counts_are_refused(n, c, k):
    with pytest.raises(ValueError, match=r"c = |k = "):
        pass_at_k(n, c, k)

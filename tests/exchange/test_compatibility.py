"""The compatibility score against its definition, and the gate's behaviour at its edges."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftrl.exchange import (
    compatibility_score,
    compatibility_scores,
    compatibility_weight,
    compatibility_weights,
)

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

logprob = st.floats(-20, 0, width=32)
row = st.lists(logprob, min_size=1, max_size=12)
score = st.floats(0, 1e6)


def reference_score(receiver, source):
    return math.exp(math.fsum(receiver) / len(receiver) - math.fsum(source) / len(source))


def as_rows(rows):
    return [np.array(row, np.float32) for row in rows]


# Scores


@given(st.lists(st.tuples(row, row), max_size=8))
def test_batch_of_ragged_rows_equals_each_row_alone_and_the_definition(pairs):
    receiver, source = as_rows([r for r, _ in pairs]), as_rows([s for _, s in pairs])
    scores = compatibility_scores(receiver, source)
    assert scores.dtype == np.float64
    assert scores == pytest.approx([reference_score(r, s) for r, s in pairs], rel=1e-12)
    assert list(scores) == [compatibility_score(r, s) for r, s in zip(receiver, source, strict=True)]


def test_score_compares_means_so_the_number_of_tokens_does_not_matter():
    assert compatibility_score([-0.5] * 3, [-0.5] * 7) == pytest.approx(1.0, rel=1e-15)
    assert compatibility_score([-1.0, -2.0, -3.0], [-1.0]) == pytest.approx(math.exp(-1), rel=1e-15)


@given(row, row, st.floats(-3, 3))
def test_shifting_the_receiver_scales_the_score(receiver, source, shift):
    moved = np.array(receiver) + shift
    expected = compatibility_score(receiver, source) * math.exp(shift)
    assert compatibility_score(moved, source) == pytest.approx(expected, rel=1e-9)


def test_long_float32_rows_are_summed_without_losing_digits():
    tokens = np.full(200_000, -0.1, np.float32)
    assert compatibility_score(tokens, [0.0]) == pytest.approx(math.exp(float(np.float32(-0.1))), rel=1e-12)


@pytest.mark.parametrize("spoiled", [[], [math.nan], [-math.inf], [-1.0, -math.inf], [-1.0, math.nan], [math.inf]])
@pytest.mark.parametrize("side", ["receiver", "source"])
def test_row_without_a_finite_mean_has_no_score_and_no_weight_and_leaves_its_neighbours_alone(spoiled, side):
    whole = as_rows([[-1.0], [-1.0, -2.0], [-3.0]])
    holed = [whole[0], np.array(spoiled, np.float32), whole[2]]
    scores = compatibility_scores(holed, whole) if side == "receiver" else compatibility_scores(whole, holed)
    assert list(np.isnan(scores)) == [False, True, False]
    for floor in (True, False):
        assert list(compatibility_weights(scores, floor=floor)) == [1.0, 0.0, 1.0]


def test_batch_of_many_responses_keeps_each_row_apart():
    lengths = np.arange(40_000) % 5
    rows = [np.full(length, -(i % 7), np.float32) for i, length in enumerate(lengths)]
    scores = compatibility_scores(rows, as_rows([[0.0]]) * len(rows))
    np.testing.assert_allclose(scores, np.where(lengths > 0, np.exp(-(np.arange(40_000) % 7)), np.nan), rtol=1e-15)


def test_nothing_to_score_gives_nothing():
    assert compatibility_scores([], []).shape == (0,)
    assert compatibility_weights(np.array([])).shape == (0,)
    assert np.isnan(compatibility_scores(as_rows([[], []]), as_rows([[], []]))).all()


def test_rows_of_one_side_without_the_other_are_refused():
    with pytest.raises(ValueError, match="2 receiver rows against 1 source rows"):
        compatibility_scores(as_rows([[-1.0], [-1.0]]), as_rows([[-1.0]]))


def test_scalar_score_refuses_a_batch():
    with pytest.raises(ValueError, match="1-D"):
        compatibility_score(np.zeros((2, 3)), np.zeros(3))


# Weights


def test_receiver_that_finds_a_response_slightly_less_likely_than_its_source_weighs_it_by_the_score():
    score = compatibility_score([-0.6, -0.6], [-0.5])
    assert score == pytest.approx(0.904837, abs=5e-7)
    assert compatibility_weight(score) == score


def test_receiver_that_finds_a_response_more_likely_than_its_source_gives_full_weight():
    score = compatibility_score([-0.5], [-1.0])
    assert score == pytest.approx(1.648721, abs=5e-7)
    assert compatibility_weight(score) == 1.0


def test_score_at_the_threshold_is_dropped_and_the_next_float_above_is_kept():
    assert compatibility_weight(0.8) == 0.0
    assert compatibility_weight(compatibility_score([math.log(0.8)], [0.0])) == 0.0
    above = np.nextafter(0.8, 1)
    assert compatibility_weight(above) == above


def test_without_the_floor_every_score_counts_up_to_one():
    scores = np.array([0.0, 0.1, 0.8, 1.0, 3.0, np.inf, np.nan])
    assert list(compatibility_weights(scores, floor=False)) == [0.0, 0.1, 0.8, 1.0, 1.0, 1.0, 0.0]


def test_score_that_overflows_has_full_weight():
    score = compatibility_score([0.0], [-1000.0])
    assert score == math.inf
    assert compatibility_weight(score) == 1.0


@given(st.lists(score | st.just(math.nan), max_size=20), st.floats(0, 2), st.booleans())
def test_weights_follow_the_definition_and_are_the_same_one_by_one(scores, threshold, floor):
    weights = compatibility_weights(np.array(scores), threshold, floor=floor)
    expected = [min(s, 1.0) if s > threshold or (not floor and s >= 0) else 0.0 for s in scores]
    assert list(weights) == expected
    assert list(weights) == [compatibility_weight(s, threshold, floor=floor) for s in scores]


@given(score, score, st.floats(0, 2), st.booleans())
def test_weight_never_falls_as_the_score_rises(one, other, threshold, floor):
    low, high = sorted([one, other])
    weights = [compatibility_weight(s, threshold, floor=floor) for s in (low, high)]
    assert 0.0 <= weights[0] <= weights[1] <= 1.0


@pytest.mark.parametrize("threshold", [-0.1, math.nan])
def test_threshold_that_is_no_non_negative_number_is_refused(threshold):
    with pytest.raises(ValueError, match="threshold"):
        compatibility_weights(np.array([1.0]), threshold)

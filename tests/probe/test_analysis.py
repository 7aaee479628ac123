from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftrl.evaluation.intervals import Estimate
from graftrl.evaluation.passk import powers_up_to
from graftrl.probe.analysis import (
    PeerResponses,
    admit,
    compatibility,
    directions,
    joint_counts,
    pass_estimates,
    per_step,
    summarize_model,
    winnable,
)

# n = 4. A fails 1, 2 and 5; B fails 3 and 5.
SUCCESSES = {
    "A": {"1": 0, "2": 0, "3": 2, "4": 4, "5": 0},
    "B": {"1": 1, "2": 4, "3": 0, "4": 4, "5": 0},
}


def responses(scores: list[float], right: list[bool], groups: list[int], **rejected: int) -> PeerResponses:
    return PeerResponses(np.array(scores), np.array(right, dtype=bool), np.array(groups), rejected)


def test_pass_at_k_of_one_right_response_in_four():
    assert pass_estimates([1, 1, 1], 4) == {
        1: Estimate(0.25, 0.25, 0.25),
        2: Estimate(0.5, 0.5, 0.5),
        4: Estimate(1.0, 1.0, 1.0),
    }


def test_the_interval_over_prompts_holds_the_mean_and_has_the_bootstraps_width():
    estimate = pass_estimates([0] * 50 + [4] * 50, 4)[1]
    assert estimate.value == 0.5
    # a mean of 100 coins has a standard deviation of 0.05: 1.96 of them to either side
    assert estimate.low == pytest.approx(0.402, abs=0.015) and estimate.high == pytest.approx(0.598, abs=0.015)


@pytest.mark.parametrize(("n", "expected"), [(2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])])
def test_k_runs_over_powers_of_two_and_n(n, expected):
    assert powers_up_to(n) == expected


def test_a_models_summary_counts_prompts_by_their_successes_and_responses_by_their_length():
    tokens = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 40])
    truncated = tokens == 40
    summary = summarize_model([0, 0, 2, 4, 0], 4, tokens, truncated)
    assert (summary.prompts, summary.all_fail, summary.mixed, summary.all_success) == (5, 0.6, 0.2, 0.2)
    assert summary.pass_at[1].value == pytest.approx((0.5 + 1) / 5)
    assert summary.pass_at[4].value == pytest.approx(2 / 5)
    assert (summary.tokens_mean, summary.tokens_median, summary.truncated) == (11.5, 10.5, 0.05)
    assert summary.tokens_p95 == pytest.approx(19 + 0.05 * 21)  # position 18.05 of 0..19


def test_what_one_model_has_for_another_by_hand():
    b_to_a, a_to_b = sorted(directions(SUCCESSES, 4, [2], None, [0.8], seed=0), key=lambda d: d.receiver)
    assert (a_to_b.name, b_to_a.name) == ("A->B", "B->A")
    # A fails 1, 2, 5; B solves 1 in part and 2 every time
    assert (b_to_a.all_fail, b_to_a.solved, b_to_a.always_solved, b_to_a.candidates) == (3, 2, 1, 1)
    assert b_to_a.solved_share is not None and b_to_a.solved_share.value == pytest.approx(2 / 3)
    assert b_to_a.solved_share.low < 2 / 3 < b_to_a.solved_share.high
    # B fails 3, 5; A solves 3 in part
    assert (a_to_b.all_fail, a_to_b.solved, a_to_b.always_solved, a_to_b.candidates) == (2, 1, 0, 1)
    assert a_to_b.selected == b_to_a.selected == 1
    assert a_to_b.compatibility is None


def test_no_failed_prompt_has_no_share():
    (direction, _) = directions({"A": {"1": 1}, "B": {"1": 2}}, 4, [2], None, [0.8], seed=0)
    assert direction.all_fail == 0 and direction.solved_share is None


def test_winnable_prompts_are_counted_once_however_many_peers_solve_them():
    three = {**SUCCESSES, "C": {"1": 3, "2": 0, "3": 4, "4": 0, "5": 0}}
    assert winnable(SUCCESSES) == {"A": 2, "B": 1}
    assert winnable(three) == {"A": 2, "B": 1, "C": 2}


def test_joint_counts_put_the_first_model_in_rows():
    table = joint_counts(SUCCESSES["A"], SUCCESSES["B"], 4)
    expected = np.zeros((5, 5), dtype=int)
    expected[0, 1] = expected[0, 4] = expected[2, 0] = expected[4, 4] = expected[0, 0] = 1
    assert (table == expected).all()


def test_a_step_of_prompts_that_only_one_side_can_give_exchanges_nothing_when_balanced():
    steps = per_step({"A": {"1": 0}, "B": {"1": 2}}, 4, 16, seed=0)
    assert steps["B", "A"].candidates == Estimate(16.0, 16.0, 16.0)
    assert steps["B", "A"].selected == Estimate(0.0, 0.0, 0.0)
    assert steps["A", "B"].candidates == Estimate(0.0, 0.0, 0.0)


def test_steps_exchange_their_share_of_candidates_and_never_more_than_these():
    successes = {
        "A": {i: 0 if i < 30 else 2 for i in range(100)},
        "B": {i: 2 if i < 80 else 0 for i in range(100)},
    }
    steps = per_step(successes, 4, 50, seed=1)
    # B->A: 30 % of the prompts; a step's count is binomial(50, 0.3), its mean over 300 steps within 4 standard errors
    assert steps["B", "A"].candidates.value == pytest.approx(15, abs=4 * np.sqrt(50 * 0.3 * 0.7 / 300))
    assert steps["A", "B"].candidates.value == pytest.approx(10, abs=4 * np.sqrt(50 * 0.2 * 0.8 / 300))
    for step in steps.values():
        assert step.selected.value <= step.candidates.value
        assert step.selected.low <= step.selected.value <= step.selected.high
    # all ties: whoever has the fewer candidates decides only whether anything moves at all
    assert steps["B", "A"].selected.value == pytest.approx(steps["B", "A"].candidates.value, abs=0.2)


def test_steps_are_the_same_for_the_same_seed():
    assert per_step(SUCCESSES, 4, 8, seed=3) == per_step(SUCCESSES, 4, 8, seed=3)


def test_the_gate_is_strict_and_rejected_responses_count_as_not_admitted():
    given = responses([0.8, 0.9, float("nan"), 0.85, 0.2], [True, True, True, False, False], [0, 0, 1, 1, 1], long=1)
    at = admit(given, 0.8)
    assert (at.successes, at.failures, at.groups) == (1, 1, 1)
    assert at.success_share == pytest.approx(1 / 3) and at.failure_share == 0.5
    everything = admit(given, 0.0)
    assert (everything.successes, everything.failures, everything.groups) == (2, 2, 1)


def test_no_response_of_a_kind_has_no_share():
    assert admit(responses([0.9], [True], [0]), 0.5).failure_share is None
    assert admit(responses([0.9], [False], [0]), 0.5).success_share is None


@pytest.mark.parametrize(
    ("right", "negative"),
    [([0.2, 0.2, 0.9, 0.9], False), ([0.2, 0.2, 0.2, 0.9], True), ([0.2, 0.2, 0.2, 0.2], True)],
)
def test_transfer_is_negative_only_when_failures_pass_twice_as_often(right, negative):
    # failures pass in 3 of 4: half of that is 0.375
    given = responses([*right, 0.9, 0.9, 0.9, 0.2], [True] * 4 + [False] * 4, [0] * 8)
    assert admit(given, 0.8).negative_only is negative


def test_a_gate_that_nothing_passes_is_not_negative():
    assert not admit(responses([0.1, 0.1], [True, False], [0, 0]), 0.8).negative_only


def test_compatibility_by_hand():
    scores = [1.0, 0.5, float("nan"), float("nan"), 2.5]
    c = compatibility(responses(scores, [True, True, True, False, False], [4, 4, 7, 7, 7], long=1), [0.6])
    assert (c.groups, c.successes, c.failures, c.rejected, c.not_finite) == (2, 3, 2, {"long": 1}, 1)
    assert c.success_quantiles == pytest.approx((0.55, 0.75, 0.95)) and c.failure_quantiles == (2.5, 2.5, 2.5)
    assert sum(c.success_histogram) == 2 and c.success_histogram[10] == 1 and c.success_histogram[20] == 1
    assert c.failure_histogram[-1] == 1  # the last bin holds what lies above
    assert c.at(0.6).success_share == pytest.approx(1 / 3)
    with pytest.raises(KeyError):
        c.at(0.7)


@given(
    st.lists(st.tuples(st.floats(0, 3) | st.just(float("nan")), st.booleans(), st.integers(0, 5)), min_size=1),
    st.lists(st.floats(0, 2), min_size=2, max_size=5).map(sorted),
)
def test_a_higher_threshold_never_admits_more(rows, thresholds):
    scores, right, groups = zip(*rows, strict=True)
    admitted = [admit(responses(list(scores), list(right), list(groups)), t) for t in thresholds]
    for lower, higher in itertools.pairwise(admitted):
        assert higher.successes <= lower.successes and higher.failures <= lower.failures
        assert higher.groups <= lower.groups <= lower.successes

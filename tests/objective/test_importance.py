"""The correction for a sampler that is not the trainer, against hand-computed values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftrl.objective.importance import Gap, logprob_gap, truncated_importance_weights

LOGPROBS = st.floats(-1000, 0, width=32)


def f32(*values):
    return np.array(values, np.float32)


def test_the_gap_is_over_all_tokens_of_all_responses():
    gap = logprob_gap([f32(-1.0, -2.0, -3.0), f32(-4.0)], [f32(-1.5, -2.0, -3.25), f32(-3.75)])
    assert gap == Gap(mean=pytest.approx((0.5 + 0 + 0.25 + 0.25) / 4), largest=pytest.approx(0.5))


def test_no_tokens_no_gap_but_nan_stays_visible():
    assert logprob_gap([], []) == Gap(0.0, 0.0)
    assert np.isnan(logprob_gap([f32(np.nan, -1)], [f32(-1, -1)]).mean)


def test_weights_are_ratios_up_to_the_cap():
    trainer, sampler = f32(np.log(0.5), np.log(0.2), np.log(0.9)), f32(np.log(0.25), np.log(0.4), np.log(0.1))
    np.testing.assert_allclose(truncated_importance_weights(trainer, sampler, 3.0), [2.0, 0.5, 3.0], rtol=1e-6)


@given(st.lists(st.tuples(LOGPROBS, LOGPROBS), min_size=1, max_size=20), st.floats(0.1, 10))
def test_weights_stay_in_bounds_and_equal_the_plain_ratio_below_the_cap(pairs, cap):
    trainer, sampler = (np.array(column, np.float32) for column in zip(*pairs, strict=True))
    weights = truncated_importance_weights(trainer, sampler, cap)
    assert weights.dtype == np.float32 and np.isfinite(weights).all()
    assert (weights >= 0).all() and (weights <= cap * (1 + 1e-6)).all()
    difference = trainer.astype(np.float64) - sampler
    below = difference < np.log(cap)
    np.testing.assert_allclose(weights[below], np.exp(difference[below]), rtol=1e-6, atol=1e-37)


def test_equal_log_probabilities_weigh_exactly_one():
    assert truncated_importance_weights(f32(-3.3, -0.1), f32(-3.3, -0.1), 2.0).tolist() == [1.0, 1.0]


def test_a_cap_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="must be positive"):
        truncated_importance_weights(f32(0), f32(0), 0.0)

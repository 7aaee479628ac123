"""Own rows whose sampler was not the trainer: exact log-probabilities, the gap, truncated importance sampling."""

import numpy as np
import pytest

from graftrl.rollout import Row
from graftrl.training import loop
from graftrl.training.loop import rescore, train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder


def row(old, advantages):
    old = None if old is None else np.array(old, np.float32)
    return Row("p", np.arange(2), np.arange(3), advantages, "own", "m", old_logprobs=old)


FRESH = [np.array([-1.0, -2.0, -3.0], np.float32), np.array([-0.5, -0.5, -0.5], np.float32)]


def test_the_trainers_log_probabilities_take_the_samplers_place_and_the_gap_is_told():
    rows = [row([-1.5, -2.0, -3.0], 2.0), row([-0.5, -0.5, -1.5], -1.0)]
    found = rescore(rows, FRESH, None)
    assert found == {"sampler_gap_mean": pytest.approx(1.5 / 6), "sampler_gap_max": pytest.approx(1.0)}
    assert [r.old_logprobs.tolist() for r in rows] == [f.tolist() for f in FRESH]
    assert [r.advantages for r in rows] == [2.0, -1.0]


def test_importance_weights_are_multiplied_into_the_advantages_token_by_token():
    rows = [row([-1.5, -2.0, -3.0], 2.0), row([-0.5, -0.5, -1.5], np.array([1, 2, 3], np.float32))]
    found = rescore(rows, FRESH, 2.0)
    np.testing.assert_allclose(rows[0].advantages, [2 * np.exp(0.5), 2, 2], rtol=1e-6)
    np.testing.assert_allclose(rows[1].advantages, [1, 2, 6], rtol=1e-6)  # e^1 is cut at 2
    assert found["importance_capped"] == pytest.approx(1 / 6)
    assert found["importance_weight_mean"] == pytest.approx((np.exp(0.5) + 4 + 2) / 6)


def test_a_row_that_nobody_scored_yet_has_neither_gap_nor_weight():
    rows = [row(None, 2.0)]
    assert rescore(rows, FRESH[:1], 2.0) == {"sampler_gap_mean": 0.0, "sampler_gap_max": 0.0}
    assert rows[0].advantages == 2.0 and rows[0].old_logprobs.tolist() == FRESH[0].tolist()


@pytest.mark.parametrize("cap", [None, 1.5])
def test_a_sampler_half_a_nat_off_shows_in_the_metrics_and_is_corrected_on_demand(
    make_recipe, new_run, monkeypatch, cap
):
    original = loop.collect_groups

    def another_sampler(*args):
        groups = original(*args)
        for group in groups["A"]:
            for response in group.responses:
                response.logprobs -= 0.5
        return groups

    monkeypatch.setattr(loop, "collect_groups", another_sampler)
    training = {
        "steps": 1, "prompts_per_step": 8, "group_size": 4, "minibatch_prompts": 8, "importance_cap": cap
    }  # fmt: skip
    run = RunFolder.create(new_run, make_recipe("grpo", training=training))
    train(run, run.recipe(), Silent())
    a, b = (run.read_metrics()[0]["models"][name] for name in "AB")
    assert a["sampler_gap_mean"] == pytest.approx(0.5, abs=1e-3) and a["clipped_tokens"] == {"own": 0}
    assert a.get("importance_weight_mean") == (None if cap is None else pytest.approx(1.5))
    assert "sampler_gap_mean" not in b and "importance_weight_mean" not in b

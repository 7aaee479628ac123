"""Numbers of metrics.jsonl, computed again from what the run logged."""

import numpy as np
import polars as pl
import pytest

from graftrl.logs.rollouts import read_steps
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder


@pytest.fixture(scope="module")
def finished(make_recipe, tmp_path_factory):
    task = {
        "kind": "function",
        "prompts": "toy_task:prompts",
        "validation_prompts": "toy_task:prompts",
        "verifier": "toy_task:verify",
    }
    recipe = make_recipe("graft-no-floor", steps=3, task=task, evaluation={"every": 2, "before": False})
    run = RunFolder.create(tmp_path_factory.mktemp("metrics") / "run", recipe)
    train(run, recipe, Silent())
    return run.read_metrics(), read_steps(run.root / "rollouts").collect()


def test_metrics_of_rollouts_are_those_of_the_log(finished):
    lines, rollouts = finished
    for line in lines:
        for model, found in line["models"].items():
            own = rollouts.filter((pl.col("step") == line["step"]) & (pl.col("model") == model))
            k = own.group_by("prompt_id").agg((pl.col("reward") == 1.0).sum().alias("k"))["k"].to_numpy()
            logprobs = np.concatenate(own["logprobs"].to_list())
            lengths = own["token_ids"].list.len().to_numpy()
            assert found["groups"] == len(k) == 8
            assert found["reward_mean"] == pytest.approx(own["reward"].mean())
            shares = [(k == 0).mean(), (k == 4).mean(), ((k > 0) & (k < 4)).mean(), (k > 0).mean()]
            assert [found[name] for name in ("all_fail", "all_success", "mixed", "pass_at_n")] == pytest.approx(shares)
            assert found["entropy"] == pytest.approx(-logprobs.mean(), rel=1e-5)
            assert found["response_tokens_mean"] == pytest.approx(lengths.mean())
            assert found["truncated"] == pytest.approx((own["finish_reason"] == "length").mean())


def test_costs_add_up_over_steps(finished):
    lines, rollouts = finished
    sampled = trained = passed = 0
    for line in lines:
        sampled += rollouts.filter(pl.col("step") == line["step"])["token_ids"].list.len().sum()
        trained += sum(sum(m["trained_tokens"].values()) for m in line["models"].values())
        passed += sum(m["passed_tokens"] for m in line["models"].values())
        assert line["cost"] == {"sampled_tokens": sampled, "trained_tokens": trained, "passed_tokens": passed}


def test_times_leave_evaluation_out_of_the_sum(finished):
    lines, _ = finished
    assert ["evaluation" in line["phase_s"] for line in lines] == [False, True, True]  # every second step and the last
    wall, before = 0.0, 0
    for line in lines:
        wall += line["step_s"] - line["phase_s"].get("evaluation", 0.0)
        assert line["wall_s"] == pytest.approx(wall)
        fresh = line["cost"]["sampled_tokens"] - before
        assert line["sampled_tokens_per_s"] == pytest.approx(fresh / line["step_s"])
        before = line["cost"]["sampled_tokens"]

import json

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from graftrl.errors import ConfigError, DataError
from graftrl.logs.rollouts import ROLLOUT_SCHEMA, read_steps
from graftrl.objective import group_advantages
from graftrl.training import loop
from graftrl.training.loop import train
from graftrl.training.progress import Silent, Terminal
from graftrl.training.run_folder import RunFolder, TrainingState


def run_recipe(recipe, root, display=None):
    run = RunFolder.create(root, recipe)
    train(run, recipe, display or Silent())
    return run


def weights(run, step):
    return {name: load_file(run.checkpoints / f"step-{step:06d}" / name / "model.safetensors") for name in ("A", "B")}


def without_times(lines):
    timed = ("step_s", "wall_s", "phase_s", "sampled_tokens_per_s", "verification")
    return [{key: value for key, value in line.items() if key not in timed} for line in lines]


@pytest.fixture(scope="module")
def finished(make_recipe, tmp_path_factory):
    """An uninterrupted run of four steps; with eight of 24 prompts a step the epoch ends after three."""
    recipe = make_recipe("graft-no-floor", steps=4, checkpoint={"keep": 10})
    return recipe, run_recipe(recipe, tmp_path_factory.mktemp("finished") / "run")


def test_a_graft_run_trains_both_models_and_exchanges_groups(finished):
    recipe, run = finished
    lines = run.read_metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert sum(stats["admitted"] for line in lines for stats in line["exchange"].values()) > 0
    before = {name: load_file(f"{recipe.models[name].path}/model.safetensors") for name in ("A", "B")}
    after = weights(run, 4)
    for name in before:
        assert any(not torch.equal(before[name][key], after[name][key]) for key in before[name])


def test_generation_logprobs_are_found_exact_in_float32_and_serve_as_old_logprobs(finished):
    _, run = finished
    first, second = run.read_metrics()[:2]
    for name in ("A", "B"):
        assert 0 <= first["models"][name]["generation_gap"] <= 1e-4
        assert first["models"][name]["old_logprobs"] == "generation"
        assert second["models"][name]["generation_gap"] is None  # checked once


def test_the_first_minibatch_has_ratio_one_so_nothing_is_clipped(make_recipe, new_run):
    training = {"steps": 1, "prompts_per_step": 8, "group_size": 4, "minibatch_prompts": 8}
    run = run_recipe(make_recipe("grpo", training=training), new_run)
    model = run.read_metrics()[0]["models"]["A"]
    assert model["clipped_tokens"] == {"own": 0} and model["optimizer_steps"] == 1


def test_inexact_generation_logprobs_are_recomputed_so_ratios_start_at_one(make_recipe, new_run, monkeypatch):
    original = loop.collect_groups

    def another_sampler(*args):
        groups = original(*args)
        for group in groups["A"]:
            for response in group.responses:
                response.logprobs += 0.5  # as if drawn by another engine in another precision
        return groups

    monkeypatch.setattr(loop, "collect_groups", another_sampler)
    training = {"steps": 2, "prompts_per_step": 8, "group_size": 4, "minibatch_prompts": 8}
    run = run_recipe(make_recipe("grpo", training=training), new_run)
    for line in run.read_metrics():
        assert (
            line["models"]["A"]["old_logprobs"] == "recomputed" and line["models"]["B"]["old_logprobs"] == "generation"
        )
        assert line["models"]["A"]["clipped_tokens"] == {"own": 0}  # e^-0.5 would be far outside the clip range
    assert run.read_metrics()[0]["models"]["A"]["generation_gap"] == pytest.approx(0.5, abs=1e-3)


def test_the_end_says_where_the_time_went(make_recipe, new_run, capsys):
    run_recipe(make_recipe("graft", steps=2), new_run, Terminal())
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("time: ")
    assert all(phase in last for phase in ("sampling", "grading", "scoring", "exchange", "training", "logging"))


def test_every_response_is_logged_with_the_full_schema(finished):
    _, run = finished
    frame = read_steps(run.root / "rollouts").collect()
    assert frame.schema == pl.Schema(ROLLOUT_SCHEMA)
    assert len(frame) == 4 * 2 * 8 * 4  # steps, models, prompts, responses
    assert (frame["token_ids"].list.len() == frame["logprobs"].list.len()).all()
    rewards = frame.sort("step", "model", "prompt_id", "response_index")["reward"].to_numpy().reshape(-1, 4)
    advantages = frame.sort("step", "model", "prompt_id", "response_index")["advantage"].to_numpy().reshape(-1, 4)
    np.testing.assert_allclose(advantages, group_advantages(rewards).numpy(), rtol=1e-6)
    assert frame["policy_version"].to_list() == (frame["step"] - 1).to_list()


def test_models_see_the_same_prompts_and_an_epoch_repeats_none(finished):
    _, run = finished
    frame = read_steps(run.root / "rollouts", ["step", "model", "prompt_id"]).unique().collect()
    by_step = {(step, model): set(group["prompt_id"]) for (step, model), group in frame.group_by("step", "model")}
    assert all(by_step[step, "A"] == by_step[step, "B"] for step in (1, 2, 3, 4))
    epoch = [by_step[step, "A"] for step in (1, 2, 3)]
    assert len(set.union(*epoch)) == 24


def test_a_checkpoint_loads_with_from_pretrained(finished):
    _, run = finished
    folder = run.checkpoints / "step-000004" / "A"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer.encode("a1,2>")])
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))


@pytest.mark.parametrize("stop", [1, 2, 3])  # 3 is exactly the end of an epoch
def test_a_resumed_run_gives_the_numbers_of_an_uninterrupted_one(finished, new_run, monkeypatch, stop):
    recipe, whole = finished
    run = RunFolder.create(new_run, recipe)

    class StopAfter(Silent):
        def step(self, metrics):
            if metrics["step"] == stop:
                raise KeyboardInterrupt  # as abrupt as a kill: nothing after the checkpoint and its line runs

    with pytest.raises(KeyboardInterrupt):
        train(run, recipe, StopAfter())
    train(RunFolder.open(new_run), run.recipe(), Silent())
    assert without_times(run.read_metrics()) == without_times(whole.read_metrics())
    resumed, expected = weights(run, 4), weights(whole, 4)
    for name in expected:
        assert all(torch.equal(resumed[name][key], expected[name][key]) for key in expected[name])
    for step in (1, 2, 3, 4):
        assert pl.read_parquet(run.step_file("rollouts", step)).equals(
            pl.read_parquet(whole.step_file("rollouts", step))
        )


def test_a_finished_run_resumes_to_nothing(finished):
    _, run = finished
    before = run.metrics.read_bytes()
    state = train(RunFolder.open(run.root), run.recipe(), Silent())
    assert state.step == 4 and run.metrics.read_bytes() == before


def test_epochs_count_whole_batches_only(make_recipe):
    training = {"epochs": 2, "prompts_per_step": 10, "group_size": 4, "minibatch_prompts": 5}
    assert loop.prepare(make_recipe("grpo", training=training)).steps == 4  # 24 // 10 = 2 an epoch


def test_dynamic_sampling_trains_on_mixed_groups_only(make_recipe, new_run):
    run = run_recipe(make_recipe({"name": "dapo", "max_sampling_rounds": 3}, steps=2), new_run)
    for line in run.read_metrics():
        for model in line["models"].values():
            assert model["mixed"] == 1.0 and 0 < model["groups"] <= 8
    frame = read_steps(run.root / "rollouts").collect()
    assert frame.group_by("step", "model", "prompt_id").agg(pl.col("reward").n_unique())["reward"].to_list()


def test_dynamic_sampling_without_any_mixed_group_skips_the_update_and_goes_on(make_recipe, new_run):
    task = {"kind": "function", "prompts": "toy_task:prompts", "verifier": "toy_task:never"}
    run = run_recipe(make_recipe({"name": "dapo", "max_sampling_rounds": 2}, steps=2, task=task), new_run)
    lines = run.read_metrics()
    assert [line["models"]["A"]["groups"] for line in lines] == [0, 0]
    assert [line["models"]["A"]["optimizer_steps"] for line in lines] == [0, 0]
    assert lines[-1]["models"]["A"]["sampled_tokens"] == 0 and lines[-1]["cost"]["sampled_tokens"] > 0
    assert lines[-1]["epoch"] == pytest.approx(4 / 3)  # two rounds of a third of an epoch each step


def test_a_prompt_over_the_limit_is_left_out_and_counted(make_recipe):
    task = {"kind": "function", "prompts": "toy_task:one_long_prompt", "verifier": "toy_task:verify"}
    prepared = loop.prepare(make_recipe("grpo", task=task))
    assert len(prepared.train.prompts) == 24
    assert any("1 of 25 prompts" in note and "long" in note for note in prepared.notes)


def test_no_usable_prompt_and_too_few_prompts_are_refused(make_recipe):
    task = {"kind": "function", "prompts": "toy_task:nothing", "verifier": "toy_task:verify"}
    with pytest.raises(DataError, match="no prompts"):
        loop.prepare(make_recipe("grpo", task=task))
    with pytest.raises(DataError, match="max_prompt_tokens"):
        loop.prepare(make_recipe("grpo", sampling={"max_prompt_tokens": 2, "max_response_tokens": 6}))
    training = {"steps": 1, "prompts_per_step": 25, "group_size": 4, "minibatch_prompts": 4}
    with pytest.raises(ConfigError, match="only 24 usable"):
        loop.prepare(make_recipe("grpo", training=training))


def test_graft_refuses_partial_credit_in_one_line(make_recipe, new_run):
    task = {"kind": "function", "prompts": "toy_task:prompts", "verifier": "toy_task:half"}
    with pytest.raises(DataError, match="0 or 1"):
        run_recipe(make_recipe("graft", task=task), new_run)


def test_evaluation_marks_the_best_checkpoint_and_keeps_it(make_recipe, new_run):
    task = {
        "kind": "function",
        "prompts": "toy_task:prompts",
        "validation_prompts": "toy_task:prompts",
        "verifier": "toy_task:verify",
    }
    recipe = make_recipe("grpo", steps=5, task=task, evaluation={"every": 1, "samples": 2}, checkpoint={"keep": 1})
    run = run_recipe(recipe, new_run)
    lines = run.read_metrics()
    means = [np.mean([line["evaluation"][name]["pass_at_1"] for name in "AB"]) for line in lines]
    best = int(np.argmax(means)) + 1
    state = TrainingState(**json.loads((run.latest_checkpoint() / "state.json").read_text()))
    assert state.best_step == best and state.best_score == pytest.approx(max(means))
    assert run.checkpoint_steps() == sorted({best, 5}) and run.best_step() == best
    before = json.loads(run.step_file("evaluations", 0).read_text())["results"]["A"]
    assert (before["response_tokens_mean"], before["truncated"]) == (6.0, 1.0)  # an untrained model does not end


def test_own_rows_with_non_finite_logprobs_are_left_out_and_counted(make_recipe, new_run, monkeypatch):
    original = loop.collect_groups

    def poisoned(*args):
        groups = original(*args)
        groups["A"][0].responses[1].logprobs[0] = np.nan
        groups["A"][1].responses[0].logprobs[0] = -np.inf
        return groups

    monkeypatch.setattr(loop, "collect_groups", poisoned)
    run = run_recipe(make_recipe("grpo", steps=1), new_run)
    line = run.read_metrics()[0]["models"]
    assert (line["A"]["rows_not_finite"], line["B"]["rows_not_finite"]) == (2, 0)
    assert np.isfinite(line["A"]["loss"]) and line["A"]["old_logprobs"] == "generation"


def test_kl_to_the_reference_is_zero_in_the_first_minibatch_and_then_acts(make_recipe, new_run, tmp_path):
    plain = run_recipe(make_recipe("grpo", steps=2), new_run)
    anchored = run_recipe(make_recipe({"name": "grpo", "kl_coefficient": 5.0}, steps=2), tmp_path / "kl")
    first, second = weights(plain, 2), weights(anchored, 2)
    assert any(not torch.equal(first["A"][key], second["A"][key]) for key in first["A"])


def test_the_best_step_gets_a_checkpoint_even_between_two_regular_ones(make_recipe, new_run):
    task = {
        "kind": "function",
        "prompts": "toy_task:prompts",
        "validation_prompts": "toy_task:prompts",
        "verifier": "toy_task:verify",
    }
    run = run_recipe(
        make_recipe("grpo", steps=4, task=task, evaluation={"every": 1}, checkpoint={"every": 100}), new_run
    )
    state = json.loads((run.latest_checkpoint() / "state.json").read_text())
    assert state["best_step"] in run.checkpoint_steps() and 4 in run.checkpoint_steps()


def test_an_interrupt_after_the_last_look_at_it_waits_for_the_next_step(make_recipe, new_run):
    import os
    import signal

    class InterruptAfterSaving(Silent):
        def step(self, metrics):
            if metrics["step"] == 1:
                os.kill(os.getpid(), signal.SIGINT)

    run = run_recipe(make_recipe("grpo", steps=9, checkpoint={"every": 5}), new_run, InterruptAfterSaving())
    assert [line["step"] for line in run.read_metrics()] == [1, 2] and run.checkpoint_steps() == [2]


def test_trackers_get_every_number_of_a_step(make_recipe, new_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = run_recipe(make_recipe("graft", steps=2, trackers=["tensorboard"]), new_run)
    events = EventAccumulator(str(run.root / "tensorboard"))
    events.Reload()
    (first, second) = events.Scalars("models/A/reward_mean")
    lines = run.read_metrics()
    assert (first.step, second.step) == (1, 2)
    assert second.value == pytest.approx(lines[1]["models"]["A"]["reward_mean"])


def test_a_missing_tracker_package_is_named(make_recipe, new_run):
    with pytest.raises(ConfigError, match=r"pip install 'graftrl\[wandb\]'"):
        run_recipe(make_recipe("grpo", trackers=["wandb"]), new_run)

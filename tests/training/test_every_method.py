"""Every method and preset trains a tiny pair through the loop; their numbers are tested beside each method. Those with
scorers are in test_distillation.py."""

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from graftrl.methods import METHODS, PRESETS, build_method
from graftrl.methods.extensions import UsesScorers
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder

WITHOUT_SCORERS = [name for name in [*METHODS, *PRESETS] if not isinstance(build_method(name), UsesScorers)]


@pytest.mark.parametrize("name", WITHOUT_SCORERS)
def test_one_step(name, make_recipe, new_run):
    training = {"steps": 1, "prompts_per_step": 8, "group_size": 4, "minibatch_prompts": 4}
    # Half of this task's solution gives all of it away, and nothing would be left to learn.
    options = {"adaprefix": {"initial": 0.0}, "es": {"population": 3}}.get(name, {})
    recipe = make_recipe({"name": name, **options}, training=training)
    run = RunFolder.create(new_run, recipe)
    train(run, recipe, Silent())
    (line,) = run.read_metrics()
    assert run.recipe().build_method().settings == recipe.build_method().settings
    if name == "es":  # which has no gradient
        return
    for model in ("A", "B"):
        of_model = line["models"][model]
        assert of_model["optimizer_steps"] >= 1 and of_model["skipped_nonfinite"] == 0
        assert np.isfinite(of_model["loss"]) and of_model["grad_norm"] > 0


def test_scion_logs_its_damping_and_strength(make_recipe, new_run):
    recipe = make_recipe("scion", steps=2)
    run = RunFolder.create(new_run, recipe)
    train(run, recipe, Silent())
    line = run.read_metrics()[1]
    transferred = {model: line["models"][model]["trained_tokens"].get("sft", 0) for model in "AB"}
    assert sum(transferred.values()) > 0
    for model, tokens in transferred.items():
        means = line["models"][model]["token_means"]
        if tokens:
            assert 0 < means["damping"] <= 1 and 0 <= means["damped"] <= 1 and means["peer_loss"] > 0
        else:
            assert means == {}
    assert any(stats["advantage_mean"] is not None for stats in line["exchange"].values())


class StopAfter(Silent):
    def __init__(self, step):
        self.last = step

    def step(self, metrics):
        if metrics["step"] == self.last:
            raise KeyboardInterrupt


def weights(run, step, model="A"):
    return load_file(run.checkpoints / f"step-{step:06d}" / model / "model.safetensors")


def numbers(run):
    """Everything of the metrics but times."""
    return [(line["step"], line["models"], line["exchange"], line["cost"]) for line in run.read_metrics()]


ES = {"name": "es", "population": 3, "sigma": 0.05, "eta": 0.002}
ADAPREFIX = {"name": "adaprefix", "eta": 0.8, "withdraw_from": 0.9, "withdraw_to": 1.0}


@pytest.mark.parametrize("method", [{"name": "replay", "max_age": 2}, ADAPREFIX, ES], ids=lambda m: m["name"])
def test_methods_that_look_back_resume_to_the_numbers_of_an_uninterrupted_run(method, make_recipe, tmp_path):
    recipe = make_recipe(method, steps=5)
    whole = RunFolder.create(tmp_path / "whole", recipe)
    train(whole, recipe, Silent())
    run = RunFolder.create(tmp_path / "stopped", recipe)
    for stop in (2, 4):
        with pytest.raises(KeyboardInterrupt):
            train(run, recipe, StopAfter(stop))
    train(RunFolder.open(run.root), run.recipe(), Silent())
    assert numbers(run) == numbers(whole) and len(numbers(run)) == 5
    one, other = weights(run, 5), weights(whole, 5)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_replay_trains_on_responses_of_earlier_steps_only(make_recipe, new_run):
    recipe = make_recipe({"name": "replay", "max_age": 2}, steps=4)
    run = RunFolder.create(new_run, recipe)
    train(run, recipe, Silent())
    lines = run.read_metrics()
    seen = [line["models"]["A"]["method"] for line in lines]
    assert [s["stored"] for s in seen] == [0, 32, 64, 64] and [s["replayed"] for s in seen] == [0, 16, 16, 16]
    assert "replay" not in lines[0]["models"]["A"]["trained_tokens"]
    assert all(line["models"]["A"]["trained_tokens"]["replay"] > 0 for line in lines[1:])
    assert [line["models"]["A"]["optimizer_steps"] for line in lines] == [2] * 4  # the fresh minibatches


def test_replay_goes_on_where_dynamic_sampling_kept_no_group(make_recipe, new_run):
    task = {"kind": "function", "prompts": "toy_task:prompts", "verifier": "toy_task:never"}
    method = {"name": "replay", "dynamic_sampling": True, "max_sampling_rounds": 1}
    recipe = make_recipe(method, steps=2, task=task)
    run = RunFolder.create(new_run, recipe)
    train(run, recipe, Silent())
    assert [line["models"]["A"]["method"]["stored"] for line in run.read_metrics()] == [0, 0]


def test_adaprefix_begins_answers_logs_them_and_withdraws_the_help(make_recipe, new_run):
    recipe = make_recipe({**ADAPREFIX, "initial": 1.0, "steer_by": "family", "withdraw_from": 0.2}, steps=4)
    run = RunFolder.create(new_run, recipe)
    state = train(run, recipe, Silent())
    lines = run.read_metrics()
    shares = [line["models"]["A"]["method"]["prefix_share"] for line in lines]
    assert shares[0] == 1.0 and shares[-1] < shares[0]
    # The whole solution was given: whatever the models add, the graded answer begins with the right digit.
    assert lines[0]["models"]["A"]["reward_mean"] == lines[0]["models"]["B"]["reward_mean"] == 1.0
    frame = pl.read_parquet(run.step_file("rollouts", 1))
    begun = frame["messages"].list.last().struct.field("role")
    assert (begun == "assistant").all() and frame["messages"].list.len().unique().to_list() == [2]
    assert set(state.memory) == {"A", "B"} and set(state.memory["A"]) == set("abcdefghijkl")


def test_es_moves_the_weights_by_what_the_members_earned(make_recipe, new_run):
    recipe = make_recipe(ES, steps=1)
    run = RunFolder.create(new_run, recipe)
    train(run, recipe, Silent())
    (line,) = run.read_metrics()
    of_model = line["models"]["A"]
    assert of_model["optimizer_steps"] == 0 and of_model["trained_tokens"] == {}
    assert of_model["method"]["fitness_deviation"] > 0
    assert of_model["method"]["fitness_mean"] == pytest.approx(of_model["reward_mean"])
    before, after = load_file(f"{recipe.models['A'].path}/model.safetensors"), weights(run, 1)
    moved = torch.cat([(after[key] - before[key]).flatten() for key in before])
    # eta / (N sigma) * sqrt(sum z^2) = 0.002 / (3 * 0.05) * sqrt(2)
    assert float(moved.std()) == pytest.approx(0.002 / 0.15 * 2**0.5, rel=0.02)
    frame = pl.read_parquet(run.step_file("rollouts", 1))
    assert len(frame) == 2 * 8 * 4 * 3  # models, prompts, responses, members
    assert frame.filter(model="A").group_by("prompt_id").len()["len"].to_list() == [12] * 8


def test_es_leaves_the_weights_alone_where_all_members_earn_the_same(make_recipe, new_run):
    task = {"kind": "function", "prompts": "toy_task:prompts", "verifier": "toy_task:never"}
    recipe = make_recipe(ES, steps=2, task=task)
    run = RunFolder.create(new_run, recipe)
    train(run, recipe, Silent())
    before, after = load_file(f"{recipe.models['A'].path}/model.safetensors"), weights(run, 2)
    assert all(torch.equal(before[key], after[key]) for key in before)  # bit for bit, after six perturbations

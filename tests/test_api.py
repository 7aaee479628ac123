"""graftrl from Python: training with overrides and callbacks, and a run read as tables."""

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import yaml
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

import graftrl
from graftrl.config import parse_recipe
from graftrl.errors import ConfigError, DataError, RunError
from graftrl.logs.rollouts import ROLLOUT_SCHEMA

TOY = Path(__file__).parent / "training"


@pytest.fixture(scope="session", autouse=True)
def importable_task():
    sys.path.insert(0, str(TOY))
    yield
    sys.path.remove(str(TOY))


@pytest.fixture(scope="session")
def recipe(pair):
    return {
        "name": "toy",
        "threads": 1,
        "method": "graft-no-gate",
        "models": {name: {"path": path, "optimizer": {"lr": 0.01}} for name, path in pair.items()},
        "task": {
            "kind": "function",
            "prompts": "toy_task:prompts",
            "validation_prompts": "toy_task:prompts",
            "verifier": "toy_task:coin",
        },
        "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 6},
        "training": {"steps": 3, "prompts_per_step": 8, "group_size": 4, "minibatch_prompts": 4},
        "evaluation": {"every": 2, "prompts": 8},
    }


class Watcher(graftrl.Callback):
    def __init__(self):
        self.seen = []

    def on_step(self, metrics):
        self.seen.append(("step", metrics["step"], sorted(metrics["models"])))

    def on_evaluation(self, step, results):
        self.seen.append(("evaluation", step, sorted(results)))


@pytest.fixture(scope="session")
def trained(recipe, tmp_path_factory):
    watcher = Watcher()
    run = graftrl.train(recipe, run=tmp_path_factory.mktemp("api") / "run", callbacks=[watcher])
    return run, watcher


def test_importing_the_package_is_light():
    code = "import sys, graftrl; print(sorted({'torch', 'transformers', 'polars', 'pydantic'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    assert {"train", "Run", "resume", "Callback"} <= set(dir(graftrl))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = graftrl.trian


def test_callbacks_hear_of_every_step_and_evaluation_in_order(trained):
    _, watcher = trained
    models = ["A", "B"]
    assert watcher.seen == [
        ("evaluation", 0, models), ("step", 1, models), ("step", 2, models), ("evaluation", 2, models),
        ("step", 3, models), ("evaluation", 3, models),
    ]  # fmt: skip


def test_a_callback_may_have_one_part_only(recipe, tmp_path):
    class StepsOnly(graftrl.Callback):
        steps = 0

        def on_step(self, metrics):
            self.steps += 1

    callback = StepsOnly()
    graftrl.train(recipe, {"training.steps": 1}, run=tmp_path / "run", callbacks=[callback])
    assert callback.steps == 1


def test_training_is_silent_unless_asked_and_leaves_transformers_as_talkative_as_it_was(
    recipe, tmp_path, capsys, trained
):
    before = transformers_logging.get_verbosity()
    graftrl.train(recipe, ["training.steps=1"], run=tmp_path / "silent")
    assert capsys.readouterr().out == ""
    graftrl.train(recipe, ["training.steps=1"], run=tmp_path / "shown", display=True)
    assert "toy: graft on A, B, 1 steps" in capsys.readouterr().out
    assert transformers_logging.get_verbosity() == before


def test_a_run_is_tables(trained):
    run, _ = trained
    assert run.last_step == 3 and run.models == ["A", "B"] and run.config.method.name == "graft"
    assert "graft on A, B, step 3" in repr(run)
    metrics = run.metrics
    assert metrics["step"].to_list() == [1, 2, 3]
    assert metrics["models/A/reward_mean"].is_between(0, 1).all()
    rollouts = run.rollouts(2)
    assert rollouts.schema == pl.Schema(ROLLOUT_SCHEMA) and len(rollouts) == 2 * 8 * 4
    assert run.all_rollouts.select(pl.len()).collect().item() == 3 * len(rollouts)
    exchange = run.exchange
    assert len(exchange) == metrics.select(pl.sum_horizontal("^exchange/.*/responses$")).sum().item() > 0
    evaluations = run.evaluations
    assert evaluations.select("step", "model").rows() == [(s, m) for s in (0, 2, 3) for m in ("A", "B")]
    assert (evaluations["low"] <= evaluations["pass_at_1"]).all() and set(evaluations["problems"]) == {8}


def test_checkpoints_are_found(trained):
    run, _ = trained
    assert run.last_checkpoint == run.path / "checkpoints" / "step-000003"
    mean = run.evaluations.filter(pl.col("step") > 0).group_by("step").agg(pl.col("pass_at_1").mean()).sort("step")
    best = mean["step"][mean["pass_at_1"].arg_max()]
    assert run.best_checkpoint == run.checkpoint(best) and load_file(run.best_checkpoint / "A" / "model.safetensors")
    assert run.checkpoint(1) is None  # not kept


@pytest.mark.parametrize("given", ["mapping", "recipe", "path", "str"])
@pytest.mark.parametrize(
    "overrides", [{"training.steps": 1, "method.threshold": 0.3}, ["training.steps=1", "method.threshold=0.3"]]
)
def test_every_form_of_recipe_and_override_is_the_same_run(recipe, tmp_path, given, overrides, monkeypatch):
    from graftrl import api

    seen = []
    monkeypatch.setattr(api.loop, "train", lambda folder, recipe, display: seen.append(recipe))
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    forms = {"mapping": recipe, "recipe": parse_recipe(recipe, "test"), "path": file, "str": str(file)}
    before = yaml.safe_dump(recipe)
    graftrl.train(forms[given], overrides, run=tmp_path / "run")
    assert seen[0] == parse_recipe(
        {
            **recipe,
            "training": {**recipe["training"], "steps": 1},
            "method": {"name": "graft-no-gate", "threshold": 0.3},
        },
        "test",
    )
    assert yaml.safe_dump(recipe) == before


def test_an_exception_in_a_callback_loses_nothing_and_resume_goes_on(recipe, tmp_path, trained):
    class Stops(graftrl.Callback):
        def on_step(self, metrics):
            if metrics["step"] == 2:
                raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        graftrl.train(recipe, run=tmp_path / "run", callbacks=[Stops()])
    assert graftrl.Run(tmp_path / "run").last_step == 2
    watcher = Watcher()
    run = graftrl.resume(tmp_path / "run", callbacks=[watcher])
    assert [entry[1] for entry in watcher.seen if entry[0] == "step"] == [3]
    assert run.rollouts(3).equals(trained[0].rollouts(3))


def test_errors_are_the_classes_of_the_package(recipe, tmp_path, trained):
    run, _ = trained
    with pytest.raises(RunError, match="already holds a run"):
        graftrl.train(recipe, run=run.path)
    with pytest.raises(RunError, match="no run folder"):
        graftrl.Run(tmp_path)
    with pytest.raises(DataError, match="no rollouts of step 9; it has finished 3 steps"):
        run.rollouts(9)
    with pytest.raises(ConfigError, match="recipe: training"):
        graftrl.train(recipe, {"training.steps": 0})
    with pytest.raises(ConfigError, match="is a value, not a section"):
        graftrl.train(recipe, {"name.x": 1})


def test_a_run_that_has_not_finished_a_step_has_empty_tables(recipe, tmp_path):
    from graftrl.training.run_folder import RunFolder

    RunFolder.create(tmp_path / "run", parse_recipe(recipe, "test"))
    run = graftrl.Run(tmp_path / "run")
    assert run.last_step == 0 and run.last_checkpoint is None and run.best_checkpoint is None
    assert run.metrics.is_empty() and run.exchange.is_empty() and run.evaluations.is_empty()
    assert run.all_rollouts.collect().is_empty()

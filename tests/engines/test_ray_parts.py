"""Checkpoints in parts of a run on Ray: written by real processes beside the next step, killed while they are."""

from __future__ import annotations

import shutil

import pytest
from ray_runs import Remembering, assert_same_numbers, recipe_of, run_of, signal_worker, time_limit
from safetensors.torch import load_file

from graftrl.config import parse_recipe
from graftrl.export.command import export
from graftrl.training import loop
from graftrl.training.loop import train
from graftrl.training.run_folder import RunFolder

pytestmark = pytest.mark.ray


@pytest.fixture(autouse=True)
def _limit():
    with time_limit(900):
        yield


def assert_whole(run, steps):
    assert [line["step"] for line in run.read_metrics()] == list(range(1, steps + 1))
    assert run.checkpoint_steps() == list(range(1, steps + 1)) and not list(run.checkpoints.glob(".*"))


def test_parts_are_read_by_other_numbers_of_trainers_and_the_local_engine(pair, tmp_path, monkeypatch):
    whole = run_of(recipe_of({"B": pair["B"]}, steps=4, method="grpo"), tmp_path / "whole")
    content = recipe_of({"B": pair["B"]}, steps=2, method="grpo", checkpoint={"format": "sharded", "keep": 10})
    run = run_of(content, tmp_path / "run")
    assert_whole(run, 2)
    for step in (1, 2):
        assert len(list((run.checkpoint(step) / "B" / "shards").glob("shard-*-model-00002-*"))) == 2
        export(f"{run.root}:B@{step}", tmp_path / f"B{step}")
        ours, theirs = (
            load_file(f / "model.safetensors") for f in (tmp_path / f"B{step}", whole.checkpoint(step) / "B")
        )
        assert ours.keys() == theirs.keys() and all((ours[name] == value).all() for name, value in theirs.items())

    other = tmp_path / "local"
    shutil.copytree(run.root, other)
    sections = {"checkpoint": {"format": "sharded", "keep": 10}}
    more = parse_recipe(recipe_of({"B": pair["B"]}, steps=3, method="grpo", trainers=1, **sections), "test")
    train(run, more, Remembering())
    assert_whole(run, 3)
    assert_same_numbers(run.read_metrics()[2], whole.read_metrics()[2], names="B")

    victims, original = [], loop.train_step

    def killing(recipe, prepared, run, pool, state):  # the third step's parts are being written, or just were
        if state.step == 3 and not victims:
            victims.append(signal_worker(prepared.engine._workers["B"].trainers[0]))
        return original(recipe, prepared, run, pool, state)

    monkeypatch.setattr(loop, "train_step", killing)
    again = RunFolder.open(other)
    more = parse_recipe(recipe_of({"B": pair["B"]}, steps=4, method="grpo", **sections), "test")
    train(again, more, display := Remembering())
    assert victims and any("WORKERS LOST, started again from step" in note for note in display.notes)
    assert_whole(again, 4)
    for step in (3, 4):
        assert_same_numbers(again.read_metrics()[step - 1], whole.read_metrics()[step - 1], names="B")

    shutil.rmtree(again.checkpoint(4))
    local = {**recipe_of({"B": pair["B"]}, steps=4, method="grpo"), "engine": "local"}
    train(again, parse_recipe(local, "test"), Remembering())
    assert_whole(again, 4)
    assert (again.checkpoint(4) / "B" / "model.safetensors").is_file()

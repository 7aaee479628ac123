"""Checkpoints that are written beside training: which one counts, whatever ends the run meanwhile."""

from __future__ import annotations

import pytest

from graftrl.engines.local import LocalEngine
from graftrl.errors import ConfigError, RunError, WorkerLost
from graftrl.training import loop
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder


class Watch(Silent):
    """The newest checkpoint after every step; `then` is called with the step."""

    def __init__(self, run, then=lambda step: None):
        self.run, self.then, self.newest = run, then, {}

    def step(self, metrics):
        folder = self.run.latest_checkpoint()
        self.newest[metrics["step"]] = folder and int(folder.name[-6:])
        self.then(metrics["step"])


@pytest.fixture
def writing(monkeypatch):
    """`writing(done)`: an engine that writes beside training; done(number of the save, wait) says whether it is there.
    Gives the list of what was waited for."""
    waited = []

    def make(done, lost=lambda update: False):
        class Written:
            def __init__(self, number):
                self.number = number

            def done(self, *, wait):
                if wait:
                    waited.append(self.number)
                return done(self.number, wait)

        class Writing(LocalEngine):
            saves = updates = 0

            def save(self, folder):
                super().save(folder)
                Writing.saves += 1
                return Written(Writing.saves)

            def update(self, minibatches, objective_of):
                Writing.updates += 1
                if lost(Writing.updates):
                    raise WorkerLost("a worker died", ["B"])
                return super().update(minibatches, objective_of)

        monkeypatch.setattr(loop, "open_engine", Writing)
        return waited

    return make


def numbers(run):
    return [(line["step"], *(line["models"][model]["loss"] for model in "AB")) for line in run.read_metrics()]


@pytest.fixture
def run(make_recipe, tmp_path):
    return RunFolder.create(
        tmp_path / "run", make_recipe("graft-no-floor", steps=4, checkpoint={"every": 1, "keep": 2})
    )


@pytest.fixture
def whole(make_recipe, tmp_path):
    recipe = make_recipe("graft-no-floor", steps=4)
    run = RunFolder.create(tmp_path / "whole", recipe)
    train(run, recipe, Silent())
    return numbers(run)


def test_a_checkpoint_counts_when_it_is_written_and_the_next_one_and_the_end_wait(run, whole, writing):
    waited = writing(lambda number, wait: wait or number == 2)
    train(run, run.recipe(), watch := Watch(run))
    assert watch.newest == {1: None, 2: 2, 3: 2, 4: 3} and waited == [1, 3, 4]
    assert run.checkpoint_steps() == [3, 4] and numbers(run) == whole
    assert not list(run.checkpoints.glob(".*"))


def test_a_kill_while_it_is_written_leaves_the_older_one_and_resume_makes_the_same_numbers(run, whole, writing):
    writing(lambda number, wait: wait)

    def kill(step):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, run.recipe(), Watch(run, kill))
    assert run.checkpoint_steps() == [1, 2] and list(run.checkpoints.glob(".step-000003.tmp"))
    again = RunFolder.open(run.root)
    _, state, notes = again.rewind()
    assert state.step == 2 and "step-000003: checkpoint was cut off while being written" in notes
    train(again, run.recipe(), Silent())
    assert numbers(again) == whole and again.checkpoint_steps() == [3, 4]


@pytest.mark.parametrize(("written", "goes_on_from"), [(True, 2), (False, 1)])
def test_lost_workers_cost_the_checkpoint_only_if_it_was_not_written(run, whole, writing, written, goes_on_from):
    asked = []

    def done(number, wait):
        asked.append(number)
        return wait or (written and asked.count(2) > 1)  # the second save is written while the third step trains

    writing(done, lost=lambda update: update == 3)
    starts = []

    class Starts(Silent):
        def start(self, recipe, steps, state, notes):
            starts.append(state.step)

    train(run, run.recipe(), Starts())
    assert starts == [0, goes_on_from] and numbers(run) == whole


def test_a_write_that_fails_ends_the_run_and_leaves_the_older_checkpoints(run, writing):
    def done(number, wait):
        if number == 2 and wait:
            raise RunError("a worker failed with OSError: No space left on device")
        return wait

    writing(done)
    with pytest.raises(RunError, match="the disk is full"):
        train(run, run.recipe(), Silent())
    assert run.checkpoint_steps() == [1]
    assert RunFolder.open(run.root).rewind()[1].step == 1


def test_one_process_writes_whole_weights(make_recipe):
    with pytest.raises(ConfigError, match=r"checkpoint.format: sharded is for the trainers of engine: ray"):
        make_recipe("grpo", checkpoint={"format": "sharded"})

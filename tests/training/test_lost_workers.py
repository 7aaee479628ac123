"""An engine that loses workers: the run goes on from its last checkpoint, and ends where that does not help."""

import pytest

from graftrl.engines.local import LocalEngine
from graftrl.errors import WorkerLost
from graftrl.training import loop
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder


class Display(Silent):
    def __init__(self):
        self.notes = []

    def start(self, recipe, steps, state, notes):
        self.notes.append((state.step, list(notes)))


@pytest.fixture
def losing(monkeypatch):
    """`losing(when)`: engines that lose a worker in an update for which when(number of the update) holds."""

    def make(when):
        updates, closed = [], []

        class Losing(LocalEngine):
            def update(self, minibatches, objective_of):
                updates.append(1)
                if when(len(updates)):
                    raise WorkerLost("a worker died")
                return super().update(minibatches, objective_of)

            def close(self):
                closed.append(self)

        monkeypatch.setattr(loop, "open_engine", Losing)
        return closed

    return make


def numbers(run):
    return [(line["step"], line["models"]["A"]["loss"], line["models"]["B"]["loss"]) for line in run.read_metrics()]


def test_a_run_that_lost_workers_twice_ends_with_the_numbers_of_one_that_did_not(
    make_recipe, tmp_path, losing, monkeypatch
):
    recipe = make_recipe("graft-no-floor", steps=4)
    whole = RunFolder.create(tmp_path / "whole", recipe)
    train(whole, recipe, Silent())
    closed = losing(lambda update: update in (2, 4))
    run = RunFolder.create(tmp_path / "run", recipe)
    train(run, recipe, display := Display())
    assert numbers(run) == numbers(whole)
    assert len(closed) == 3
    assert [step for step, _ in display.notes] == [0, 1, 2]
    assert all("WORKERS LOST" in notes[0] for _, notes in display.notes[1:])


def test_workers_that_are_lost_again_before_the_next_checkpoint_end_the_run(make_recipe, tmp_path, losing):
    recipe = make_recipe("graft-no-floor", steps=4)
    run = RunFolder.create(tmp_path / "run", recipe)
    closed = losing(lambda update: update >= 3)
    with pytest.raises(WorkerLost):
        train(run, recipe, display := Display())
    assert len(closed) == len(display.notes) == 2
    assert [line["step"] for line in run.read_metrics()] == [1, 2]

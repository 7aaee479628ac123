"""An engine that loses workers: the run goes on from its last checkpoint, without a model where it must, or ends."""

import numpy as np
import pytest
from safetensors.torch import load_file

from graftrl.engines.local import LocalEngine
from graftrl.errors import RunError, WorkerLost
from graftrl.methods import METHODS, build_method
from graftrl.report.command import run_report
from graftrl.training import loop
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder, TrainingState
from graftrl.training.survivors import Survivors


class Display(Silent):
    """Keeps the notes of every start; stops like a kill after step `last`."""

    def __init__(self, last=None):
        self.notes, self.last = [], last

    def start(self, recipe, steps, state, notes):
        self.notes.append((state.step, list(recipe.models), list(notes)))

    def step(self, metrics):
        if metrics["step"] == self.last:
            raise KeyboardInterrupt


@pytest.fixture
def losing(monkeypatch):
    """`losing(when, models)`: an engine that loses workers of these models in an update for which when(number of the
    update) holds, and again while it restores for which again(number of the restore) holds."""

    def make(when, models=(), again=lambda restore: False):
        updates, restored, closed = [], [], []

        class Losing(LocalEngine):
            def update(self, minibatches, objective_of):
                updates.append(1)
                if when(len(updates)):
                    raise WorkerLost("a worker died", models)
                return super().update(minibatches, objective_of)

            def restore(self, recipe, checkpoint, lost=()):
                if hasattr(self, "policies"):
                    restored.append((list(recipe.models), sorted(lost)))
                    if again(len(restored)):
                        raise WorkerLost("no room", models)
                super().restore(recipe, checkpoint, lost)

            def close(self):
                closed.append(self)

        monkeypatch.setattr(loop, "open_engine", Losing)
        return restored, closed

    return make


def numbers(run, models="AB"):
    return [(line["step"], *(line["models"][model].get("loss") for model in models)) for line in run.read_metrics()]


def test_a_run_that_lost_workers_twice_ends_with_the_numbers_of_one_that_did_not(make_recipe, tmp_path, losing):
    recipe = make_recipe("graft-no-floor", steps=3)
    whole = RunFolder.create(tmp_path / "whole", recipe)
    train(whole, recipe, Silent())
    restored, closed = losing(lambda update: update in (2, 4), ["B"])
    run = RunFolder.create(tmp_path / "run", recipe)
    train(run, recipe, display := Display())
    assert numbers(run) == numbers(whole)
    assert restored == [(["A", "B"], ["B"])] * 2 and len(closed) == 1
    assert [step for step, _, _ in display.notes] == [0, 1, 2]
    assert all("WORKERS LOST, started again" in notes[0] for _, _, notes in display.notes[1:])


def test_where_nobody_can_say_whose_workers_are_lost_a_second_loss_ends_the_run(make_recipe, tmp_path, losing):
    recipe = make_recipe("graft-no-floor", steps=4)
    run = RunFolder.create(tmp_path / "run", recipe)
    restored, closed = losing(lambda update: update >= 3)
    with pytest.raises(WorkerLost, match=r"no model is left; 'graftrl resume .*run' goes on from step 2"):
        train(run, recipe, display := Display())
    assert restored == [(["A", "B"], ["A", "B"])] and len(closed) == 1 and len(display.notes) == 2
    assert [line["step"] for line in run.read_metrics()] == [1, 2]
    assert sorted(f.name for f in (run.root / "rollouts").iterdir()) == ["step-000001.parquet", "step-000002.parquet"]


@pytest.fixture
def alone(make_recipe, tmp_path, losing):
    """A run of four steps that lost B for good in step 3."""
    restored, _ = losing(lambda update: update == 3, ["B"], again=lambda restore: restore == 1)
    recipe = make_recipe("graft-no-floor", steps=4)
    run = RunFolder.create(tmp_path / "run", recipe)
    train(run, recipe, display := Display())
    assert restored == [(["A", "B"], ["B"]), (["A"], [])]
    return run, display


def test_without_its_peer_graft_is_grpo_from_the_last_checkpoint(alone, make_recipe, content, tmp_path):
    run, display = alone
    other = RunFolder.create(tmp_path / "grpo", recipe := make_recipe("graft-no-floor", steps=4))
    with pytest.raises(KeyboardInterrupt):
        train(other, recipe, Display(last=2))
    recipe = make_recipe("grpo", steps=4, models={"A": content()["models"]["A"]})
    train(other, recipe, Silent())
    assert [line[1] for line in numbers(run)] == [line[1] for line in numbers(other, "A")]
    for name in ("model.safetensors", "optimizer.pt"):
        ours, theirs = ((of.checkpoint(4) / "A" / name).read_bytes() for of in (run, other))
        assert ours == theirs
    assert [models for _, models, _ in display.notes] == [["A", "B"], ["A"]]
    assert any("LOST FOR GOOD" in note for note in display.notes[1][2])


def test_every_step_says_that_a_model_is_lost_and_readers_of_the_run_bear_it(alone, tmp_path):
    run, _ = alone
    said = ["MODEL B IS LOST SINCE STEP 2; A GOES ON ALONE" in " ".join(line["notes"]) for line in run.read_metrics()]
    assert said == [False, False, True, True]
    assert all(line["models"]["B"]["groups"] == 0 for line in run.read_metrics()[2:])
    run_report([run.root], out=tmp_path / "report.html", tables=tmp_path)
    assert (tmp_path / "report.html").is_file()


def test_a_lost_model_keeps_its_last_weights_in_every_checkpoint_and_comes_back_when_asked(alone, make_recipe):
    run, _ = alone
    kept = load_file(run.checkpoint(4) / "B" / "model.safetensors")
    recipe = make_recipe("graft-no-floor", steps=5)
    train(run, recipe, Silent())
    assert "loss" not in run.read_metrics()[-1]["models"]["B"]
    still = load_file(run.checkpoint(5) / "B" / "model.safetensors")
    assert all(np.array_equal(kept[key], still[key]) for key in kept)

    recipe = make_recipe("graft-no-floor", steps=6)
    train(run, recipe, display := Display(), bring_back=True)
    last = run.read_metrics()[-1]
    assert np.isfinite(last["models"]["B"]["loss"]) and not any("LOST" in note for note in last["notes"])
    assert display.notes[0][1] == ["A", "B"]
    with pytest.raises(RunError, match="no model of this run is lost"):
        train(run, recipe, Silent(), bring_back=True)


def test_what_was_lost_before_a_checkpoint_cannot_come_back(make_recipe, tmp_path, losing):
    losing(lambda update: update == 1, ["B"], again=lambda restore: restore == 1)
    recipe = make_recipe("graft-no-floor", steps=1)
    run = RunFolder.create(tmp_path / "run", recipe)
    train(run, recipe, Silent())
    assert not (run.checkpoint(1) / "B").exists()
    with pytest.raises(RunError, match="'B' was lost before its first checkpoint"):
        train(run, make_recipe("graft-no-floor", steps=2), Silent(), bring_back=True)


def test_a_run_that_shall_not_go_on_alone_ends(make_recipe, tmp_path, losing):
    losing(lambda update: update == 2, ["B"], again=lambda restore: True)
    recipe = make_recipe("graft-no-floor", steps=4, ray={"lost_peer": "stop"})
    run = RunFolder.create(tmp_path / "run", recipe)
    with pytest.raises(WorkerLost, match=r"no room; ray.lost_peer is stop; 'graftrl resume .*' goes on from step 1"):
        train(run, recipe, Silent())
    assert [line["step"] for line in run.read_metrics()] == [1]


def test_the_best_step_is_one_of_those_with_the_same_models(make_recipe, tmp_path):
    """Else the mean of pass@1 over A and B would be compared with A's alone."""
    run = RunFolder.create(tmp_path / "run", make_recipe("graft"))
    state = TrainingState(step=7, best_step=5, best_score=0.9)
    survivors = Survivors(run, run.recipe(), state)
    survivors.recover(Restored(), state, WorkerLost("a worker died", ["B"]))
    assert (state.best_score, state.lost) == (0.9, {})
    survivors.recover(Restored(), state, WorkerLost("again", ["B"]))
    assert (state.best_score, state.lost) == (None, {"B": 7})


class Restored:
    def news(self):
        return []

    def restore(self, recipe, checkpoint, lost):
        pass


@pytest.mark.parametrize(
    ("names", "method", "said"),
    [
        ("AB", "graft", "A GOES ON ALONE: NO EXCHANGE, ONLY ITS OWN RESPONSES, AS IN GRPO"),
        ("AB", "dapo", "A GOES ON ALONE"),
        ("ABC", "graft", "THE RUN GOES ON WITH A, C"),
    ],
)
def test_what_is_said_of_a_lost_model_is_true_of_the_method(names, method, said, make_recipe, tmp_path):
    recipe = make_recipe(method, models={name: {"path": name} for name in names})
    survivors = Survivors(RunFolder(tmp_path), recipe, TrainingState(step=4, lost={"B": 4}))
    assert survivors.notes == [f"MODEL B IS LOST SINCE STEP 4; {said}"]


@pytest.mark.parametrize("name", [name for name in METHODS if build_method(name).fewest_models > 1 and name != "rstg"])
def test_every_method_that_exchanges_can_do_without_a_peer(name, make_recipe, tmp_path):
    training = {"steps": 1, "prompts_per_step": 4, "group_size": 4, "minibatch_prompts": 4}
    recipe = make_recipe(name, training=training)
    run = RunFolder.create(tmp_path / "run", recipe)
    train(run, recipe.without(["B"]), Silent())
    (line,) = run.read_metrics()
    assert line["models"]["A"]["optimizer_steps"] == 1 and np.isfinite(line["models"]["A"]["loss"])

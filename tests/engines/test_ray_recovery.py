"""Workers that die or hang, and what the run makes of it. Real processes are killed and stopped; nothing needs vLLM."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from ray_runs import (
    Remembering,
    assert_same_numbers,
    assert_same_weights,
    assert_whole,
    during,
    recipe_of,
    replay,
    signal_worker,
    time_limit,
)

from graftrl.config import parse_recipe
from graftrl.objective import Objective, Term
from graftrl.objective.terms import TokenLoss
from graftrl.rollout import Row
from graftrl.training import loop
from graftrl.training.loop import train
from graftrl.training.run_folder import RunFolder

pytestmark = pytest.mark.ray


@pytest.fixture(autouse=True)
def _limit():
    with time_limit(900):
        yield


def pids(engine):
    import ray

    return {
        name: ray.get([actor.pid.remote() for actor in (*workers.trainers, *workers.samplers)])
        for name, workers in engine._workers.items()
    }


def texts(groups):
    return [[response.token_ids.tolist() for response in group.responses] for group in groups]


def test_a_sampler_that_dies_or_hangs_is_replaced_and_its_prompts_are_asked_again(pair):
    from graftrl.engines.ray.engine import RayEngine
    from graftrl.tasks import build_task

    def likelihood(batch):  # which travels by value
        return TokenLoss(-batch.logprobs_BT)

    recipe = parse_recipe(recipe_of({"B": pair["B"]}, steps=1, method="grpo", trainers=1, samplers=2), "test")
    engine = RayEngine(recipe)
    try:
        prompts = list(build_task(recipe.task).train)[:6]

        def drawn():
            return engine.sample({"B": prompts}, 2, {"B": 1})["B"]

        groups = drawn()
        first = pids(engine)["B"]
        assert engine.news() == []

        signal_worker(engine._workers["B"].samplers[1])  # before its prompts are asked
        assert texts(drawn()) == texts(groups)
        (told,) = engine.news()
        assert "SAMPLER REPLACED" in told and "sampler 1 of model 'B' (died" in told
        second = pids(engine)["B"]
        assert second[:2] == first[:2] and second[2] != first[2]

        hung = signal_worker(engine._workers["B"].samplers[0], signal.SIGSTOP)
        engine._recipe = recipe.model_copy(update={"ray": recipe.ray.model_copy(update={"timeout_s": 20.0})})
        assert texts(drawn()) == texts(groups)
        engine._recipe = recipe
        (told,) = engine.news()
        assert "sampler 0 of model 'B' (no answer within 20 s)" in told
        assert not Path(f"/proc/{hung}").exists()  # it would keep the device

        rows = [
            Row(g.prompt.id, engine.codecs["B"].prompt_token_ids(g.prompt), r.token_ids, 0.0, "own", "B",
                old_logprobs=r.logprobs)
            for g in groups for r in g.responses
        ]  # fmt: skip
        engine.update({"B": [rows] * 4}, lambda _: Objective((Term(("own",), likelihood),)))
        signal_worker(engine._workers["B"].samplers[1])  # before it gets the new weights
        trained = drawn()
        assert texts(trained) != texts(groups) and len(engine.news()) == 1
        assert engine.sync_gaps()["B"].largest < 1e-4

        victim = engine._workers["B"].samplers[0]
        thread = during(0.2, lambda: signal_worker(victim))  # while it samples, or soon after
        assert texts(drawn()) == texts(trained)
        thread.join()
        assert texts(drawn()) == texts(trained) and len(engine.news()) == 1
    finally:
        engine.close()


class Killing:
    """In place of `loop.train_step`: before each step of `when`, do what it says with the engine."""

    def __init__(self, monkeypatch, when):
        self.original, self.when, self.engines = loop.train_step, dict(when), []
        monkeypatch.setattr(loop, "train_step", self)

    def __call__(self, recipe, prepared, run, pool, state):
        act = self.when.pop(state.step + 1, None)
        if act is not None:
            act(prepared.engine)
        return self.original(recipe, prepared, run, pool, state)


def test_a_trainer_that_dies_in_an_update_costs_its_model_alone_new_workers(pair, tmp_path, monkeypatch):
    """And the run goes on from its checkpoint with other numbers of workers."""
    from graftrl.engines.ray.engine import RayEngine

    seen, update = {}, RayEngine.update

    def dies_in_update(engine):
        def dying(self, minibatches, objective_of):
            monkeypatch.setattr(RayEngine, "update", update)
            signal_worker(self._workers["B"].trainers[1])
            return update(self, minibatches, objective_of)

        seen["before"] = pids(engine)
        monkeypatch.setattr(RayEngine, "update", dying)

    Killing(monkeypatch, {2: dies_in_update, 3: lambda engine: seen.update(after=pids(engine))})
    content = recipe_of(pair, steps=3)
    run = RunFolder.create(tmp_path / "run", parse_recipe(content, "test"))
    train(run, run.recipe(), display := Remembering())
    assert seen["before"]["A"] == seen["after"]["A"]
    assert not set(seen["before"]["B"]) & set(seen["after"]["B"])
    assert any("WORKERS LOST, started again from step 1: trainer 1 of model 'B' (died" in n for n in display.notes)
    assert_whole(run, 3)

    content = recipe_of(pair, steps=4, trainers=1, samplers=2)
    train(run, parse_recipe(content, "test"), Remembering())
    assert_whole(run, 4)
    local = replay(content, run, tmp_path / "local")
    for ours, theirs in zip(run.read_metrics(), local.read_metrics(), strict=True):
        assert_same_numbers(ours, theirs)
    for step in range(1, 5):
        assert_same_weights(run, local, step)


def test_a_model_whose_new_workers_die_too_is_left_behind_and_the_other_goes_on(pair, tmp_path, monkeypatch):
    from graftrl.engines.ray.engine import RayEngine

    restore, restored = RayEngine.restore, []

    def dying_again(self, recipe, checkpoint, lost):
        restore(self, recipe, checkpoint, lost)
        restored.append(sorted(lost))
        if "B" in recipe.models:
            signal_worker(self._workers["B"].trainers[0])

    monkeypatch.setattr(RayEngine, "restore", dying_again)
    Killing(monkeypatch, {2: lambda engine: signal_worker(engine._workers["B"].trainers[0])})
    content = recipe_of(pair, steps=3, trainers=1)
    run = RunFolder.create(tmp_path / "run", parse_recipe(content, "test"))
    train(run, run.recipe(), display := Remembering())
    assert restored == [["B"], []]
    assert_whole(run, 3)
    for line in run.read_metrics()[1:]:
        assert "MODEL B IS LOST SINCE STEP 1; A GOES ON ALONE" in line["notes"][0]
        assert np.isfinite(line["models"]["A"]["loss"]) and line["models"]["B"]["groups"] == 0
    assert any("LOST FOR GOOD" in note for note in display.notes)
    for step in range(1, 4):
        assert (run.checkpoint(step) / "B" / "model.safetensors").is_file()


def test_a_node_that_is_lost_in_the_middle_of_a_step_leaves_nothing_half_written(pair, tmp_path, monkeypatch):
    """There is no other room for the model whose node it was, so that the other goes on alone."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        other = cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        content = recipe_of(pair, steps=3, trainers=1, ray={"address": cluster.address, "restart_s": 10})
        lost = []

        def nodes_of(engine, model):
            table = ray.util.placement_group_table(engine._workers[model].group)
            return set(table["bundles_to_node_id"].values())

        def losing_its_node(engine):
            # Ray decides which model gets the node that can be removed.
            [dying] = [model for model in pair if nodes_of(engine, model) == {other.node_id}]
            original = engine.update

            def update(minibatches, objective_of):
                engine.update = original
                cluster.remove_node(other, allow_graceful=False)
                lost.append(dying)
                return original(minibatches, objective_of)

            engine.update = update

        Killing(monkeypatch, {2: losing_its_node})
        run = RunFolder.create(tmp_path / "run", parse_recipe(content, "test"))
        train(run, run.recipe(), display := Remembering())
        [dead] = lost
        [alone] = set(pair) - {dead}
        assert_whole(run, 3)
        assert any(f"'{dead}' found no room within 10 s" in note for note in display.notes)
        assert all(f"{alone} GOES ON ALONE" in line["notes"][0] for line in run.read_metrics()[1:])
    finally:
        ray.shutdown()
        cluster.shutdown()

"""What must not pass in silence: a sampler with stale weights, and workers that die. Real processes are killed."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from graftrl.config import parse_recipe
from graftrl.errors import NumericsError, WorkerLost
from graftrl.lab.models import LAB_MODELS, build_model, save_model
from graftrl.objective import Objective, Term
from graftrl.objective.terms import TokenLoss
from graftrl.rollout import Row
from graftrl.training import loop
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """GRPO of the laboratory's model B, a GPT-2 with a tied head, with heads that vLLM's kernels for CPUs take."""
    folder, model = tmp_path_factory.mktemp("wide") / "B", replace(LAB_MODELS["B"], heads=2)
    save_model(build_model(model, seed=3), model, folder)
    return {
        "name": "toy", "seed": 5, "threads": 1, "engine": "ray", "method": "grpo",
        "models": {"B": {"path": str(folder), "optimizer": {"lr": 0.01}}},
        "ray": {"resources": {"B": {"trainers": 2}}, "timeout_s": 1200},
        "task": {"kind": "function", "prompts": "toy_task:prompts", "verifier": "toy_task:coin"},
        "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 6},
        "training": {"steps": 3, "prompts_per_step": 4, "group_size": 4, "minibatch_prompts": 4},
    }  # fmt: skip


def likelihood(batch):
    return TokenLoss(-batch.logprobs_BT)


def test_stale_weights_and_dead_workers_are_told(content):
    from safetensors.torch import load, save

    from graftrl.engines.ray.engine import RayEngine
    from graftrl.tasks import build_task

    recipe = parse_recipe(content, "test")
    engine = RayEngine(recipe)
    try:
        import ray

        prompts = list(build_task(recipe.task).train)[:4]
        groups = engine.sample({"B": prompts}, 2, {"B": 1})["B"]
        assert [group.prompt for group in groups] == prompts
        again = engine.sample({"B": prompts[:1]}, 2, {"B": 1})["B"]  # whoever samples beside it changes nothing
        assert [r.token_ids.tolist() for r in again[0].responses] == [r.token_ids.tolist() for r in groups[0].responses]
        assert engine.sync_gaps()["B"].largest < 1e-4

        rows = [
            Row(g.prompt.id, engine.codecs["B"].prompt_token_ids(g.prompt), r.token_ids, 0.0, "own", "B",
                old_logprobs=r.logprobs)
            for g in groups for r in g.responses
        ]  # fmt: skip
        assert engine.generation_gap("B", rows) < 1e-4
        engine.update({"B": [rows] * 8}, lambda _: Objective((Term(("own",), likelihood),)))
        workers = engine._workers["B"]
        sent = ray.get([trainer.weights.remote("float32") for trainer in workers.trainers])[0]
        without_head = {k: v for part in ray.get(sent) for k, v in load(part).items() if k != "lm_head.weight"}
        ray.get(workers.samplers[0].load.remote([ray.put(save(without_head))]))
        workers.stale = False  # as if that had been all there is
        with pytest.raises(NumericsError, match=r"the sampler differs from the trainer by .* nats"):
            engine.sample({"B": prompts}, 2, {"B": 2})
        workers.stale = True
        engine.sample({"B": prompts}, 2, {"B": 2})  # the whole weights mend it

        os.kill(ray.get(workers.trainers[1].pid.remote()), signal.SIGKILL)
        with pytest.raises(WorkerLost, match="a worker died"):
            engine.score("B", rows)
    finally:
        engine.close()


def test_a_run_goes_on_with_new_workers_after_one_was_killed(content, tmp_path, monkeypatch):
    import ray

    original, killed = loop.train_step, []

    def killing(recipe, prepared, run, pool, state):
        if state.step == 1 and not killed:
            killed.append(ray.get(prepared.engine._workers["B"].trainers[1].pid.remote()))
            os.kill(killed[0], signal.SIGKILL)
        return original(recipe, prepared, run, pool, state)

    class Remembering(Silent):
        notes: list[str] = []  # noqa: RUF012

        def start(self, recipe, steps, state, notes):
            self.notes.extend(notes)

    monkeypatch.setattr(loop, "train_step", killing)
    run = RunFolder.create(tmp_path / "run", parse_recipe(content, "test"))
    train(run, run.recipe(), display := Remembering())
    assert killed and [line["step"] for line in run.read_metrics()] == [1, 2, 3]
    assert any("WORKERS LOST, started again" in note for note in display.notes)
    assert run.checkpoint_steps() and (run.checkpoint(3) / "B" / "model.safetensors").is_file()

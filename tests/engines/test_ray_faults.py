"""What must not pass in silence: a vLLM sampler with stale weights, and workers that die. Real processes are killed.
More faults, without vLLM, are in test_ray_recovery.py."""

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
        sent, _ = ray.get([trainer.weights.remote("float32") for trainer in workers.trainers])[0]
        headless = [
            ray.put((tuple(replace(w, names=tuple(n for n in w.names if n != "lm_head.weight")) for w in chunk), data))
            for chunk, data in ray.get(sent)
        ]
        ray.get(workers.samplers[0].load.remote(headless))
        workers.stale = False  # as if that had been all there is
        with pytest.raises(NumericsError, match=r"the sampler differs from the trainer by .* nats"):
            engine.sample({"B": prompts}, 2, {"B": 2})
        workers.stale = True
        groups = engine.sample({"B": prompts}, 2, {"B": 2})["B"]  # the whole weights mend it

        os.kill(ray.get(workers.samplers[0].pid.remote()), signal.SIGKILL)
        again = engine.sample({"B": prompts}, 2, {"B": 2})["B"]
        assert [r.token_ids.tolist() for r in again[0].responses] == [r.token_ids.tolist() for r in groups[0].responses]
        assert "SAMPLER REPLACED" in engine.news()[0] and engine.sync_gaps()["B"].largest < 1e-4

        os.kill(ray.get(workers.trainers[1].pid.remote()), signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"trainer 1 of model 'B' \(died") as error:
            engine.score("B", rows)
        engine.restore(recipe, None, error.value.models)
        assert engine.generation_gap("B", rows) < 1e-4  # they were drawn from the first weights
    finally:
        engine.close()

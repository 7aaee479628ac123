"""A trainer's process, here in this one: what the local engine was given, it does the same with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from graftrl.config import parse_recipe
from graftrl.engines.local import LocalEngine
from graftrl.engines.ray.engine import _placed
from graftrl.engines.ray.trainer import Trainer
from graftrl.lab.models import LAB_MODELS, build_model, save_model
from graftrl.training import loop
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder


@pytest.fixture
def recipe(pair):
    def make(method, **sections):
        return parse_recipe(
            {
                "name": "toy", "seed": 5, "method": method,
                "models": {"A": {"path": pair["A"], "optimizer": {"lr": 0.01, "eps": 1e-5}}},
                "task": {"kind": "function", "prompts": "toy_task:prompts", "verifier": "toy_task:coin"},
                "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 6},
                "training": {"steps": 1, "prompts_per_step": 8, "group_size": 4, "minibatch_prompts": 4},
                **sections,
            },
            "test",
        )  # fmt: skip

    return make


@pytest.fixture
def trainer():
    """A trainer of one rank, whose process group ends with the test."""
    one = Trainer("A", 0, 1, None, 60.0)
    one._store = dist.HashStore()
    yield one
    dist.destroy_process_group()


def local_step(recipe, root, monkeypatch):
    """One step of the local engine: the engine after it, the update that it was asked for, and its statistics."""
    seen = {}

    class Watched(LocalEngine):
        def update(self, minibatches, objective_of):
            seen.update(engine=self, minibatches=minibatches["A"], objective_of=objective_of)
            seen["stats"] = super().update(minibatches, objective_of)["A"]
            return {"A": seen["stats"]}

    monkeypatch.setattr(loop, "open_engine", Watched)
    train(RunFolder.create(root, recipe), recipe, Silent())
    return seen


@pytest.mark.parametrize(
    "method",
    [
        {"name": "grpo"},
        {"name": "grpo", "kl_coefficient": 0.1},
        {"name": "p_opd", "estimator": "full"},
        {"name": "p_opd", "estimator": "sampled"},
    ],
    ids=str,
)
def test_a_step_equals_the_local_engines(recipe, trainer, tmp_path, monkeypatch, pair, method):
    sections = {}
    if method["name"] == "p_opd":
        expert = tmp_path / "expert"
        save_model(build_model(LAB_MODELS["A"], seed=11), LAB_MODELS["A"], expert)
        sections["scorers"] = {"expert": {"path": str(expert)}, "base": {"path": pair["A"]}}
    asked = recipe(method, **sections)
    seen = local_step(asked, tmp_path / "run", monkeypatch)
    opened = trainer.open(("", 0), _placed(asked, "cpu"), None)
    assert opened.prepend_bos.keys() == {"A", *sections.get("scorers", {})}
    stats = trainer.update(seen["minibatches"], seen["objective_of"])
    np.testing.assert_allclose(stats.losses, seen["stats"].losses, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(stats.grad_norms, seen["stats"].grad_norms, rtol=1e-4)
    assert stats.tokens == seen["stats"].tokens and stats.clipped_tokens == seen["stats"].clipped_tokens
    ours = trainer._policy.ranks.whole_weights(trainer._policy.loaded.causal_lm)
    for key, theirs in seen["engine"].policies["A"].loaded.causal_lm.state_dict().items():
        torch.testing.assert_close(ours[key], theirs, rtol=1e-3, atol=2e-5)
    rows = seen["minibatches"][0]
    for scorer in sections.get("scorers", {}):
        for a, b in zip(trainer.read(scorer, rows), seen["engine"].score(scorer, rows), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)

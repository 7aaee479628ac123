"""One step of the local engine, for others to be compared with."""

from __future__ import annotations

from graftrl.config import parse_recipe
from graftrl.engines.local import LocalEngine
from graftrl.lab.models import LAB_MODELS, build_model, save_model
from graftrl.training import loop
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder

METHODS = [
    {"name": "grpo"},
    {"name": "grpo", "kl_coefficient": 0.1},
    {"name": "p_opd", "estimator": "full"},
    {"name": "p_opd", "estimator": "sampled"},
]


def toy_recipe(path, method, expert, **sections):
    """A recipe of one model. expert: where a scorer's model is saved, if the method reads one."""
    if method["name"] == "p_opd":
        save_model(build_model(LAB_MODELS["A"], seed=11), LAB_MODELS["A"], expert)
        sections["scorers"] = {"expert": {"path": str(expert)}, "base": {"path": path}}
    return parse_recipe(
        {
            "name": "toy", "seed": 5, "method": method,
            "models": {"A": {"path": path, "optimizer": {"lr": 0.01, "eps": 1e-5}, "microbatch_tokens": 120}},
            "task": {"kind": "function", "prompts": "toy_task:prompts", "verifier": "toy_task:coin"},
            "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 6},
            "training": {"steps": 1, "prompts_per_step": 8, "group_size": 4, "minibatch_prompts": 4},
            **sections,
        },
        "test",
    )  # fmt: skip


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

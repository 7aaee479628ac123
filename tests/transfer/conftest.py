"""A finished run of a proxy on the toy task, with validation before and after."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))  # the toy task


@pytest.fixture(scope="session")
def content(pair) -> Callable[..., dict[str, Any]]:
    def make(**sections: Any) -> dict[str, Any]:
        task = {"kind": "function", "prompts": "toy_task:prompts", "validation_prompts": "toy_task:prompts"}
        recipe = {
            "name": "proxy",
            "seed": 3,
            "threads": 1,
            "method": "grpo",
            "models": {"P": {"path": pair["A"], "optimizer": {"lr": 0.01}, "microbatch_tokens": 4096}},
            "task": {**task, "verifier": "toy_task:coin"},
            "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 6},
            "training": {"steps": 2, "prompts_per_step": 8, "group_size": 4, "minibatch_prompts": 8},
            "evaluation": {"every": 1, "samples": 2},
        }
        return {**recipe, **sections}

    return make


@pytest.fixture(scope="session")
def train_run(content, tmp_path_factory) -> Callable[..., Path]:
    from graftrl.config import parse_recipe
    from graftrl.training.loop import train
    from graftrl.training.progress import Silent
    from graftrl.training.run_folder import RunFolder

    def run(**sections: Any) -> Path:
        root = tmp_path_factory.mktemp("runs") / "run"
        recipe = parse_recipe(content(**sections), "test")
        train(RunFolder.create(root, recipe), recipe, Silent())
        return root

    return run


@pytest.fixture(scope="session")
def proxy_run(train_run) -> Path:
    return train_run()


@pytest.fixture
def recipe_file(content, tmp_path) -> Callable[..., Path]:
    def write(**sections: Any) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(content(**sections)))
        return path

    return write

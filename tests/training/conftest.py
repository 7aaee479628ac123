"""The recipe that trains a pair of tiny untrained models in a fraction of a second a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graftrl.config import Recipe, parse_recipe


@pytest.fixture(scope="session")
def content(pair) -> Callable[..., dict[str, Any]]:
    """The recipe as a mapping; keyword arguments replace whole sections."""

    def make(method: Any = "graft", steps: int = 3, **sections: Any) -> dict[str, Any]:
        recipe = {
            "name": "toy",
            "seed": 5,
            "threads": 1,
            "method": method,
            "models": {name: {"path": path, "optimizer": {"lr": 0.01}} for name, path in pair.items()},
            "task": {"kind": "function", "prompts": "toy_task:prompts", "verifier": "toy_task:verify"},
            "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 6},
            "training": {"steps": steps, "prompts_per_step": 8, "group_size": 4, "minibatch_prompts": 4},
        }
        return {**recipe, **sections}

    return make


@pytest.fixture(scope="session")
def make_recipe(content) -> Callable[..., Recipe]:
    return lambda *args, **sections: parse_recipe(content(*args, **sections), "test")


@pytest.fixture
def new_run(tmp_path) -> Path:
    return tmp_path / "run"

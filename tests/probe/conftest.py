"""The shipped warm pair, a recipe about it, and rollout logs made by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graftrl.config import Recipe, parse_recipe
from graftrl.logs.rollouts import write_rollouts, write_transfers
from graftrl.methods import Transfer
from graftrl.policies.config import SamplingSettings
from graftrl.rollout import Group, Prompt, Response


@pytest.fixture
def recipe(warm: dict[str, str]) -> Callable[..., Recipe]:
    def make(**sections: Any) -> Recipe:
        content = {
            "name": "warm",
            "seed": 1,
            "threads": 1,
            "method": "graft",
            "models": {name: {"path": path} for name, path in warm.items()},
            "task": {"kind": "hidden_programs"},
            "sampling": {"max_prompt_tokens": 32, "max_response_tokens": 30},
            "training": {"steps": 1, "prompts_per_step": 32, "group_size": 4, "minibatch_prompts": 8},
        }
        return parse_recipe({**content, **sections}, "test")

    return make


def _group(model: str, prompt_id: str, rewards: Sequence[float]) -> Group:
    prompt = Prompt(prompt_id, ({"role": "user", "content": f"problem {prompt_id}"},), "42", "test")
    responses = [
        Response(
            f"answer {i}", np.arange(1, 3 + i), np.full(2 + i, -0.5, np.float32), "length" if i == 0 else "stop", reward
        )
        for i, reward in enumerate(rewards)
    ]
    return Group(model, prompt, responses)


@pytest.fixture
def write_log(tmp_path: Path) -> Callable[..., Path]:
    """`write_log("name", {step: {model: {prompt: rewards}}})`: response i has 2 + i tokens, the first one was cut."""

    def write(
        name: str,
        steps: Mapping[int, Mapping[str, Mapping[str, Sequence[float]]]],
        transfers: Sequence[Transfer] = (),
        sampling: SamplingSettings | None = None,
    ) -> Path:
        for step, models in steps.items():
            write_rollouts(
                tmp_path / name / "rollouts" / f"step-{step:06d}.parquet",
                run=name,
                step=step,
                groups={m: [_group(m, p, rewards) for p, rewards in of.items()] for m, of in models.items()},
                sampling=sampling or SamplingSettings(),
                fingerprints={model: f"tokenizer of {model}" for model in models},
            )
        if transfers:
            write_transfers(tmp_path / name / "exchange" / "step-000001.parquet", 1, transfers)
        return tmp_path / name

    return write


@pytest.fixture
def transfer() -> Callable[..., Transfer]:
    def make(receiver: str, source: str, prompt_id: str, index: int, reward: float, score: float | None, **more: Any):
        return Transfer(
            receiver=receiver, source=source, prompt_id=prompt_id, response_index=index,
            status=more.get("status", "admitted"), reason=more.get("reason", ""), reward=reward, advantage=0.0,
            score=score, weight=1.0, receiver_tokens=3,
        )  # fmt: skip

    return make

"""Groups by hand and codecs with the laboratory's two real tokenizers; log-probabilities are given, no model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from graftrl.lab.models import LAB_MODELS, build_tokenizer
from graftrl.methods import StepContext
from graftrl.policies.codec import Codec
from graftrl.policies.config import ModelSettings
from graftrl.rollout import Group, Prompt, Response

LENGTH_LIMIT = 40


@pytest.fixture(scope="session")
def codecs() -> dict[str, Codec]:
    return {
        name: Codec(build_tokenizer(LAB_MODELS[kind]), name, ModelSettings(path="unused"), [])
        for name, kind in {"A": "A", "B": "B", "C": "C"}.items()
    }


@pytest.fixture
def make_group(codecs) -> Callable[..., Group]:
    def make(
        model: str,
        prompt_id: str,
        rewards: Sequence[float],
        *,
        logprob: float = -0.5,
        texts: Sequence[str] | None = None,
        finish: str = "stop",
    ) -> Group:
        codec = codecs[model]
        texts = texts or [f"A:{i},2,3;E:{i},6,9" for i in range(len(rewards))]
        responses = []
        for text, reward in zip(texts, rewards, strict=True):
            ids = codec.tokenizer.encode(text, add_special_tokens=False) + ([codec.eos_id] if finish == "stop" else [])
            logprobs = np.full(len(ids), logprob, np.float32)
            responses.append(Response(text, np.array(ids), logprobs, finish, reward))
        prompt = Prompt(prompt_id, ({"role": "user", "content": "a1,2,3>"},), "x", "hidden_programs")
        return Group(model, prompt, responses)

    return make


@pytest.fixture
def context(codecs) -> Callable[..., StepContext]:
    def make(
        scorer: Callable[..., list[np.ndarray]], group_size: int, limit: int = LENGTH_LIMIT, **changes: Any
    ) -> StepContext:
        return StepContext(
            step=changes.pop("step", 1), seed=7, group_size=group_size, max_response_tokens=limit, codecs=codecs,
            score=scorer, **changes,
        )  # fmt: skip

    return make

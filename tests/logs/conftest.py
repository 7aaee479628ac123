"""Builds small rollout logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from graftrl.logs.rollouts import write_rollouts
from graftrl.policies.config import SamplingSettings
from graftrl.rollout import Group, Prompt, Response


def response(text: str, reward: float, *, stopped: bool = True) -> Response:
    """One token a letter (its code point) with log-probability -1/position, and EOS 0 where it stopped."""
    token_ids = [ord(letter) for letter in text] + ([0] if stopped else [])
    logprobs = [-1 / position for position in range(1, len(token_ids) + 1)]
    return Response(
        text,
        np.array(token_ids, dtype=np.int64),
        np.array(logprobs, dtype=np.float32),
        "stop" if stopped else "length",
        reward,
        "right" if reward == 1 else "wrong",
    )


def group(model: str, prompt_id: str, rewards: Sequence[float]) -> Group:
    prompt = Prompt(prompt_id, ({"role": "user", "content": f"problem {prompt_id}"},), "42", "test")
    responses = [response(f"{model}{prompt_id}{i}", reward) for i, reward in enumerate(rewards)]
    return Group(model, prompt, responses)


@pytest.fixture
def write_log(tmp_path: Path) -> Callable[..., Path]:
    """`write_log("name", {step: {model: {prompt_id: rewards}}})` writes a run folder's rollouts; returns the folder."""

    def write(
        name: str, steps: dict[int, dict[str, dict[str, Sequence[float]]]], sampling: SamplingSettings | None = None
    ) -> Path:
        for step, models in steps.items():
            write_rollouts(
                tmp_path / name / "rollouts" / f"step-{step:06d}.parquet",
                run=name,
                step=step,
                groups={m: [group(m, p, r) for p, r in prompts.items()] for m, prompts in models.items()},
                sampling=sampling or SamplingSettings(),
                fingerprints={model: f"tokenizer-of-{model}" for model in models},
            )
        return tmp_path / name

    return write


@pytest.fixture
def log(write_log: Callable[..., Path]) -> Path:
    """Two models, three steps, two prompts a step, four responses a group; A solves p1 in step 1 twice."""
    half, none, all_right = (1, 0, 0, 1), (0, 0, 0, 0), (1, 1, 1, 1)
    return write_log(
        "run",
        {
            1: {"A": {"p1": half, "p2": none}, "B": {"p1": none, "p2": all_right}},
            2: {"A": {"p3": none, "p4": none}, "B": {"p3": half, "p4": none}},
            3: {"A": {"p1": all_right, "p2": none}, "B": {"p1": half, "p2": half}},
        },
    )


def edit(file: Path, *expressions: pl.Expr, metadata: str | None = '{"schema_version": 1}') -> None:
    """Rewrite a log file with columns replaced."""
    frame = pl.read_parquet(file).with_columns(*expressions)
    frame.write_parquet(file, metadata=None if metadata is None else {"graftrl": metadata})


@pytest.fixture
def edit_file() -> Callable[..., None]:
    return edit

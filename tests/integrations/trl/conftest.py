"""A script's pieces: tiny models in TRL's trainer, completions given by hand, and a peer's log."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
pytest.importorskip("trl")
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parent))  # the tests share `trl_scripts`
from trl_scripts import RIGHT, TEXTS, N, load, prompt, verify

from graftrl.integrations.trl import GraftConfig, GraftTrainer
from graftrl.lab.models import LAB_MODELS, build_tokenizer
from graftrl.logs.rollouts import step_file_name, write_rollouts
from graftrl.policies.codec import Codec
from graftrl.policies.config import ModelSettings, SamplingSettings
from graftrl.rollout import Group, Response


@pytest.fixture(scope="session")
def codecs() -> dict[str, Codec]:
    return {
        name: Codec(build_tokenizer(LAB_MODELS[name]), name, ModelSettings(path="unused"), []) for name in ("A", "B")
    }


@pytest.fixture
def group(codecs) -> Callable[..., Group]:
    """A group of written responses. logprobs: of every token; a number for each response, or one for all."""

    def make(model: str, index: int, texts: Sequence[str], *, logprobs: Any = -0.5, stopped: bool = True) -> Group:
        codec = codecs[model]
        responses = []
        for text, logprob in zip(texts, np.broadcast_to(logprobs, len(texts)), strict=True):
            ids = codec.tokenizer.encode(text, add_special_tokens=False) + [codec.eos_id] * stopped
            responses.append(
                Response(
                    text=text,
                    token_ids=np.array(ids),
                    logprobs=np.full(len(ids), logprob, np.float32),
                    finish_reason="stop" if stopped else "length",
                    reward=float(RIGHT in text),
                )
            )
        return Group(model, prompt(index), responses)

    return make


@pytest.fixture
def write_log(tmp_path, codecs) -> Callable[..., Path]:
    """Groups by step as a rollout log of model B."""

    def write(steps: dict[int, Sequence[Group]], **sampling: Any) -> Path:
        root = tmp_path / "peer-log"
        for step, groups in steps.items():
            write_rollouts(
                root / step_file_name(step),
                run="peer",
                step=step,
                groups={"B": groups},
                sampling=SamplingSettings(**sampling),
                fingerprints={"B": codecs["B"].fingerprint},
            )
        return root

    return write


@pytest.fixture
def arguments(tmp_path) -> Callable[..., dict[str, Any]]:
    """GRPOConfig's keyword arguments: 4 prompts x 4 responses, two optimizer steps of two microbatches each."""

    def make(**changes: Any) -> dict[str, Any]:
        return {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 4,
            "num_generations": N,
            "max_completion_length": 30,
            "max_steps": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "shuffle_dataset": False,
            "dataloader_pin_memory": False,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **changes,
        }

    return make


@pytest.fixture
def make_trainer(pair, arguments) -> Callable[..., GraftTrainer]:
    """A GraftTrainer of model A (or `model`); `config` changes its arguments."""

    def make(*, model: str = "A", config: dict[str, Any] | None = None, data: Any = None, **keywords: Any) -> Any:
        return GraftTrainer(
            reward_funcs=keywords.pop("reward_funcs", verify),
            args=GraftConfig(**arguments(**(config or {}))),
            train_dataset=data or Dataset.from_dict({"prompt": TEXTS}),
            **load(pair[model]),
            **keywords,
        )

    return make

"""Warm-ups on questions of reasoning-gym."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graftrl.lab import questions
from graftrl.lab.models import LAB_MODELS
from graftrl.lab.pairs import REGIMES
from graftrl.lab.questions import _pad, _questions, warm_up_on_questions
from graftrl.lab.warmup import WarmupReport, WarmupSettings
from graftrl.tasks.config import ReasoningGymConfig

pytest.importorskip("reasoning_gym")


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> ReasoningGymConfig:
    monkeypatch.setattr(questions, "DEMONSTRATED", 400)
    monkeypatch.setattr(questions, "MEASURED", 24)
    config = REGIMES["gym"].task_config()
    assert isinstance(config, ReasoningGymConfig)
    return config.model_copy(update={"train_size": 40, "validation_size": 40})


def test_only_answers_and_their_end_are_learnt_and_padding_is_ignored() -> None:
    ids, targets = _pad([[5, 6, 7], [5]], [[8], [9, 4]], eos=1)
    assert ids.tolist() == [[5, 6, 7, 8], [5, 9, 4, 1]]
    assert targets.tolist() == [[-100, -100, 8, 1], [9, 4, 1, -100]]


def test_demonstrations_are_questions_with_their_answers(config: ReasoningGymConfig) -> None:
    families = [dataset.name for dataset in config.datasets]
    prompts, answers = _questions(config, families)
    assert [len(p) for p in prompts] == [len(a) for a in answers] == [200, 200]
    assert all(prompt.startswith("Calculate ") and prompt.endswith(".>") for prompt in prompts[0])
    left, sign, right = prompts[0][0].removeprefix("Calculate ").removesuffix(".>").split()
    assert int(answers[0][0]) == int(left) + (int(right) if sign == "+" else -int(right))


def test_a_warm_up_learns_and_is_the_same_every_time(config: ReasoningGymConfig, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    settings = WarmupSettings(steps=12, linear_steps=2, batch_size=8, samples=1, weak_share=0.1)
    try:
        first, second = (
            warm_up_on_questions(LAB_MODELS["A"], config, 0, tmp_path / run, settings) for run in ("one", "two")
        )
    finally:
        torch.set_num_threads(threads)
    assert first.losses == second.losses and first.losses[-1] < first.losses[0]
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()
    assert WarmupReport.read(tmp_path / "one") == first
    assert list(first.pass_at_1) == [dataset.name for dataset in config.datasets]

"""Warm-ups on questions of reasoning-gym."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graftrl.lab import questions
from graftrl.lab.models import LAB_MODELS
from graftrl.lab.pairs import REGIMES
from graftrl.lab.plan import VALIDATION_PROMPTS
from graftrl.lab.questions import _pad, _questions, warm_up_on_questions
from graftrl.lab.warmup import WarmupReport, WarmupSettings
from graftrl.tasks.config import ReasoningGymConfig
from graftrl.tasks.gym import build_reasoning_gym

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


def test_a_warm_up_leaves_out_all_that_runs_evaluate() -> None:
    assert REGIMES["gym"].task["validation_size"] == VALIDATION_PROMPTS


def test_validation_questions_are_not_shown(config: ReasoningGymConfig) -> None:
    families = [dataset.name for dataset in config.datasets]
    prompts, answers = _questions(config, families)
    shown = {prompt for of_family in prompts for prompt in of_family}
    assert shown.isdisjoint(prompt.text for prompt in build_reasoning_gym(config).validation)
    assert [len(p) for p in prompts] == [len(a) for a in answers] and min(map(len, prompts)) > 20
    by_text = {prompt.text: prompt for prompt in build_reasoning_gym(config.model_copy(update={
        "seed": config.seed + 1, "train_size": 400, "validation_size": 0})).train}  # fmt: skip
    assert all(by_text[p].reference == a for p, a in zip(prompts[0], answers[0], strict=True))


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

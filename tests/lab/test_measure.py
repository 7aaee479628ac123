"""What is measured after a run: estimates by hand, strong families, and one run measured for real."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from fake_runs import RECIPE
from rich.console import Console

from graftrl.config import load_recipe
from graftrl.errors import RunError
from graftrl.lab import measure
from graftrl.lab.measure import Measures, family_of, measure_missing, measured_prompts, read_measures, summarize
from graftrl.lab.programs import HiddenProgramsConfig, build_hidden_programs
from graftrl.rollout import Group, Response
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder


@pytest.fixture
def trained_run(tmp_path: Path, pair: dict[str, str]) -> Path:
    """One short step of two untrained models."""
    models = {name: {"path": path} for name, path in pair.items()}
    small = ("task.validation_size=24", "evaluation.prompts=24", "training.prompts_per_step=2", "training.steps=1",
             "training.group_size=2", "training.minibatch_prompts=2", "sampling.max_response_tokens=6")  # fmt: skip
    recipe = load_recipe(RECIPE, [f"models={json.dumps(models)}", "method=grpo", *small])
    run = RunFolder.create(tmp_path / "run", recipe)
    train(run, recipe, Silent())
    return run.root


def test_forgetting_counts_losses_in_families_that_were_strong_and_no_gains() -> None:
    start = {"a": 0.4, "b": 0.02, "c": 0.2, "d": 0.19}
    m = Measures(0.5, 0.9, 3.0, {"a": 0.1, "b": 0.0, "c": 0.9, "d": 0.0}, start)
    assert m.strong == ["a", "c"]  # at least half of .4
    assert m.forgotten == pytest.approx((0.3 + 0.0) / 2)
    assert m.strong_before == pytest.approx(0.3) and m.mean(strong=True) == pytest.approx(0.5)
    assert m.mean(strong=False) == pytest.approx(0.0)
    unknown = Measures(0.5, 0.9, 3.0, {"a": 0.1}, {})
    assert (unknown.strong, unknown.forgotten, unknown.strong_before, unknown.mean(strong=True)) == (
        [],
        0.0,
        None,
        None,
    )


def test_the_test_prompts_follow_those_that_select() -> None:
    assert measured_prompts(960) == slice(240, 720)
    assert measured_prompts(8) == slice(2, 8)


def test_estimates_and_entropy_by_hand() -> None:
    prompts = build_hidden_programs(HiddenProgramsConfig(validation_size=12)).validation[:2]
    logprobs = [np.full(3, -0.5, np.float32), np.full(1, -2.5, np.float32)]
    groups = [
        Group("A", prompt, [Response("x", np.arange(len(lp)), lp, "stop", float(i < k)) for i, lp in
                            enumerate(logprobs * 4)])
        for prompt, k in zip(prompts, (0, 2), strict=True)
    ]  # fmt: skip
    m = summarize(groups, {"a": 0.5})
    assert (m.pass1, m.pass8) == (0.125, 0.5)  # 0 and 2 of 8; one of two prompts is solved at all
    assert m.entropy == pytest.approx(2.0)  # 1.5 and 2.5 nats
    assert m.families == {"a": 0.0, "b": 0.25} and m.start == {"a": 0.5}
    assert family_of({"dataset": "gcd"}) == "gcd" and family_of({}) == "all"


def test_a_finished_run_is_measured_once_and_stays_as_it_was(
    trained_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in trained_run.rglob("*") if path.is_file()}
    found = measure.measure(trained_run)
    assert set(found) == {"A", "B"} and 0 <= found["A"].pass1 <= found["A"].pass8 <= 1
    assert found["A"].entropy > 5  # an untrained model is nearly uniform over tokens
    assert read_measures(trained_run) == found
    after = {path: path.read_bytes() for path in trained_run.rglob("*") if path.is_file()}
    assert after.pop(trained_run / measure.FILE) and after == before
    assert measure.measure(trained_run) == found
    monkeypatch.setattr(measure, "ProcessPoolExecutor", None)  # nothing is left to do
    measure_missing([trained_run], 2, Console(file=io.StringIO()))
    (trained_run / measure.FILE).write_text(json.dumps({"version": 0, "models": {}}))
    assert read_measures(trained_run) is None


def test_a_run_without_its_last_checkpoint_is_told(trained_run: Path) -> None:
    (checkpoint,) = (trained_run / "checkpoints").iterdir()
    checkpoint.rename(checkpoint.with_name("step-000007"))
    with pytest.raises(RunError, match="no checkpoint of the last step to measure"):
        measure.measure(trained_run)

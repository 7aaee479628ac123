"""Frozen models under Ray: KL to a reference and on-policy distillation, with two trainers and no vLLM."""

from __future__ import annotations

import pytest
from steps import METHODS, toy_recipe
from test_ray import STEPS, Replaying, assert_close, run_of

from graftrl.config import parse_recipe
from graftrl.logs.reader import RolloutLog
from graftrl.training import loop

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("method", [METHODS[1], METHODS[2]], ids=str)
def test_a_run_with_frozen_models_equals_the_local_engines_on_the_same_rollouts(pair, tmp_path, monkeypatch, method):
    content = toy_recipe(pair["A"], method, tmp_path / "expert").model_dump(mode="json", exclude_defaults=True)
    content |= {
        "threads": 1, "engine": "ray",
        "training": {**content["training"], "steps": STEPS},
        "ray": {"sampler": "transformers", "resources": {"A": {"trainers": 2}}, "timeout_s": 600},
    }  # fmt: skip
    on_ray = run_of(content, tmp_path / "ray")
    monkeypatch.setattr(Replaying, "log", RolloutLog(on_ray.root), raising=False)
    monkeypatch.setattr(loop, "open_engine", Replaying)
    local = run_of({**content, "engine": "local"}, tmp_path / "local")
    assert parse_recipe(content, "test").engine == "ray"
    for ours, theirs in zip(on_ray.read_metrics(), local.read_metrics(), strict=True):
        a, b = ours["models"]["A"], theirs["models"]["A"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3, abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        assert_close(a["token_means"], b["token_means"])
        assert a["trained_tokens"] == b["trained_tokens"] and a["sync_gap_max"] < 1e-4

"""Frozen models under Ray: KL to a reference and on-policy distillation, with two trainers and no vLLM."""

from __future__ import annotations

import pytest
from ray_runs import assert_close, replay, run_of
from steps import METHODS, toy_recipe

from graftrl.config import parse_recipe

pytestmark = pytest.mark.ray
STEPS = 3


@pytest.mark.parametrize("method", [METHODS[1], METHODS[2]], ids=str)
def test_a_run_with_frozen_models_equals_the_local_engines_on_the_same_rollouts(pair, tmp_path, method):
    content = toy_recipe(pair["A"], method, tmp_path / "expert").model_dump(mode="json")
    content |= {
        "threads": 1, "engine": "ray",
        "training": {**content["training"], "steps": STEPS},
        "ray": {"sampler": "transformers", "resources": {"A": {"trainers": 2}}, "timeout_s": 600},
    }  # fmt: skip
    on_ray = run_of(content, tmp_path / "ray")
    local = replay(content, on_ray, tmp_path / "local")
    assert parse_recipe(content, "test").engine == "ray"
    for ours, theirs in zip(on_ray.read_metrics(), local.read_metrics(), strict=True):
        a, b = ours["models"]["A"], theirs["models"]["A"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3, abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        assert_close(a["token_means"], b["token_means"])
        assert a["trained_tokens"] == b["trained_tokens"] and a["sync_gap_max"] < 1e-4

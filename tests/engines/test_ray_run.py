"""A whole GRAFT run of two policies on Ray, two trainers and a sampler each, against the local engine."""

import importlib.util

import pytest
from ray_runs import assert_same_numbers, assert_same_weights, recipe_of, replay, run_of, time_limit, weights
from safetensors.torch import load_file

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed: pip install 'graftrl[ray]'", allow_module_level=True)

STEPS = 2


def test_a_run_on_ray_equals_the_local_engines_on_the_same_rollouts(pair, tmp_path):
    content = recipe_of(pair, steps=STEPS)
    with time_limit(280):
        run = run_of(content, tmp_path / "ray")
    local = replay(content, run, tmp_path / "local")
    lines = run.read_metrics()
    assert len(lines) == STEPS
    for ours, theirs in zip(lines, local.read_metrics(), strict=True):
        assert_same_numbers(ours, theirs)
        for name in "AB":
            assert 0 <= ours["models"][name]["sync_gap_mean"] <= ours["models"][name]["sync_gap_max"] < 1e-4
            assert ours["models"][name]["old_logprobs"] == "generation"
    assert sum(stats["admitted"] for line in lines for stats in line["exchange"].values()) > 0
    for step in range(1, STEPS + 1):
        assert_same_weights(run, local, step)
    for name, path in pair.items():
        before, after = load_file(f"{path}/model.safetensors"), weights(run, STEPS, name)
        assert max(float((after[key] - before[key]).abs().max()) for key in after) > 1e-3

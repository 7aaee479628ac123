"""A whole GRAFT run of two policies on Ray: two gloo ranks and a vLLM sampler each, all on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from ray_runs import assert_same_numbers, assert_same_weights, recipe_of, replay, run_of, weights
from safetensors.torch import load_file

from graftrl.config import parse_recipe
from graftrl.engines.local import LocalEngine
from graftrl.lab.models import LAB_MODELS, build_model, save_model

pytestmark = pytest.mark.ray
STEPS = 3


@pytest.fixture(scope="module")
def wide_pair(tmp_path_factory):
    """The laboratory's models A and B with half as many heads: vLLM's kernels for CPUs need 32 dimensions of each."""
    root = tmp_path_factory.mktemp("wide")
    for name in "AB":
        model = replace(LAB_MODELS[name], heads=2)
        save_model(build_model(model, seed=3), model, root / name)
    return {name: str(root / name) for name in "AB"}


@pytest.fixture(scope="module")
def content(wide_pair):
    # new weights go to A's sampler by broadcast and to B's by handover; the test of faults has the way by hosts
    resources = {"A": {"trainers": 2}, "B": {"trainers": 2, "devices": "shared"}}
    ray = {"sampler": "vllm", "timeout_s": 1200, "resources": resources, "weight_sync": "direct"}
    return recipe_of(wide_pair, steps=STEPS, ray=ray)


@pytest.fixture(scope="module")
def on_ray(content, tmp_path_factory):
    return run_of(content, tmp_path_factory.mktemp("ray") / "run")


@pytest.fixture(scope="module")
def replayed(content, on_ray, tmp_path_factory):
    return replay(content, on_ray, tmp_path_factory.mktemp("local") / "run")


def test_losses_and_norms_equal_the_local_engines_on_the_same_rollouts(on_ray, replayed):
    for ours, theirs in zip(on_ray.read_metrics(), replayed.read_metrics(), strict=True):
        assert_same_numbers(ours, theirs)


def test_updated_weights_equal_the_local_engines_after_every_step(on_ray, replayed, wide_pair):
    for step in range(1, STEPS + 1):
        assert_same_weights(on_ray, replayed, step)
    for name, path in wide_pair.items():
        first, last = load_file(f"{path}/model.safetensors"), weights(on_ray, STEPS, name)
        assert max((last[key] - first[key]).abs().max() for key in last) > 1e-3


def test_peers_responses_are_exchanged(on_ray):
    assert sum(stats["admitted"] for line in on_ray.read_metrics() for stats in line["exchange"].values()) > 0


def test_the_sampler_follows_the_trainer_through_every_weight_sync(on_ray):
    for line in on_ray.read_metrics():
        for name in "AB":
            model = line["models"][name]
            assert 0 <= model["sync_gap_mean"] <= model["sync_gap_max"] < 1e-4
            assert model["old_logprobs"] == "generation"
    assert on_ray.read_metrics()[0]["models"]["A"]["generation_gap"] < 1e-4


def test_a_run_goes_on_with_another_number_of_workers_and_on_the_other_engine(on_ray, content, tmp_path):
    """A checkpoint is whole: who wrote it does not matter."""
    folder = on_ray.checkpoint(STEPS)
    recipe = parse_recipe({**content, "engine": "local"}, "test")
    local = LocalEngine(recipe, folder)
    for name in "AB":
        saved = weights(on_ray, STEPS, name)
        ours = local.policies[name].loaded.causal_lm.state_dict()
        assert all(torch.equal(ours[key], value) for key, value in saved.items())
        moments = local.policies[name].optimizer.state_dict()["state"]
        assert len(moments) == len(local.policies[name].parameters) and all(
            np.isfinite(float(of_one["exp_avg_sq"].sum())) for of_one in moments.values()
        )

"""Parts of the ray engine that need neither ray nor vllm."""

import ast
import itertools
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import graftrl
from graftrl.config import parse_recipe
from graftrl.engines.config import PolicyResources, RaySettings
from graftrl.engines.ray.engine import _bundles, _check_samplable, _probes, _slices
from graftrl.engines.ray.trainer import merge_stats
from graftrl.errors import ConfigError
from graftrl.policies.hf import UpdateStats
from graftrl.rollout import Row


def test_statistics_of_ranks_add_up_where_each_has_a_part():
    def stats(loss, clipped, passed, signal, count):
        return UpdateStats(
            optimizer_steps=1, losses=[loss], grad_norms=[0.7], learning_rate=0.1, tokens=Counter(own=9),
            clipped_tokens=Counter(own=clipped), token_sums={"signal": signal}, token_counts=Counter(signal=count),
            passed_tokens=passed,
        )  # fmt: skip

    summary = merge_stats([stats(0.25, 2, 30, 1.0, 4), stats(-1.0, 1, 12, 2.0, 2)]).summary()
    assert summary["loss"] == -0.75 and summary["grad_norm"] == 0.7 and summary["optimizer_steps"] == 1
    assert summary["trained_tokens"] == {"own": 9} and summary["clipped_tokens"] == {"own": 3}
    assert summary["token_means"] == {"signal": 0.5} and summary["passed_tokens"] == 42


@pytest.mark.parametrize(("count", "samplers"), [(7, 3), (2, 4), (0, 2), (6, 1)])
def test_prompts_are_cut_into_near_equal_parts_in_their_order(count, samplers):
    cut = [list(range(count))[part] for part in _slices(count, samplers)]
    assert len(cut) == samplers and [*itertools.chain(*cut)] == list(range(count))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


def test_a_policy_asks_for_a_device_a_trainer_and_for_those_of_its_own_samplers():
    own = PolicyResources(trainers=2, samplers=1, tensor_parallel=2)
    assert _bundles(own, "GPU") == [{"GPU": 1.0}, {"GPU": 1.0}, {"GPU": 2.0}]
    assert _bundles(PolicyResources(trainers=2, samplers=2, devices="shared"), "CPU") == [{"CPU": 1.0}, {"CPU": 1.0}]


def test_samplers_on_shared_devices_must_fit_there():
    with pytest.raises(ValueError, match="at most trainers"):
        PolicyResources(trainers=1, samplers=2, devices="shared")
    with pytest.raises(ValueError, match="tensor_parallel must be 1"):
        PolicyResources(trainers=2, tensor_parallel=2, devices="shared")
    assert (
        PolicyResources(devices="shared").sampler_memory == 0.4
        and PolicyResources(memory_share=0.6).sampler_memory == 0.6
    )


def test_the_tolerance_of_a_sync_follows_the_precision_unless_it_is_given():
    assert RaySettings().tolerance("float32") < RaySettings().tolerance("bfloat16") < 1
    assert RaySettings(sync_tolerance=0.5).tolerance("float32") == 0.5


def test_the_longest_responses_are_compared_after_a_sync():
    rows = [Row(f"p{n}", np.arange(3), np.arange(n), 0.0, "own", "m") for n in (2, 9, 1, 7, 5, 3)]
    assert [len(response) for _, response in _probes(rows)] == [9, 7, 5, 3]


@pytest.fixture
def content(pair):
    return {
        "name": "toy", "engine": "ray", "method": "grpo", "models": {"A": {"path": pair["A"]}},
        "task": {"kind": "hidden_programs"}, "training": {"steps": 1, "prompts_per_step": 4, "minibatch_prompts": 4},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ray": {"resources": {"Z": {}}}}, "names 'Z', which is none of the models"),
        ({"method": "es"}, "cannot search weights"),
        ({"models": {"A": {"path": "x", "lora": {}}}}, "adapters"),
        ({"models": {"A": {"path": "x.gguf"}}}, "GGUF"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_before_anything_loads(content, change, said):
    with pytest.raises(ConfigError, match=said):
        parse_recipe({**content, **change}, "test")
    assert parse_recipe(content, "test").ray == RaySettings()


def test_nothing_imports_ray_or_vllm_before_it_is_needed():
    found = []
    for file in Path(graftrl.__file__).parent.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found += [(file.name, name) for name in names if name.split(".")[0] in ("ray", "vllm")]
    assert found == []


@pytest.mark.parametrize(
    ("there", "sampler", "missing"),
    [
        ((), "vllm", "needs the package ray"),
        (("ray",), "vllm", "needs the package vllm"),
        (("ray",), "transformers", ""),
    ],
)
def test_only_the_packages_that_a_run_needs_must_be_there(there, sampler, missing, monkeypatch):
    from graftrl.engines.ray import engine

    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    if not missing:
        assert engine._import_ray(sampler).__name__ == "ray"
        return
    with pytest.raises(ConfigError, match=missing) as error:
        engine._import_ray(sampler)
    assert "\n" not in str(error.value)


def test_a_transformers_sampler_has_one_device():
    with pytest.raises(ValueError, match=r"resources\.A\.tensor_parallel is 2; use vllm"):
        RaySettings(sampler="transformers", resources={"A": PolicyResources(tensor_parallel=2)})


def test_what_is_lost_is_named_and_samplers_alone_are_told_apart():
    from graftrl.engines.ray.engine import _loss, _SamplersLost, _Worker

    sampler, trainer = _Worker("A", "sampler", 1), _Worker("B", "trainer", 0)
    alone, both = _loss({sampler: "died"}), _loss({sampler: "died", trainer: "no answer within 3 s"})
    assert isinstance(alone, _SamplersLost) and alone.models == {"A"} and {*alone.which} == {sampler}
    assert not isinstance(both, _SamplersLost) and both.models == {"A", "B"}
    assert str(both) == "sampler 1 of model 'A' (died); trainer 0 of model 'B' (no answer within 3 s)"


def test_a_recipe_goes_on_without_a_model_that_its_method_can_spare(content):
    recipe = parse_recipe({**content, "models": {name: {"path": name} for name in "AB"}, "method": "graft"}, "test")
    assert [*recipe.without(["B"]).models] == ["A"] and recipe.without([]) is recipe
    with pytest.raises(ConfigError, match="without A, B the run cannot go on: no model is left"):
        recipe.without(["A", "B"])


def test_a_checkpoint_in_parts_is_no_model_for_vllm(content, tmp_path):
    (tmp_path / "shards").mkdir()
    parts = {**content, "models": {"A": {"path": str(tmp_path)}}}
    with pytest.raises(ConfigError, match="in parts, which vLLM does not read; make it whole with 'graftrl export'"):
        _check_samplable(parse_recipe(parts, "test"))
    _check_samplable(parse_recipe({**parts, "ray": {"sampler": "transformers"}}, "test"))
    _check_samplable(parse_recipe(content, "test"))

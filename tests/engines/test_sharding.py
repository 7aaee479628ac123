"""A sharded policy in one process: a mesh of one rank takes every path of FSDP but the traffic."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers as hf
from tiny_models import character_tokenizer, grpo_objective, random_rows, tiny_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from graftrl.engines.ray.sharding import ShardedRanks
from graftrl.policies.config import ModelSettings, OptimizerSettings, SamplingSettings
from graftrl.policies.hf import HFPolicy

OPTIMIZER = OptimizerSettings(lr=3e-3, eps=1e-5, weight_decay=0.1, max_grad_norm=0.05)


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def build(kind):
        path = tmp_path_factory.mktemp("sharded") / kind
        torch.manual_seed(0)
        hf.AutoModelForCausalLM.from_config(tiny_config(kind)).save_pretrained(path)
        character_tokenizer().save_pretrained(path)
        return path

    return build


def policies(path, mesh, checkpoint=None, **options):
    settings = ModelSettings(path=str(path), device="cpu", microbatch_tokens=40, optimizer=OPTIMIZER, **options)
    limits = SamplingSettings(max_response_tokens=12)
    return (
        HFPolicy("m", settings, limits, checkpoint),
        HFPolicy("m", settings, limits, checkpoint, ranks=ShardedRanks(mesh)),
    )


def whole(policy):
    return policy.ranks.whole_weights(policy.loaded.causal_lm) or policy.loaded.causal_lm.state_dict()


@pytest.mark.parametrize(("kind", "checkpointing"), [("llama", True), ("llama_tied", False), ("gpt2", False)])
def test_scores_losses_and_weights_equal_those_of_one_process(mesh, folder, kind, checkpointing):
    plain, sharded = policies(folder(kind), mesh, gradient_checkpointing=checkpointing)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters)
    minibatches = [random_rows(7, seed=1), random_rows(1, seed=2), random_rows(6, seed=3)]
    for policy in (plain, sharded):
        policy.stats = policy.update(minibatches, lambda _: grpo_objective())
    np.testing.assert_allclose(sharded.stats.losses, plain.stats.losses, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(sharded.stats.grad_norms, plain.stats.grad_norms, rtol=1e-4)
    assert sharded.stats.tokens == plain.stats.tokens and sharded.stats.clipped_tokens == plain.stats.clipped_tokens
    ours, theirs = whole(sharded), whole(plain)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=2e-6)
    rows = random_rows(5, seed=9)
    for a, b in zip(sharded.score(rows), plain.score(rows), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_tied_head_is_one_tensor_of_the_whole_weights(mesh, folder):
    _, sharded = policies(folder("llama_tied"), mesh)
    weights = whole(sharded)
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]


@pytest.mark.parametrize("sharded_writes", [True, False])
def test_either_kind_of_policy_goes_on_from_the_others_checkpoint(mesh, folder, tmp_path, sharded_writes):
    path = folder("llama")
    writer = policies(path, mesh)[sharded_writes]
    writer.update([random_rows(5, seed=4)], lambda _: grpo_objective())
    writer.save(tmp_path)
    reader = policies(path, mesh, checkpoint=tmp_path)[not sharded_writes]
    for policy in (writer, reader):
        policy.update([random_rows(6, seed=5)], lambda _: grpo_objective())
    for name, value in whole(writer).items():
        torch.testing.assert_close(whole(reader)[name], value, rtol=1e-4, atol=2e-6)


def test_bfloat16_gathers_weights_in_that_precision_and_keeps_float32_masters(mesh, folder):
    plain, sharded = policies(folder("llama"), mesh, dtype="bfloat16")
    rows = random_rows(6, seed=1)
    for policy in (plain, sharded):
        policy.stats = policy.update([rows], lambda _: grpo_objective())
    assert all(parameter.dtype == torch.float32 for parameter in sharded.parameters)
    np.testing.assert_allclose(sharded.stats.losses, plain.stats.losses, atol=0.02)


def test_scores_after_an_update_are_of_the_new_weights(mesh, folder):
    plain, sharded = policies(folder("llama"), mesh)
    rows = random_rows(4, seed=6)
    sharded.score(rows)
    for policy in (plain, sharded):
        policy.update([random_rows(8, seed=7)] * 3, lambda _: grpo_objective())
    for a, b in zip(sharded.score(rows), plain.score(rows), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)

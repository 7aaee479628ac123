"""A trainer's process, here in this one: what the local engine was given, it does the same with."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from steps import METHODS, local_step, toy_recipe

from graftrl.engines.ray import engine as ray_engine
from graftrl.engines.ray.engine import _placed
from graftrl.engines.ray.trainer import Trainer
from graftrl.errors import RunError
from graftrl.policies import shards


@pytest.fixture
def trainer():
    """A trainer of one rank, whose process group ends with the test."""
    one = Trainer("A", 0, 1, None, 60.0)
    one._store = dist.HashStore()
    yield one
    dist.destroy_process_group()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_step_equals_the_local_engines(trainer, tmp_path, monkeypatch, pair, method):
    asked = toy_recipe(pair["A"], method, tmp_path / "expert")
    seen = local_step(asked, tmp_path / "run", monkeypatch)
    opened = trainer.open(("", 0), _placed(asked, "cpu"), None)
    assert opened.prepend_bos.keys() == {"A", *asked.scorers}
    stats = trainer.update(seen["minibatches"], seen["objective_of"])
    np.testing.assert_allclose(stats.losses, seen["stats"].losses, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(stats.grad_norms, seen["stats"].grad_norms, rtol=1e-4)
    assert stats.tokens == seen["stats"].tokens and stats.clipped_tokens == seen["stats"].clipped_tokens
    ours = trainer._policy.ranks.whole_weights(trainer._policy.loaded.causal_lm)
    for key, theirs in seen["engine"].policies["A"].loaded.causal_lm.state_dict().items():
        torch.testing.assert_close(ours[key], theirs, rtol=1e-3, atol=2e-5)
    rows = seen["minibatches"][0]
    for scorer in asked.scorers:
        for a, b in zip(trainer.read(scorer, rows), seen["engine"].score(scorer, rows), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_trainer_writes_its_part_beside_the_next_update(trainer, tmp_path, pair):
    placed = _placed(toy_recipe(pair["A"], {"name": "grpo"}, tmp_path), "cpu")
    trainer.open(("", 0), placed, None)
    before = {name: p.full_tensor().clone() for name, p in trainer._policy.loaded.causal_lm.named_parameters()}
    trainer.save(tmp_path / "A", True)
    with torch.no_grad():
        for parameter in trainer._policy.parameters:
            parameter.add_(1.0)
    assert trainer.written() == ["shard-00001-model-00001-of-00001.safetensors"]
    assert shards.signed(tmp_path / "A", 1) and not shards.signed(tmp_path / "A", 2)
    trainer.load(placed, tmp_path / "A")  # as after lost workers
    for name, parameter in trainer._policy.loaded.causal_lm.named_parameters():
        assert torch.equal(parameter.full_tensor(), before[name]), name


def test_a_part_that_cannot_be_written_is_told_and_never_signed(trainer, tmp_path, pair):
    placed = _placed(toy_recipe(pair["A"], {"name": "grpo"}, tmp_path), "cpu")
    trainer.open(("", 0), placed, None)
    (tmp_path / "A").mkdir()
    (tmp_path / "A" / "shards").write_text("in the way")
    trainer.save(tmp_path / "A", True)
    with pytest.raises(RuntimeError, match="shards"):
        trainer.written()
    trainer.load(placed, None)  # the failed write is forgotten
    trainer.save(tmp_path / "B", True)
    assert trainer.written() and shards.signed(tmp_path / "B", 1)


def test_the_driver_takes_a_checkpoint_for_written_when_it_sees_all_parts(tmp_path, monkeypatch):
    """Two trainers that write to different disks: the second one's file is not where the driver looks."""
    engine = object.__new__(ray_engine.RayEngine)
    told = [["shard-00001.safetensors"], ["shard-00002.safetensors"]]
    asked = [SimpleNamespace(written=SimpleNamespace(remote=lambda files=files: files)) for files in told]
    engine._workers = {"A": SimpleNamespace(trainers=asked)}
    engine._all = lambda pending, limit_s=None: pending
    folder = tmp_path / "A" / "shards"
    folder.mkdir(parents=True)
    (folder / "shard-00001.safetensors").touch()
    writing = ray_engine.Parts(engine, tmp_path)
    assert not writing.done(wait=False)
    monkeypatch.setattr(ray_engine, "_SECONDS_TO_BE_SEEN", 0.0)
    with pytest.raises(RunError, match=r"shard-00002\.safetensors was written on another node and is not here"):
        writing.done(wait=True)
    (folder / "shard-00002.safetensors").touch()
    assert writing.done(wait=True)
    for rank in (1, 2):
        assert not writing.done(wait=False)
        (folder / f"written-0000{rank}").touch()
    assert writing.done(wait=False)

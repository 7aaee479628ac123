"""A trainer's process, here in this one: what the local engine was given, it does the same with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from steps import METHODS, local_step, toy_recipe

from graftrl.engines.ray.engine import _placed
from graftrl.engines.ray.trainer import Trainer


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

"""Two gloo ranks with frozen models beside them: scorers and references, whole on each rank, change no number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from actors import answers, opened
from steps import METHODS, local_step, toy_recipe

from graftrl.engines.ray.engine import _placed
from graftrl.engines.ray.trainer import merge_stats


@pytest.mark.parametrize("method", METHODS[1:], ids=str)
def test_a_step_of_two_ranks_equals_the_local_engines(tmp_path, monkeypatch, pair, method):
    asked = toy_recipe(pair["A"], method, tmp_path / "expert")
    seen = local_step(asked, tmp_path / "run", monkeypatch)
    trainers = opened(_placed(asked, "cpu"), "A", 2)
    try:
        of_ranks = answers(t.ask("step", seen["minibatches"], asked) for t in trainers)
        assert all(one.passed_tokens > 0 for one in of_ranks)  # both have a part of it
        stats, theirs = merge_stats(of_ranks), seen["stats"]
        np.testing.assert_allclose(stats.losses, theirs.losses, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(stats.grad_norms, theirs.grad_norms, rtol=1e-4)
        assert stats.tokens == theirs.tokens and stats.clipped_tokens == theirs.clipped_tokens
        assert stats.token_counts == theirs.token_counts
        for name, value in theirs.token_sums.items():
            assert stats.token_sums[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
        ours = answers(t.ask("whole") for t in trainers)[0]
        for key, value in seen["engine"].policies["A"].loaded.causal_lm.state_dict().items():
            np.testing.assert_allclose(ours[key], value.numpy(), rtol=1e-3, atol=2e-5)
        rows = seen["minibatches"][0]
        for scorer in asked.scorers:
            halves = answers(t.ask("read", scorer, rows[k::2]) for k, t in enumerate(trainers))
            with torch.no_grad():
                whole = seen["engine"].score(scorer, rows)
            for k, half in enumerate(halves):
                for a, b in zip(half, whole[k::2], strict=True):
                    np.testing.assert_allclose(a, b, atol=2e-5)
    finally:
        for trainer in trainers:
            trainer.end()

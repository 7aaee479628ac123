"""HFPolicy.update against a plain implementation: full logits, one row at a time, AdamW written out."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tiny_models import grpo_objective, quick, random_rows, weights

from graftrl.errors import NumericsError
from graftrl.objective import Objective, Term
from graftrl.objective.terms import TokenLoss
from graftrl.policies.config import OptimizerSettings


class Reference:
    """One model in float64 with AdamW (Loshchilov and Hutter, 2019) and clipping of the global norm."""

    def __init__(self, causal_lm, optimizer: OptimizerSettings):
        self.model = copy.deepcopy(causal_lm).double()
        self.parameters = list(self.model.parameters())
        self.o, self.t = optimizer, 0
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]

    def step(self, rows):
        self.model.zero_grad()
        tokens = sum(row.loss_tokens for row in rows)
        loss = torch.zeros((), dtype=torch.float64)
        for row in rows:
            ids = torch.from_numpy(np.concatenate([row.prompt_token_ids, row.response_token_ids]))
            logits = self.model(input_ids=ids[None]).logits[0].double()
            for t, (target, keep) in enumerate(zip(row.response_token_ids, row.loss_mask, strict=True)):
                if not keep:
                    continue
                logprob = logits[len(row.prompt_token_ids) + t - 1].log_softmax(-1)[target]
                ratio = torch.exp(logprob - float(row.old_logprobs[t]))
                a = float(np.broadcast_to(row.advantages, row.loss_mask.shape)[t])
                loss = loss - row.weight * torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a) / tokens
        loss.backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in self.parameters))
        self.t += 1
        (beta1, beta2), lr = self.o.betas, self.o.lr
        with torch.no_grad():
            for p, m, v in zip(self.parameters, self.m, self.v, strict=True):
                g = p.grad * min(1.0, self.o.max_grad_norm / float(norm + 1e-6))
                m.mul_(beta1).add_(g, alpha=1 - beta1)
                v.mul_(beta2).add_(g.square(), alpha=1 - beta2)
                p.mul_(1 - lr * self.o.weight_decay)
                p.sub_(lr * (m / (1 - beta1**self.t)) / ((v / (1 - beta2**self.t)).sqrt() + self.o.eps))
            return float(loss.detach()), float(norm)


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gpt2", "gemma2", "granite"])
@pytest.mark.parametrize("max_grad_norm", [0.05, 100.0])
def test_two_grpo_steps_equal_the_reference(policy, kind, max_grad_norm):
    # eps above float32's error in a gradient: Adam's first step is otherwise the sign of rounding noise
    optimizer = OptimizerSettings(lr=3e-3, eps=1e-5, weight_decay=0.1, max_grad_norm=max_grad_norm)
    p = policy(kind, optimizer=optimizer, microbatch_tokens=40)
    minibatches = [random_rows(6, seed=1), random_rows(5, seed=2)]
    minibatches[0][0].loss_mask[0] = len(minibatches[0][0].loss_mask) == 1
    length = len(minibatches[1][1].response_token_ids)
    minibatches[1][1].advantages = np.linspace(-1, 1, length, dtype=np.float32)
    reference = Reference(p.loaded.causal_lm, optimizer)
    expected = [reference.step(rows) for rows in minibatches]
    before = weights(p)
    stats = p.update(minibatches, lambda _: grpo_objective())
    np.testing.assert_allclose(stats.losses, [loss for loss, _ in expected], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(stats.grad_norms, [norm for _, norm in expected], rtol=1e-4)
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(p), strict=True))
    for ours, theirs in zip(p.parameters, reference.parameters, strict=True):
        torch.testing.assert_close(ours.detach().double(), theirs.detach(), rtol=1e-4, atol=2e-5)


def test_clipped_tokens_are_counted(policy):
    p = policy("llama")
    rows = random_rows(3)
    for row, scores in zip(rows, p.score(rows), strict=True):
        row.old_logprobs, row.advantages = scores, 1.0
    rows[0].old_logprobs = rows[0].old_logprobs - 1.0  # ratio e > 1.28, to be raised: clipped
    rows[1].old_logprobs = rows[1].old_logprobs + 1.0  # ratio 1/e < 0.8, to be raised: not clipped
    stats = p.update([rows], lambda _: grpo_objective())
    assert stats.clipped_tokens["own"] == rows[0].loss_tokens
    assert stats.tokens["own"] == sum(row.loss_tokens for row in rows)
    assert stats.summary()["clip_fraction"]["own"] == pytest.approx(rows[0].loss_tokens / stats.tokens["own"])


def test_a_rows_own_clip_bound_reaches_the_loss(policy):
    seen = []

    def loss(batch):
        seen.append(batch.clip_high_B)
        return TokenLoss(-batch.logprobs_BT)

    p = policy("llama", optimizer=quick(), microbatch_tokens=10_000)
    rows = random_rows(3)
    p.update([rows], lambda _: Objective((Term(("own",), loss),)))
    assert seen == [None]
    rows[1].clip_high = 0.5
    p.update([rows], lambda _: Objective((Term(("own",), loss),)))
    assert torch.isnan(seen[1]).sum() == 2 and seen[1][~torch.isnan(seen[1])].tolist() == [0.5]


@pytest.mark.parametrize("microbatch_tokens", [20, 10_000])
def test_diagnostics_of_a_token_loss_are_averaged_over_its_own_loss_tokens(policy, microbatch_tokens):
    def loss(batch):
        return TokenLoss(-batch.logprobs_BT, means_BT={"advantage": batch.advantages_BT})

    p = policy("llama", optimizer=quick(), microbatch_tokens=microbatch_tokens)
    rows = random_rows(4)
    for row, kind, advantage in zip(rows, ("sft", "own", "sft", "sft"), (1.0, 50.0, 2.0, 3.0), strict=True):
        row.kind, row.advantages, row.weight = kind, advantage, 1.0
    rows[3].loss_mask[:] = False
    terms = Term(("own",), lambda batch: TokenLoss(-batch.logprobs_BT)), Term(("sft",), loss)
    stats = p.update([rows], lambda _: Objective(terms))
    lengths = [rows[0].loss_tokens, rows[2].loss_tokens]
    assert stats.summary()["token_means"] == {"advantage": pytest.approx(np.average([1.0, 2.0], weights=lengths))}


def test_warmup_scales_the_learning_rate(policy):
    p = policy("llama", optimizer=OptimizerSettings(lr=1e-3, warmup_steps=4))
    rates = [p.update([random_rows(3, seed=i)], lambda _: grpo_objective()).learning_rate for i in range(6)]
    np.testing.assert_allclose(rates, [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])


def test_nonfinite_gradients_are_skipped_then_refused(policy):
    def broken(batch):
        return TokenLoss(batch.logprobs_BT * float("nan"))

    p = policy("llama", optimizer=quick())
    before = weights(p)
    nan = Objective((Term(("own",), broken),))
    stats = p.update([random_rows(2)] * 9, lambda _: nan)
    assert (stats.skipped_nonfinite, stats.optimizer_steps) == (9, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(p), strict=True))
    p.update([random_rows(2)], lambda _: grpo_objective())
    assert p.skipped_in_a_row == 0 and all(torch.isfinite(w).all() for w in weights(p))
    with pytest.raises(NumericsError, match="10 updates in a row"):
        p.update([random_rows(2)] * 10, lambda _: nan)


def test_reference_logprobs_are_those_before_training(policy):
    seen = []

    def loss(batch):
        seen.append((batch.ref_logprobs_BT.clone(), batch.mask_BT.clone()))
        return TokenLoss(-batch.logprobs_BT)

    objective = Objective((Term(("own",), loss),), needs_reference=True)
    for settings in ({}, {"lora": {"rank": 2}}):
        p = policy("llama", optimizer=quick(), **settings)
        rows = random_rows(4)
        start = p.score(rows)
        p.update([random_rows(6, seed=9)] * 3, lambda _: grpo_objective())
        assert max(np.abs(a - b).max() for a, b in zip(start, p.score(rows), strict=True)) > 1e-4
        for a, b in zip(start, p.score_reference(rows), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        seen.clear()
        p.update([rows], lambda _: objective)
        got = np.sort(np.concatenate([ref[mask].numpy() for ref, mask in seen]))
        np.testing.assert_allclose(got, np.sort(np.concatenate(start)), atol=1e-5)


def test_bfloat16_keeps_float32_weights_that_small_updates_reach(policy):
    p = policy("llama", dtype="bfloat16", optimizer=OptimizerSettings(lr=1e-6))
    assert {parameter.dtype for parameter in p.parameters} == {torch.float32}
    before = weights(p)
    p.update([random_rows(6)], lambda _: grpo_objective())
    moved = torch.cat([(a - b).abs().flatten() for a, b in zip(before, weights(p), strict=True)])
    assert (moved > 0).float().mean() > 0.5 and moved.max() < 1e-4
    assert {s.dtype for state in p.optimizer.state.values() for s in state.values()} == {torch.float32}


def test_bfloat16_gradient_is_close_to_float32(policy):
    from tiny_models import gradients

    rows = random_rows(8)
    exact = torch.cat([g.flatten() for g in gradients(policy("llama"), rows)])
    rounded = torch.cat([g.flatten() for g in gradients(policy("llama", dtype="bfloat16"), rows)])
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.98


def test_bfloat16_generation_gap_is_reported(policy):
    from tiny_models import prompts

    from graftrl.rollout import Row

    p = policy("llama", dtype="bfloat16")
    groups = p.sample(prompts("a", "what is 7+5?"), 6, seed=0)
    rows = [
        Row(g.prompt.id, p.codec.prompt_token_ids(g.prompt), r.token_ids, 1.0, "own", "m", old_logprobs=r.logprobs)
        for g in groups
        for r in g.responses
    ]
    assert 1e-4 < p.generation_gap(rows) < 0.5
    assert p.generation_gap([]) == 0.0

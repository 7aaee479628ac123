"""Padding and cutting, and that neither they nor skipped rows change the gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ARCHITECTURES, EOS, gradients, grpo_objective, quick, random_rows, weights

from graftrl.objective import Objective, Term, sequence_mean
from graftrl.objective.terms import TokenLoss
from graftrl.policies.hf import UpdateStats
from graftrl.policies.microbatch import cut, pad
from graftrl.rollout import Row

CPU = torch.device("cpu")


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_cut_keeps_every_row_once_within_the_budget(lengths, budget):
    batches = cut(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


def test_mask_comes_from_lengths_not_from_ids():
    """Padding is the EOS id 2: only the sampled 2 counts."""
    short = Row("p0", np.array([3, 4]), np.array([5, 7, EOS]), 1.0, "own", "m")
    long = Row("p1", np.array([3]), np.array([5, 7, 6, 6, 8]), 1.0, "own", "m")
    padded = pad([short, long], CPU)
    assert padded.mask_BT.tolist() == [[True, True, True, False, False], [True] * 5]
    assert padded.token_ids_BS[0, :5].tolist() == [3, 4, 5, 7, EOS]
    assert padded.targets_N.tolist() == [5, 7, EOS, 5, 7, 6, 6, 8]
    assert padded.token_ids_BS.flatten()[padded.positions_N].tolist() == [4, 5, 7, 3, 5, 7, 6, 6]


def test_scatter_puts_values_back_and_zero_on_padding():
    rows = [Row("p", np.array([3]), np.array([5] * n), 1.0, "own", "m") for n in (2, 4)]
    values = torch.arange(1.0, 7.0, requires_grad=True)
    table = pad(rows, CPU).scatter(values)
    assert table.tolist() == [[1, 2, 0, 0], [3, 4, 5, 6]]
    table.sum().backward()
    assert values.grad.tolist() == [1] * 6


def test_masked_tokens_inside_a_row_stay_out():
    mask = np.array([False, True, False])
    row = Row("p", np.array([3]), np.array([5, 6, 7]), 1.0, "own", "m", loss_mask=mask)
    assert pad([row], CPU).mask_BT.tolist() == [mask.tolist()]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_any_microbatch_budget_gives_the_same_gradient(policy, kind):
    rows = random_rows(11)
    whole = gradients(policy(kind, microbatch_tokens=10_000), rows)
    assert max(float(g.abs().max()) for g in whole) > 1e-4
    for budget in (1, 20, 60):
        for got, expected in zip(gradients(policy(kind, microbatch_tokens=budget), rows), whole, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_logit_elements_do_not_change_the_gradient(policy):
    rows = random_rows(7)
    whole = gradients(policy("llama"), rows)
    for got, expected in zip(gradients(policy("llama", logit_elements=100), rows), whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("budget", [1, 10_000])
def test_rows_with_advantage_zero_count_but_need_no_pass(policy, budget):
    rows = random_rows(12)
    p = policy("llama", microbatch_tokens=budget)
    p.passes.longest_shared = 0  # rows pass whole
    stats = UpdateStats()
    p._accumulate(rows, grpo_objective(), stats)
    passed = [row for row in rows if row.advantages != 0]
    assert 0 < len(passed) < len(rows)
    assert stats.passed_tokens == sum(len(r.prompt_token_ids) + len(r.response_token_ids) for r in passed)
    skipping = gradients(p, rows)
    for got, expected in zip(skipping, gradients(p, rows, grpo_objective(skip=False)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)


def test_token_mean_divides_by_all_tokens_of_the_minibatch(policy):
    """10 tokens at +1 in one microbatch and 2 at -1 in another: 8 / 12 at ratio 1, for every split."""
    p = policy("llama")
    rows = [
        Row("p0", np.array([3, 4]), np.arange(5, 15), 1.0, "own", "m"),
        Row("p1", np.array([3]), np.array([6, 7]), -1.0, "own", "m"),
    ]
    for row, scores in zip(rows, p.score(rows), strict=True):
        row.old_logprobs = scores
    for budget in (1, 24, 100):
        stats = UpdateStats()
        loss = policy("llama", microbatch_tokens=budget)._accumulate(rows, grpo_objective(), stats)
        assert loss == pytest.approx(-8 / 12, abs=1e-5)


def test_weight_scales_the_loss_and_not_the_count(policy):
    p = policy("llama")
    rows = random_rows(2)
    for row, scores in zip(rows, p.score(rows), strict=True):
        row.old_logprobs, row.advantages, row.weight = scores, 1.0, 1.0
    rows[0].weight = 0.25
    tokens = [row.loss_tokens for row in rows]
    loss = p._accumulate(rows, grpo_objective(), UpdateStats())
    assert loss == pytest.approx(-(0.25 * tokens[0] + tokens[1]) / sum(tokens), abs=1e-5)


def test_two_terms_add_up(policy):
    """A surrogate on own rows and a likelihood on peer rows, each with its own reduction and coefficient."""
    rows = random_rows(5) + random_rows(3, seed=1, kind="sft")
    surrogate = grpo_objective().terms[0]
    likelihood = Term(("sft",), lambda b: TokenLoss(-b.logprobs_BT), sequence_mean, coefficient=0.1)
    both = Objective((surrogate, likelihood))
    whole = gradients(policy("llama"), rows, both)
    for got, expected in zip(gradients(policy("llama", microbatch_tokens=1), rows, both), whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    p = policy("llama")
    first = gradients(p, rows[:5], Objective((surrogate,)))
    second = gradients(p, rows[5:], Objective((likelihood,)))
    for a, b, expected in zip(first, second, whole, strict=True):
        torch.testing.assert_close(a + b, expected, rtol=1e-4, atol=1e-6)


def test_a_fully_masked_minibatch_is_no_update(policy):
    p = policy("llama", optimizer=quick())
    rows = random_rows(3)
    for row in rows:
        row.loss_mask = np.zeros_like(row.loss_mask)
    before = weights(p)
    stats = p.update([rows], lambda _: grpo_objective())
    assert (stats.skipped_empty, stats.optimizer_steps, p.optimizer_steps) == (1, 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(p), strict=True))


def test_a_minibatch_of_zero_advantages_still_steps(policy):
    """As if every row had been passed: momentum moves the weights and decays."""
    zero = random_rows(4)
    for row in zero:
        row.advantages = 0.0
    minibatches = [random_rows(6, seed=2), zero, random_rows(6, seed=3)]
    skipping, naive = policy("llama", optimizer=quick()), policy("llama", optimizer=quick())
    stats = skipping.update(minibatches, lambda _: grpo_objective())
    naive.update(minibatches, lambda _: grpo_objective(skip=False))
    assert stats.optimizer_steps == 3 and stats.grad_norms[1] == 0
    for a, b in zip(weights(skipping), weights(naive), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_row_without_old_logprobs_is_refused(policy):
    rows = random_rows(1)
    rows[0].old_logprobs = None
    with pytest.raises(ValueError, match="without old_logprobs"):
        policy("llama").update([rows], lambda _: grpo_objective())


def test_gradient_checkpointing_gives_the_same_gradient(policy):
    rows = random_rows(6)
    for kind in ("llama", "gpt2", "gemma3"):
        checkpointing = policy(kind, gradient_checkpointing=True)
        assert checkpointing.loaded.causal_lm.is_gradient_checkpointing
        for a, b in zip(gradients(policy(kind), rows), gradients(checkpointing, rows), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)

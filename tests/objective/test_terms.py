"""Terms: which rows they scale, which rows need a pass, and that padding stays out."""

import math

import numpy as np
import pytest
import torch

from graftrl.objective import Term, TokenBatch, sequence_mean
from graftrl.objective.terms import TokenLoss, weighted_sum


def no_loss(batch: TokenBatch) -> TokenLoss:
    return TokenLoss(torch.zeros_like(batch.logprobs_BT))


def test_only_rows_of_the_terms_kinds_are_scaled_and_counted(make_row):
    rows = [make_row(4), make_row(3, kind="sft"), make_row(6, kind="grafted"), make_row(5, kind="sft")]
    assert Term(("own", "grafted"), no_loss).scales(rows) == pytest.approx([0.1, 0, 0.1, 0])
    assert Term(("sft",), no_loss).scales(rows) == pytest.approx([0, 1 / 8, 0, 1 / 8])
    assert Term(("sft",), no_loss, sequence_mean).scales(rows) == pytest.approx([0, 1 / 6, 0, 1 / 10])


def test_coefficient_multiplies_the_scales(make_row):
    assert Term(("own",), no_loss, coefficient=0.1).scales([make_row(4), make_row(1)]) == pytest.approx([0.02, 0.02])


def test_term_without_rows_of_its_kind_scales_nothing(make_row):
    assert Term(("sft",), no_loss).scales([make_row(4), make_row(2)]) == [0.0, 0.0]
    assert Term(("sft",), no_loss).scales([]) == []


def test_weights_and_zero_advantages_do_not_change_the_token_count(make_row):
    plain = [make_row(4), make_row(6)]
    weighted = [make_row(4, weight=0.0), make_row(6, advantages=0.0)]
    assert Term(("own",), no_loss).scales(weighted) == Term(("own",), no_loss).scales(plain)


def test_masked_tokens_are_not_counted(make_row):
    rows = [make_row(4, loss_mask=np.array([True, False, True, False])), make_row(2)]
    assert Term(("own",), no_loss).scales(rows) == [0.25, 0.25]


def test_policy_gradient_term_skips_rows_without_advantage_and_other_terms_do_not(make_row):
    policy_gradient = Term(("own",), no_loss, policy_gradient=True)
    imitation = Term(("own",), no_loss)
    idle = [make_row(3, advantages=0.0), make_row(3, weight=0.0)]
    assert [policy_gradient.needs_pass(row) for row in idle] == [False, False]
    assert [imitation.needs_pass(row) for row in idle] == [True, True]
    assert policy_gradient.needs_pass(make_row(3, advantages=-0.5))
    assert not imitation.needs_pass(make_row(3, kind="grafted"))


@pytest.mark.parametrize("padding", [math.nan, math.inf, 1e30])
def test_losses_on_padding_reach_neither_the_sum_nor_the_gradient(padding):
    loss = torch.tensor([[1.0, 2.0, padding], [3.0, padding, padding]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    total = weighted_sum(loss, mask, torch.tensor([0.5, 2.0]))
    total.backward()
    assert total.item() == 0.5 * 3 + 2 * 3
    assert loss.grad.tolist() == [[0.5, 0.5, 0.0], [2.0, 0.0, 0.0]]

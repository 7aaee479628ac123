"""Averaging of token losses: the weights of the whole minibatch, however it is cut into microbatches."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftrl.objective import Term, TokenBatch, clipped_surrogate, constant_divisor, sequence_mean, token_mean
from graftrl.objective.reduction import response_limit
from graftrl.objective.terms import TokenLoss, weighted_sum

REDUCTIONS = {
    "token": token_mean,
    "sequence": sequence_mean,
    "constant": constant_divisor(60.0),
    "limit": response_limit(9),
}

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def splits(rows):
    """Every way of cutting `rows` rows into consecutive microbatches."""
    for cuts in range(2 ** (rows - 1)):
        bounds = [0, *(i for i in range(1, rows) if cuts >> (i - 1) & 1), rows]
        yield [slice(a, b) for a, b in pairwise(bounds)]


def token_loss(batch):
    return TokenLoss(-clipped_surrogate(batch.logprobs_BT, batch.old_logprobs_BT, batch.advantages_BT, 0.2, 0.28))


def objective_and_gradient(term, rows, logprobs, old_logprobs, microbatches):
    """-loss and its gradient, accumulated over microbatches whose scales come from the whole minibatch."""
    logprobs = logprobs.clone().requires_grad_()
    scales = torch.tensor(term.scales(rows), dtype=logprobs.dtype)
    mask = torch.arange(logprobs.shape[1]) < torch.tensor([row.loss_tokens for row in rows])[:, None]
    advantages = torch.tensor([[row.advantages] for row in rows], dtype=logprobs.dtype)
    total = 0.0
    for part in microbatches:
        batch = TokenBatch(
            logprobs[part], old_logprobs[part], advantages[part], mask[part], mask[part], torch.zeros(len(mask[part]))
        )
        loss = weighted_sum(term.token_loss(batch).loss_BT, mask[part], scales[part])
        loss.backward()
        total -= loss.item()
    return total, logprobs.grad


def test_ten_tokens_up_and_two_tokens_down_give_eight_twelfths_for_every_split(make_row):
    sizes, advantages = [4, 6, 2], [1.0, 1.0, -1.0]
    rows = [make_row(size, advantages=a) for size, a in zip(sizes, advantages, strict=True)]
    logprobs = torch.full((3, 6), -1.0, dtype=torch.float64)
    term = Term(("own",), token_loss, policy_gradient=True)
    expected = [[-a / 12 if t < size else 0.0 for t in range(6)] for size, a in zip(sizes, advantages, strict=True)]
    for microbatches in splits(3):
        value, gradient = objective_and_gradient(term, rows, logprobs, logprobs, microbatches)
        assert value == pytest.approx(8 / 12, rel=1e-12)
        torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
@given(lengths, st.data())
def test_any_cut_into_microbatches_gives_the_same_gradient(make_row, reduction, sizes, data):
    generator = np.random.default_rng(0)
    rows = [make_row(size, advantages=generator.normal()) for size in sizes]
    old_logprobs, logprobs = -torch.from_numpy(generator.random((2, len(sizes), max(sizes))))  # some ratios clipped
    term = Term(("own",), token_loss, reduction)
    cut = data.draw(st.sampled_from(list(splits(len(sizes)))))
    whole = objective_and_gradient(term, rows, logprobs, old_logprobs, [slice(None)])
    parts = objective_and_gradient(term, rows, logprobs, old_logprobs, cut)
    assert parts[0] == pytest.approx(whole[0], rel=1e-12, abs=1e-14)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-12, atol=1e-15)


@given(lengths)
def test_reductions_follow_their_definitions(sizes):
    values = [np.cos(np.arange(size) + size) for size in sizes]

    def reduced(reduction):
        return sum(scale * row.sum() for scale, row in zip(reduction(sizes), values, strict=True))

    assert reduced(token_mean) == pytest.approx(np.concatenate(values).mean(), abs=1e-12)
    assert reduced(sequence_mean) == pytest.approx(np.mean([row.mean() for row in values]), abs=1e-12)
    assert reduced(constant_divisor(60.0)) == pytest.approx(np.concatenate(values).sum() / 60, abs=1e-12)
    assert reduced(response_limit(9)) == pytest.approx(np.concatenate(values).sum() / (9 * len(sizes)), abs=1e-12)


def test_row_without_loss_tokens_still_counts_as_a_row_of_the_sequence_mean():
    assert sequence_mean([2, 0]).tolist() == [0.25, 0.0]


@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
def test_empty_minibatch_has_no_scales(reduction):
    assert reduction([]).shape == (0,)


@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
def test_minibatch_whose_tokens_are_all_masked_gives_zero_loss_and_zero_gradient(make_row, reduction):
    rows = [make_row(3, loss_mask=np.zeros(3, dtype=np.bool_)) for _ in range(2)]
    term = Term(("own",), token_loss, reduction)
    assert not any(term.needs_pass(row) for row in rows)
    logprobs = torch.full((2, 3), -1.0)
    value, gradient = objective_and_gradient(term, rows, logprobs, logprobs, [slice(None)])
    assert value == 0.0
    assert gradient.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("divisor", [0, -1.0, math.nan])
def test_divisor_that_is_not_positive_is_refused(divisor):
    with pytest.raises(ValueError, match="divisor"):
        constant_divisor(divisor)

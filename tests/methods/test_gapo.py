import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scorer import Scorer

from graftrl.methods import build_method
from graftrl.methods.gapo import adaptive_clip_high
from graftrl.objective import TokenBatch, clipped_surrogate


def test_the_bound_grows_linearly_from_all_right_to_a_lone_success():
    bounds = [adaptive_clip_high(k, 8, 0.2, 0.4) for k in (8, 7, 4, 1)]
    np.testing.assert_allclose(bounds, [0.2, 0.2 + 0.2 / 7, 0.2 + 0.8 / 7, 0.4])
    assert adaptive_clip_high(0, 8, 0.2, 0.4) == 0.4  # partial credit: no full success, yet better than its group


def test_rows_carry_the_bound_of_their_group_and_unnormalised_advantages(make_group, context):
    groups = {"A": [make_group("A", "q0", [1, 0, 0, 0]), make_group("A", "q1", [1, 1, 1, 0])]}
    rows = build_method("gapo").exchange(groups, context(Scorer(0.0), 4)).rows["A"]
    np.testing.assert_allclose([row.advantages for row in rows], [0.75, *[-0.25] * 3, *[0.25] * 3, -0.75])
    wide, narrow = 0.4, 0.2 + 0.2 / 3
    np.testing.assert_allclose([row.clip_high for row in rows], [wide, *[0.2] * 3, *[narrow] * 3, 0.2])


def tokens(ratios, advantages, bounds):
    logprobs = torch.tensor(ratios).log().requires_grad_()
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    return TokenBatch(
        logprobs, torch.zeros_like(logprobs).detach(), torch.tensor(advantages).expand(logprobs.shape), mask, mask,
        torch.zeros(len(logprobs)), clip_high_B=bounds,
    )  # fmt: skip


def test_each_row_is_clipped_at_its_own_bound_and_rows_without_one_at_the_methods():
    (term,) = build_method("gapo").objective(0).terms
    nan = float("nan")
    batch = tokens([[1.1, 1.5], [1.1, 1.5], [1.1, 1.5], [0.7, 1.5]], [[1.0], [1.0], [1.0], [-1.0]],
                   torch.tensor([0.4, 0.3, nan, 0.2]))  # fmt: skip
    result = term.token_loss(batch)
    expected = [[-1.1, -1.4], [-1.1, -1.3], [-1.1, -1.2], [0.8, 1.5]]
    np.testing.assert_allclose(result.loss_BT.detach(), expected, rtol=1e-6)
    assert result.clipped_BT.tolist() == [[False, True], [False, True], [False, True], [True, False]]
    result.loss_BT.sum().backward()
    np.testing.assert_allclose(
        batch.logprobs_BT.grad, [[-1.1, 0], [-1.1, 0], [-1.1, 0], [0, 1.5]], rtol=1e-6
    )  # d rho / d log pi = rho


def test_equal_bounds_in_every_row_give_the_plain_surrogate():
    generator = torch.Generator().manual_seed(0)
    logprobs, old = (torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages = torch.randn(6, 1, generator=generator, dtype=torch.float64)
    column = torch.full((6, 1), 0.28, dtype=torch.float64)
    torch.testing.assert_close(
        clipped_surrogate(logprobs, old, advantages, 0.2, column),
        clipped_surrogate(logprobs, old, advantages, 0.2, 0.28),
    )


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(ValidationError, match="clip_high_max"):
        build_method({"name": "gapo", "clip_high": 0.5})

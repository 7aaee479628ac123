import numpy as np
import pytest
import torch
from scorer import Scorer

from graftrl.methods import GRPO, build_method
from graftrl.methods.grpo import GRPOSettings, clip_objective, has_contrast
from graftrl.objective import TokenBatch


def test_every_model_trains_on_its_own_groups_with_group_advantages(make_group, context):
    groups = {"A": [make_group("A", "q0", [1, 0, 0, 0])], "B": [make_group("B", "q0", [1, 1, 1, 1])]}
    exchange = GRPO(GRPOSettings()).exchange(groups, context(Scorer(0.0), 4))
    np.testing.assert_allclose([row.advantages for row in exchange.rows["A"]], [1.499997, *[-0.499999] * 3], rtol=1e-5)
    assert [row.advantages for row in exchange.rows["B"]] == [0.0] * 4
    assert {row.source for row in exchange.rows["A"]} == {"A"}


def test_own_rows_keep_their_sampled_ids_even_where_the_text_encodes_otherwise(make_group, context, codecs):
    group = make_group("A", "q0", [1, 0])
    tokenizer = codecs["A"].tokenizer
    split = [tokenizer.convert_tokens_to_ids(c) for c in "A:1,2"] + [codecs["A"].eos_id]  # the merge "1," not taken
    assert tokenizer.encode("A:1,2", add_special_tokens=False) != split[:-1]
    group.responses[0].token_ids, group.responses[0].logprobs = np.array(split), np.full(6, -0.5, np.float32)
    exchange = GRPO(GRPOSettings()).exchange({"A": [group]}, context(Scorer(0.0), 2))
    assert exchange.rows["A"][0].response_token_ids.tolist() == split


def test_minibatches_are_cut_by_prompt_and_hold_whole_groups(make_group, context):
    groups = {"A": [make_group("A", f"q{i}", [1, 0]) for i in range(5)]}
    method = GRPO(GRPOSettings())
    rows = method.exchange(groups, context(Scorer(0.0), 2)).rows["A"]
    minibatches = method.order(rows, 2, np.random.default_rng(0))
    assert [[row.prompt_id for row in m] for m in minibatches] == [
        ["q0", "q0", "q1", "q1"], ["q2", "q2", "q3", "q3"], ["q4", "q4"]
    ]  # fmt: skip


def test_dynamic_sampling_keeps_or_drops_whole_groups(make_group):
    method = GRPO(GRPOSettings(dynamic_sampling=True))
    assert method.filter is has_contrast and method.sampling_rounds == 10
    assert has_contrast(make_group("A", "q", [1, 0, 0, 0]))
    assert not has_contrast(make_group("A", "q", [0, 0, 0, 0])) and not has_contrast(make_group("A", "q", [1, 1]))


def token_batch(ref: bool = False) -> TokenBatch:
    logprobs = torch.tensor([[-1.0, -0.2, -3.0]], requires_grad=True)
    old = torch.tensor([[-1.0, -1.0, -1.0]])
    advantages = torch.tensor([[1.0, 1.0, -1.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    reference = torch.tensor([[-1.0, -0.2, -2.0]]) if ref else None
    return TokenBatch(logprobs, old, advantages, mask, mask, torch.zeros(1), reference)


def test_the_loss_is_the_negative_clipped_surrogate():
    (term,) = clip_objective(GRPOSettings(), ("own",)).terms
    result = term.token_loss(token_batch())
    # ratios 1, e^0.8 -> clipped at 1.28, e^-2 with a = -1 -> clipped at 0.8
    torch.testing.assert_close(result.loss_BT, torch.tensor([[-1.0, -1.28, 0.8]]))
    assert result.clipped_BT.tolist() == [[False, True, True]]


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    settings = GRPOSettings(dual_clip=3.0)
    batch = token_batch()
    one = batch.mask_BT[:, :1]
    batch = TokenBatch(
        torch.tensor([[1.0]]), torch.tensor([[-1.0]]), torch.tensor([[-1.0]]), one, one, batch.source_logprobs_B
    )
    (term,) = clip_objective(settings, ("own",)).terms
    torch.testing.assert_close(term.token_loss(batch).loss_BT, torch.tensor([[3.0]]))  # ratio e^2 = 7.39


def test_kl_is_an_option_on_own_rows_and_asks_for_the_reference():
    objective = clip_objective(GRPOSettings(kl_coefficient=0.01), ("own", "grafted"))
    kl = objective.terms[1]
    assert objective.needs_reference and kl.kinds == ("own",) and kl.coefficient == 0.01
    assert not clip_objective(GRPOSettings(), ("own",)).needs_reference
    torch.testing.assert_close(
        kl.token_loss(token_batch(ref=True)).loss_BT, torch.tensor([[0.0, 0.0, float(np.e - 2)]])
    )


@pytest.mark.parametrize(
    ("reduction", "scales"),
    [("token_mean", [1 / 5, 1 / 5]), ("sequence_mean", [1 / 4, 1 / 6]), ("response_limit", [1 / 20, 1 / 20])],
)
def test_reductions(make_group, reduction, scales, context):
    settings = GRPOSettings(reduction=reduction, response_limit=10)
    (term,) = clip_objective(settings, ("own",)).terms
    group = make_group("A", "q", [1, 0], texts=["A", "AB"])
    rows = GRPO(settings).exchange({"A": [group]}, context(Scorer(0.0), 2)).rows["A"]
    assert [row.loss_tokens for row in rows] == [2, 3]
    np.testing.assert_allclose(term.scales(rows), scales)


def test_presets_are_one_line_of_config():
    assert build_method("dapo").settings.dynamic_sampling
    assert build_method({"name": "graft-no-floor", "threshold": 0.7}).settings.weighting == "no_floor"

"""SGT, HACPO and LUFFY against values worked out by hand."""

import dataclasses

import numpy as np
import pytest
import torch
from scorer import Scorer

from graftrl.methods import build_method
from graftrl.objective import TokenBatch
from graftrl.objective.capability import capability, capability_advantages, capability_ratio, pooled_advantages

FAIL, MIXED = [0, 0, 0, 0], [1, 0, 0, 0]


@pytest.fixture
def groups(make_group):
    """A fails q0, where B has two successes; nobody solves q1; both solve q2 in part."""
    return {
        "A": [make_group("A", "q0", FAIL), make_group("A", "q1", FAIL), make_group("A", "q2", MIXED)],
        "B": [make_group("B", "q0", [1, 0, 1, 0]), make_group("B", "q1", FAIL), make_group("B", "q2", MIXED)],
    }


def kinds(exchange, model, prompt_id):
    return [row.kind for row in exchange.rows[model] if row.prompt_id == prompt_id]


def batch(logprobs, *, old=None, advantages=None, source=0.0, content=None):
    logprobs = torch.tensor([logprobs], requires_grad=True)
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    return TokenBatch(
        logprobs_BT=logprobs,
        old_logprobs_BT=torch.tensor([old]) if old else torch.zeros_like(mask, dtype=torch.float32),
        advantages_BT=torch.full_like(logprobs, advantages or 0.0).detach(),
        mask_BT=mask,
        content_mask_BT=torch.tensor([content]) if content else mask,
        source_logprobs_B=torch.tensor([source]),
    )


def test_sgt_imitates_one_peer_success_on_all_fail_prompts_alone(groups, context):
    exchange = build_method("sgt").exchange(groups, context(Scorer(0.0), 4))
    assert kinds(exchange, "A", "q0") == ["own"] * 4 + ["sft"]
    assert kinds(exchange, "A", "q1") == ["own"] * 4 and kinds(exchange, "A", "q2") == ["own"] * 4
    assert "sft" not in {row.kind for row in exchange.rows["B"]}
    (transfer,) = exchange.transfers
    assert (transfer.receiver, transfer.source, transfer.reward) == ("A", "B", 1.0)
    assert transfer.response_index in (0, 2)


def test_sgt_draws_uniformly_among_the_peers_successes(groups, context):
    drawn = []
    for seed in range(200):
        exchange = build_method("sgt").exchange(groups, dataclasses.replace(context(Scorer(0.0), 4), seed=seed))
        drawn.append(exchange.transfers[0].response_index)
    assert 70 < drawn.count(0) < 130 and drawn.count(0) + drawn.count(2) == 200


def test_sgt_adds_a_tenth_of_the_token_mean_likelihood_to_grpo(groups, context):
    method = build_method("sgt")
    rows = method.exchange(groups, context(Scorer(0.0), 4)).rows["A"]
    own, imitation = method.objective(0).terms
    sft = [row for row in rows if row.kind == "sft"]
    assert sum(s > 0 for s in imitation.scales(rows)) == 1
    assert max(imitation.scales(rows)) == pytest.approx(0.1 / sft[0].loss_tokens)
    assert max(own.scales(rows)) == pytest.approx(1 / sum(row.loss_tokens for row in rows if row.kind == "own"))
    assert imitation.token_loss(batch([-1.0, -3.0])).loss_BT.tolist() == [[1.0, 3.0]]
    assert imitation.needs_pass(sft[0])  # although its advantage is 0


def test_a_success_that_cannot_be_retokenised_is_logged_and_another_drawn(make_group, context):
    long = "A:" + ",".join("1" * 30) + ";E:1"
    peers = make_group("B", "q0", [1, 1], texts=[long, "A:1;E:1"])
    groups = {"A": [make_group("A", "q0", [0, 0])], "B": [peers]}
    statuses = set()
    for seed in range(12):
        exchange = build_method("sgt").exchange(
            groups, dataclasses.replace(context(Scorer(0.0), 2, limit=20), seed=seed)
        )
        assert kinds(exchange, "A", "q0") == ["own", "own", "sft"]
        statuses.add(tuple(t.status for t in exchange.transfers))
    assert statuses == {("admitted",), ("rejected", "admitted")}


def test_hacpo_golden_values():
    own, peer = np.zeros(8), np.array([1.0, 1, 0, 0, 0, 0, 0, 0])
    a_own, a_peer = capability_advantages(own, peer, omega=2.0)
    assert a_peer[0] == pytest.approx(2.744711, abs=1e-5) and a_own[0] == pytest.approx(-0.182981, abs=1e-5)
    assert np.concatenate([own, peer]).std(ddof=1) == pytest.approx(0.341565, abs=1e-6)


def test_hacpo_capability_is_the_mean_of_the_last_five_steps_and_its_ratio_is_bounded():
    assert capability([1.0, 0.1, 0.2, 0.3, 0.4, 0.5]) == pytest.approx(0.3)
    assert capability([0.0]) == 1e-8
    assert capability_ratio(0.5, 1e-8) == 10.0 and capability_ratio(1e-8, 0.5) == 0.1
    assert capability_ratio(0.3, 0.2) == pytest.approx(1.5)


def test_hacpo_pools_with_no_spread_give_exactly_zero_and_a_mean_above_one_falls_back():
    assert all((a == 0).all() for a in capability_advantages(np.ones(4), np.ones(4), 0.5))
    own, peer = np.array([1.0, 1, 1, 0]), np.ones(4)  # (3 + 4 / 0.1) / 8 > 1
    a_own, _ = capability_advantages(own, peer, 0.1)
    sigma = np.concatenate([own, peer]).std(ddof=1)
    np.testing.assert_allclose(a_own, (own - 0.75) / (sigma + 1e-6))


def test_hacpo_appends_every_peer_row_weighted_by_capability_and_trains_own_first(groups, context):
    rewards = {"A": [0.9, 0.1], "B": [0.9, 0.3]}
    method = build_method("hacpo")
    exchange = method.exchange(groups, dataclasses.replace(context(Scorer(0.0), 4), mean_rewards=rewards))
    rows = exchange.rows["A"]
    assert kinds(exchange, "A", "q0") == ["own"] * 4 + ["peer"] * 4
    peer = [row for row in rows if row.kind == "peer"]
    assert {round(row.weight, 6) for row in peer} == {1.2}  # (0.9 + 0.3) / (0.9 + 0.1)
    assert {row.source_logprob for row in peer} == {-0.5}
    minibatches = method.order(rows, 2, np.random.default_rng(0))
    assert [{row.kind for row in minibatch} for minibatch in minibatches] == [{"own"}, {"own"}, {"peer"}, {"peer"}]


def test_hacpo_pools_several_peers_each_with_its_own_capability_ratio(groups, make_group, context):
    groups["C"] = [make_group("C", "q0", [1, 1, 1, 0])]  # C did not see the other prompts
    rewards = {"A": [0.4], "B": [0.2], "C": [0.8]}
    exchange = build_method("hacpo").exchange(
        groups, dataclasses.replace(context(Scorer(0.0), 4), mean_rewards=rewards)
    )
    rows = [row for row in exchange.rows["A"] if row.prompt_id == "q0"]
    assert [(row.kind, row.source) for row in rows] == [("own", "A")] * 4 + [("peer", "B")] * 4 + [("peer", "C")] * 4
    np.testing.assert_allclose([row.weight for row in rows], [1.0] * 4 + [0.5] * 4 + [2.0] * 4)
    raw = np.array([0, 0, 0, 0, 1, 0, 1, 0, 1, 1, 1, 0], np.float64)
    mu = (0 + 2 / 0.5 + 3 / 2.0) / 12
    sigma = np.sqrt(((raw - raw.mean()) ** 2).sum() / 11)
    np.testing.assert_allclose([row.advantages for row in rows], (raw - mu) / (sigma + 1e-6), rtol=1e-6)
    assert {row.source for row in exchange.rows["A"] if row.prompt_id == "q1"} == {"A", "B"}
    directions = exchange.directions
    assert (directions["C->A"]["selected"], directions["B->A"]["selected"]) == (1, 3)


def test_hacpo_a_peers_group_split_in_two_gives_the_same_advantages():
    own, peer = np.array([1.0, 0, 0, 0]), np.array([1.0, 1, 0, 0])
    one, (first, second) = pooled_advantages(own, [(peer[:2], 2.0), (peer[2:], 2.0)])
    two, joined = capability_advantages(own, peer, 2.0)
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(np.concatenate([first, second]), joined)


def test_hacpo_peer_loss_has_no_gradient_outside_its_bounds_which_tighten_with_the_minibatch():
    peer = [build_method("hacpo").objective(b).terms[1] for b in (0, 4)]
    inside = batch([-0.6, -0.6, -9.0], advantages=2.0, source=-0.5, content=[True, True, False])  # s = exp(-0.1)
    loss = peer[0].token_loss(inside).loss_BT[0, :2]
    s = np.exp(-0.1)
    np.testing.assert_allclose(loss.detach(), -2.0 * s * s, rtol=1e-5)
    loss.sum().backward()
    np.testing.assert_allclose(inside.logprobs_BT.grad[0, :2], -2.0 * s * s, rtol=1e-5)
    for term, mean in ((peer[0], -0.8), (peer[0], -0.4), (peer[1], -0.65)):  # below 0.8, above 1, below 0.9 at b = 4
        outside = batch([mean, mean], advantages=2.0, source=-0.5)
        result = term.token_loss(outside)
        result.loss_BT.sum().backward()
        assert outside.logprobs_BT.grad.abs().sum() == 0 and result.clipped_BT.all()


def test_hacpo_own_loss_is_the_pessimistic_clipped_sequence_ratio():
    own = build_method("hacpo").objective(0).terms[0]
    result = own.token_loss(batch([-1.0, -1.2], old=[-1.1, -1.2], advantages=1.0))  # ratio exp(0.05), clipped
    np.testing.assert_allclose(result.loss_BT.detach(), -1.0004, rtol=1e-6)
    result = own.token_loss(batch([-1.0, -1.2], old=[-1.1, -1.2], advantages=-1.0))
    np.testing.assert_allclose(result.loss_BT.detach(), np.exp(0.05), rtol=1e-6)


def test_luffy_puts_one_trace_into_the_group_and_only_centres_advantages(groups, context):
    method = build_method("luffy")
    exchange = method.exchange(groups, context(Scorer(0.0), 4))
    assert kinds(exchange, "A", "q0") == ["own"] * 3 + ["trace"]
    assert kinds(exchange, "A", "q1") == ["own"] * 4
    advantages = [row.advantages for row in exchange.rows["A"] if row.prompt_id == "q0"]
    np.testing.assert_allclose(advantages, [-0.25, -0.25, -0.25, 0.75])
    rows = exchange.rows["A"]
    own, trace = method.objective(0).terms
    total = sum(row.loss_tokens for row in rows)
    assert {s for s in own.scales(rows) if s} == {1 / total} == {s for s in trace.scales(rows) if s}


def test_luffy_shapes_trace_tokens_and_leaves_own_ratios_unclipped():
    own, trace = build_method("luffy").objective(0).terms
    p = 0.05
    tokens = batch([float(np.log(p))], advantages=0.75)
    loss = trace.token_loss(tokens).loss_BT
    loss.sum().backward()
    np.testing.assert_allclose(loss.detach(), -0.75 * p / (p + 0.1), rtol=1e-5)
    np.testing.assert_allclose(tokens.logprobs_BT.grad, -0.75 * 0.1 * p / (p + 0.1) ** 2, rtol=1e-5)
    ratio = own.token_loss(batch([0.0], old=[-1.0], advantages=0.5)).loss_BT
    np.testing.assert_allclose(ratio.detach(), -0.5 * np.e, rtol=1e-5)

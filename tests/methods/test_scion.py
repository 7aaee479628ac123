"""SCION against its closed forms and values worked out by hand."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch
from scorer import Scorer

from graftrl.methods import build_method
from graftrl.objective import TokenBatch, damped_nll, damping

FAIL, ONE, TWO, ALL = [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]


@pytest.fixture
def groups(make_group):
    """A receives q0 (0 of 4 against 2), q1 (1 against 2) and q2 (0 against all); B receives q3 (0 against 1)."""
    rewards = {"A": [FAIL, ONE, FAIL, ONE, TWO], "B": [TWO, TWO, ALL, FAIL, TWO]}
    return {m: [make_group(m, f"q{i}", r) for i, r in enumerate(of_model)] for m, of_model in rewards.items()}


@pytest.fixture
def run(groups, context):
    def exchange(method="scion", given=None, **changes):
        step = dataclasses.replace(context(Scorer(0.0), 4), **changes)
        return build_method(method).exchange(given or groups, step)

    return exchange


def strengths(exchange, model):
    return {row.prompt_id: row.advantages for row in exchange.rows[model] if row.kind == "sft"}


def test_every_prompt_on_which_the_peer_is_better_gives_one_success_as_strong_as_the_gap(run):
    exchange = run()
    assert strengths(exchange, "A") == pytest.approx({"q0": 0.5, "q1": 0.25, "q2": 1.0})
    assert strengths(exchange, "B") == pytest.approx({"q3": 0.25})
    assert Counter(row.kind for row in exchange.rows["A"]) == {"own": 20, "sft": 3}
    assert {t.reward for t in exchange.transfers} == {1.0}


def test_headroom_is_the_success_advantage_over_the_receivers_own_mean(run):
    exchange = run({"name": "scion", "advantage": "headroom"})
    assert strengths(exchange, "A") == pytest.approx({"q0": 1.0, "q1": 0.75, "q2": 1.0})


def test_the_scope_can_be_all_fail_prompts_alone(run):
    exchange = run({"name": "scion", "scope": "all_fail"})
    assert set(strengths(exchange, "A")) == {"q0", "q2"} and set(strengths(exchange, "B")) == {"q3"}


def test_own_rows_are_those_of_grpo(run):
    def own(exchange):
        return [(r.prompt_id, r.advantages, tuple(r.response_token_ids)) for r in exchange.rows["A"] if r.kind == "own"]

    assert own(run()) == own(run("grpo"))


def test_one_of_the_distinct_successes_is_drawn_uniformly(make_group, run):
    texts = ["A:1;E:2", "A:1;E:2", "A:3;E:4", "A:5;E:6"]
    groups = {"A": [make_group("A", "q", FAIL)], "B": [make_group("B", "q", ALL, texts=texts)]}
    drawn = Counter(run(given=groups, seed=seed).transfers[0].response_index for seed in range(300))
    assert set(drawn) == {0, 2, 3} and all(75 < count < 125 for count in drawn.values())  # not 1: the text of 0


def test_several_draws_share_the_weight_of_one(make_group, run):
    groups = {"A": [make_group("A", "q", FAIL)], "B": [make_group("B", "q", [1, 1, 1, 0])]}
    exchange = run({"name": "scion", "draws": 2}, groups)
    rows = [row for row in exchange.rows["A"] if row.kind == "sft"]
    assert len(rows) == 2 and {row.weight for row in rows} == {0.5} and {row.advantages for row in rows} == {0.75}
    assert len({tuple(row.response_token_ids) for row in rows}) == 2
    assert {t.weight for t in exchange.transfers} == {0.5}
    everything = run({"name": "scion", "draws": 9}, groups)
    assert [row.weight for row in everything.rows["A"] if row.kind == "sft"] == pytest.approx([1 / 3] * 3)


def test_with_more_peers_the_most_successful_gives_and_a_tie_is_drawn(make_group, run):
    rewards = {"A": FAIL, "B": ONE, "C": TWO}
    groups = {m: [make_group(m, "q", r)] for m, r in rewards.items()}
    exchange = run(given=groups)
    assert [(t.receiver, t.source) for t in exchange.transfers] == [("A", "C"), ("B", "C")]
    assert strengths(exchange, "A") == {"q": 0.5} and strengths(exchange, "B") == {"q": 0.25}
    tie = {**groups, "B": [make_group("B", "q", TWO)]}
    sources = Counter(run(given=tie, seed=seed).transfers[0].source for seed in range(200))
    assert 70 < sources["B"] < 130 and sources["B"] + sources["C"] == 200
    turned = dict(reversed(tie.items()))
    for seed in range(10):
        one, other = (run(given=g, seed=seed).rows["A"][-1] for g in (tie, turned))
        assert (one.source, tuple(one.response_token_ids)) == (other.source, tuple(other.response_token_ids))


@pytest.mark.parametrize("tau", [0.1, 0.5, 1.0])
def test_the_closed_form_has_the_gradient_of_the_damped_likelihood(tau):
    p = torch.tensor([1e-12, 1e-4, 0.0999 * tau, 0.999 * tau, 1.001 * tau, 0.7, 1.0], dtype=torch.float64)
    logprobs = p.clamp(max=1).log().requires_grad_()
    damped_nll(logprobs, tau).sum().backward()
    other = logprobs.detach().clone().requires_grad_()
    (torch.clamp(other.detach().exp() / tau, max=1.0) * -other).sum().backward()
    torch.testing.assert_close(logprobs.grad, other.grad, rtol=1e-12, atol=0)


def test_the_closed_form_against_hand_values():
    logprobs = torch.tensor([0.5, 0.1, 0.05, 0.0], dtype=torch.float64).log()
    loss = damped_nll(logprobs, 0.1)
    expected = [math.log(2), math.log(10), 1 + math.log(10) - 0.5, 1 + math.log(10)]  # bounded even at p = 0
    np.testing.assert_allclose(loss, expected)
    np.testing.assert_allclose(damping(logprobs, 0.1), [1, 1, 0.5, 0])
    np.testing.assert_allclose(damped_nll(logprobs[:3], 0.0), -logprobs[:3])
    assert damping(logprobs, 0.0).tolist() == [1.0] * 4


def test_the_peer_term_divides_by_all_prompts_of_the_minibatch_and_by_each_rows_length(run):
    method = build_method({"name": "scion", "sft_coefficient": 0.5})
    rows = run().rows["A"]
    grpo, peer = method.objective(0).terms
    for minibatch, prompts in zip(method.order(rows, 3, np.random.default_rng(0)), (3, 2), strict=True):
        expected = [0.5 / (prompts * row.loss_tokens) if row.kind == "sft" else 0.0 for row in minibatch]
        assert len({row.prompt_id for row in minibatch}) == prompts
        np.testing.assert_allclose(peer.scales(minibatch), expected)
        own = sum(row.loss_tokens for row in minibatch if row.kind == "own")
        assert set(grpo.scales(minibatch)) <= {0.0, 1 / own}
    assert [row.kind for row in method.order(rows, 3, np.random.default_rng(0))[0]].count("sft") == 3


def test_the_token_loss_is_weighted_by_a_and_reports_its_damping():
    peer = build_method("scion").objective(0).terms[1]
    logprobs = torch.tensor([[0.5, 0.02]]).log().requires_grad_()
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    result = peer.token_loss(
        TokenBatch(logprobs, torch.zeros(1, 2), torch.full((1, 2), 0.25), mask, mask, torch.zeros(1))
    )
    per_token = [math.log(2), 1 + math.log(10) - 0.2]
    np.testing.assert_allclose(result.loss_BT.detach(), [[0.25 * x for x in per_token]], rtol=1e-6)
    result.loss_BT.sum().backward()
    np.testing.assert_allclose(logprobs.grad, [[-0.25, -0.25 * 0.2]], rtol=1e-6)
    np.testing.assert_allclose(result.means_BT["damping"], [[1, 0.2]], rtol=1e-6)
    assert result.means_BT["damped"].tolist() == [[0, 1]]
    np.testing.assert_allclose(result.means_BT["peer_loss"], [per_token], rtol=1e-6)


def test_diagnostics_count_transferred_prompts_and_their_strength(run):
    exchange = run()
    stats = exchange.directions["B->A"]
    assert (stats["candidates"], stats["selected"], stats["admitted"]) == (3, 3, 3)
    assert stats["advantage_mean"] == pytest.approx(1.75 / 3)
    assert exchange.directions["A->B"]["selected"] == 1


def test_without_a_better_peer_scion_is_grpo(make_group, run):
    groups = {m: [make_group(m, "q0", TWO), make_group(m, "q1", ALL)] for m in "AB"}
    assert {row.kind for row in run(given=groups).rows["A"]} == {"own"}

"""SCION against its closed forms and values worked out by hand."""

import dataclasses
import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scorer import Scorer

from graftrl.methods import build_method
from graftrl.objective import TokenBatch, damped_nll, damping
from graftrl.rollout import Group, Prompt, Response

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


def test_a_rated_gap_counts_a_peer_that_is_seldom_right_for_less(run):
    exchange = run({"name": "scion", "advantage": "rated"})
    assert strengths(exchange, "A") == pytest.approx({"q0": 0.5 * 0.5, "q1": 0.5 * 0.25, "q2": 1.0})
    assert strengths(exchange, "B") == pytest.approx({"q3": 0.25 * 0.25})


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


# Options --------------------------------------------------------------------------------------------------------------


def test_scope_any_takes_every_prompt_that_a_peer_can_solve(run):
    exchange = run({"name": "scion", "scope": "any", "advantage": "headroom"})
    assert strengths(exchange, "A") == pytest.approx({"q0": 1.0, "q1": 0.75, "q2": 1.0, "q4": 0.5})
    assert strengths(exchange, "B") == pytest.approx({"q1": 0.5, "q3": 1.0, "q4": 0.5})  # not q2: all right


def test_strength_one_weighs_all_prompts_alike(run):
    assert strengths(run("scion-no-advantage"), "A") == {"q0": 1.0, "q1": 1.0, "q2": 1.0}


def test_self_imitation_takes_an_own_success_wherever_there_are_some(run):
    exchange = run("scion-self")
    assert strengths(exchange, "A") == pytest.approx({"q1": 0.75, "q3": 0.75, "q4": 0.5})
    assert {row.source for row in exchange.rows["A"]} == {"A"} and exchange.transfers == []
    assert exchange.diagnostics == {"A": {"own_imitated": 3}, "B": {"own_imitated": 3}}
    assert all(stats["candidates"] == 0 for stats in exchange.directions.values())
    imitated = [tuple(row.response_token_ids) for row in exchange.rows["A"] if row.kind == "sft"]
    right = [tuple(r.response_token_ids) for r in exchange.rows["A"] if r.kind == "own" and r.advantages > 0]
    assert set(imitated) <= set(right)


def test_own_first_changes_whose_success_it_is_and_nothing_else(run):
    control, scion = run("scion-self-first"), run()
    assert strengths(control, "A") == strengths(scion, "A")
    sources = {row.prompt_id: row.source for row in control.rows["A"] if row.kind == "sft"}
    assert sources == {"q0": "B", "q1": "A", "q2": "B"}
    assert [t.prompt_id for t in control.transfers if t.receiver == "A"] == ["q0", "q2"]
    assert control.directions["B->A"]["candidates"] == 2 and control.diagnostics["A"] == {"own_imitated": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "any"}, "scope any needs advantage headroom"),
        ({"imitate": "own"}, "imitate own needs advantage headroom"),
        ({"imitate": "own_first", "scope": "all_fail"}, "there is no own success"),
        ({"normalization": "tokens", "draws": 2}, "needs draws 1"),
        ({"tau": 1.5}, "less than or equal to 1"),
        ({"sft_coefficient": -1}, "greater than or equal to 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        build_method({"name": "scion", **options})


def test_a_log_may_hold_larger_groups_than_are_sampled(make_group, run):
    texts = [f"A:{i},2,3;E:{i},6,9" for i in range(8)]
    groups = {"A": [make_group("A", "q", TWO)], "B": [make_group("B", "q", [1] * 6 + [0] * 2, texts=texts)]}
    exchange = run(given=groups, receivers=("A",))
    assert strengths(exchange, "A") == {"q": 0.25} and set(exchange.rows) == {"A"}  # 6 of 8 against 2 of 4
    assert build_method("scion").usable(groups["A"][0], 5, 8) and not build_method("scion").usable(groups["A"][0], 4, 8)


# The whole loss in NumPy ----------------------------------------------------------------------------------------------

PROMPTS = 4


def numpy_loss(peer_rows, tau, lam, normalization):
    """(1 / P) sum_q (1 / draws) sum a_q mean_t f(p_t), written out; peer_rows: (prompt, a, weight, probabilities)."""
    total = 0.0
    transferred = {prompt for prompt, *_ in peer_rows}
    tokens = sum(len(p) for *_, p in peer_rows)
    for _, a, weight, p in peer_rows:
        f = [-math.log(x) if x >= tau else 1 - math.log(tau) - x / tau for x in p]
        if normalization == "tokens":
            total += weight * a * sum(f) / tokens
        else:
            total += weight * a * sum(f) / len(f) / (PROMPTS if normalization == "prompts" else len(transferred))
    return lam * total


@pytest.mark.parametrize("normalization", ["prompts", "transferred", "tokens"])
@pytest.mark.parametrize(("tau", "lam", "draws"), [(0.0, 1.0, 1), (0.1, 0.3, 1), (0.3, 10.0, 2), (1.0, 1.0, 1)])
def test_the_loss_is_that_of_an_independent_implementation(make_group, run, normalization, tau, lam, draws):
    if normalization == "tokens" and draws > 1:
        pytest.skip("refused")
    texts = ["A:1;E:2", "A:1,2;E:3,4", "A:1,2,3;E:4,5,6", "A:4"]
    groups = {
        "A": [make_group("A", f"q{i}", r) for i, r in enumerate([FAIL, ONE, ALL, FAIL])],
        "B": [make_group("B", f"q{i}", r, texts=texts) for i, r in enumerate([TWO, ALL, ALL, FAIL])],
    }
    options = {"tau": tau, "sft_coefficient": lam, "draws": draws, "normalization": normalization}
    method = build_method({"name": "scion", **options})
    rows = run({"name": "scion", **options}, groups).rows["A"]
    (minibatch,) = method.order(rows, PROMPTS, np.random.default_rng(0))
    peer = method.objective(0).terms[1]
    rng = np.random.default_rng(1)
    ours, theirs = 0.0, []
    for row, scale in zip(minibatch, peer.scales(minibatch), strict=True):
        p = rng.choice([1e-9, 0.01, 0.09, 0.2, 0.6, 0.99], row.loss_tokens)
        batch = token_batch(torch.tensor(p)[None].log(), row.advantages * row.weight)
        ours += scale * float(peer.token_loss(batch).loss_BT.sum())
        if row.kind == "sft":
            theirs.append((row.prompt_id, row.advantages, row.weight, p))
    assert len(theirs) == 2 * draws
    assert ours == pytest.approx(numpy_loss(theirs, tau, lam, normalization), rel=1e-12)


def token_batch(logprobs, advantage):
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    zeros = torch.zeros_like(logprobs)
    return TokenBatch(logprobs, zeros, torch.full_like(logprobs, advantage), mask, mask, torch.zeros(len(logprobs)))


@given(st.floats(0.01, 1.0), st.lists(st.floats(-40.0, 0.0), min_size=1, max_size=6), st.floats(0.0, 1.0))
def test_a_tokens_pull_never_exceeds_that_of_imitation_nor_the_strength(tau, logprobs, a):
    """|d loss / d log p| = a * min(p / tau, 1) <= a, and it falls to 0 with p."""
    x = torch.tensor([logprobs], dtype=torch.float64, requires_grad=True)
    build_method({"name": "scion", "tau": tau}).objective(0).terms[1].token_loss(
        token_batch(x, a)
    ).loss_BT.sum().backward()
    p = np.exp(logprobs)
    np.testing.assert_allclose(x.grad[0], -a * np.minimum(p / tau, 1), rtol=1e-9, atol=1e-300)
    assert (x.grad.abs() <= a).all()


@given(st.permutations(range(5)))
def test_the_order_of_prompts_changes_nothing_but_the_order(order):
    strengths_of = {}
    for which in (range(5), order):
        method = build_method("scion")
        own = [small_group("A", f"q{i}", k) for i, k in ((i, [0, 1, 0, 1, 2][i]) for i in which)]
        peer = [small_group("B", f"q{i}", k) for i, k in ((i, [2, 2, 4, 0, 2][i]) for i in which)]
        found = {g.prompt.id: method.better_group(g, [g, p], 3) for g, p in zip(own, peer, strict=True)}
        strengths_of[tuple(which)] = {
            q: method.strength(next(g for g in own if g.prompt.id == q), better)
            for q, better in found.items()
            if better is not None
        }
    assert strengths_of[tuple(order)] == strengths_of[tuple(range(5))] == {"q0": 0.5, "q1": 0.25, "q2": 1.0}


def small_group(model, prompt_id, successes):
    responses = [
        Response(str(i), np.array([1]), np.zeros(1, np.float32), "stop", float(i < successes)) for i in range(4)
    ]
    return Group(model, Prompt(prompt_id, ({"role": "user", "content": "q"},), "", "t"), responses)


# How the gradient relates to the policy gradient ----------------------------------------------------------------------
#
# One prompt, a softmax policy over all responses of `length` tokens from 5, logits by prefix; everything enumerated.


class SoftmaxPolicy:
    """theta: float64 [contexts, 5]; the context of token t is its prefix."""

    def __init__(self, length, seed=0, spread=1.5):
        self.responses = list(itertools.product(range(5), repeat=length))
        prefixes = sorted(
            {o[:t] for o in self.responses for t in range(length)}, key=lambda prefix: (len(prefix), prefix)
        )
        self.index = {prefix: i for i, prefix in enumerate(prefixes)}
        self.theta = torch.tensor(np.random.default_rng(seed).normal(0, spread, (len(prefixes), 5)), requires_grad=True)

    def logprobs(self, response):
        """[T] of a response's tokens."""
        table = self.theta.log_softmax(-1)
        return torch.stack([table[self.index[response[:t]], token] for t, token in enumerate(response)])

    def gradient(self, value):
        (found,) = torch.autograd.grad(value, self.theta)
        return found.numpy()

    def success_gradient(self, right):
        """J and the exact policy gradient of J = P(right), which any baseline leaves as it is."""
        j = sum(self.logprobs(o).sum().exp() for o in right)
        return j.item(), self.gradient(j)

    def scion_gradient(self, drawn, a, tau):
        """What SCION ascends along in expectation: `drawn` gives the probability that each success is the one drawn."""
        term = build_method({"name": "scion", "tau": tau}).objective(0).terms[1]
        loss = 0.0
        for response, probability in drawn.items():
            logprobs = self.logprobs(response)[None]
            loss = loss + probability * term.token_loss(token_batch(logprobs, a)).loss_BT.mean()
        return -self.gradient(loss)


def cosine(x, y):
    return float((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y))


def test_it_is_a_truncated_importance_weighted_policy_gradient_of_the_receivers_own_baseline():
    """E over the peer's draw of (r - b) * mean_t min(p_t / tau, 1) * grad log p_t, b the receiver's success rate: an
    importance weight per token against a behaviour probability of tau, truncated at 1. Any length, any tau."""
    policy = SoftmaxPolicy(length=2)
    drawn, b = {(0, 1): 0.5, (2, 2): 0.3, (4, 0): 0.2}, 0.25
    expected = np.zeros(policy.theta.shape)
    for response, probability in drawn.items():
        for t in range(2):
            p = policy.logprobs(response)[t]
            ratio = min(math.exp(p.item()) / 0.1, 1.0)
            expected += probability * (1 - b) * ratio * policy.gradient(p) / 2
    np.testing.assert_allclose(policy.scion_gradient(drawn, 1 - b, 0.1), expected, rtol=1e-12)


def test_for_one_token_below_tau_it_is_the_exact_policy_gradient_scaled():
    """Uniform draws among K successes, p <= tau: (1 - J) / (K tau) times the exact gradient of the success rate J."""
    policy, right = SoftmaxPolicy(length=1), [(0,), (3,)]
    j, exact = policy.success_gradient(right)
    tau = max(float(policy.logprobs(o).detach().exp()) for o in right)
    assert tau < 1 and 0.05 < j < 0.95
    found = policy.scion_gradient(dict.fromkeys(right, 0.5), 1 - j, tau)
    np.testing.assert_allclose(found, (1 - j) / (2 * tau) * exact, rtol=1e-12)


def test_where_it_is_biased():
    policy, right = SoftmaxPolicy(length=1), [(0,), (2,)]
    policy.theta.data[0] = torch.tensor([0.4, 0.3, 0.05, 0.15, 0.1]).log()
    j, exact = policy.success_gradient(right)
    p = {o: float(policy.logprobs(o).detach().exp()) for o in right}
    uniform = dict.fromkeys(right, 0.5)
    # 1. Above tau it is imitation: the gradient of a cross-entropy, which also moves mass between right responses.
    imitation = policy.scion_gradient(uniform, 1 - j, min(p.values()) / 2)
    expected = (1 - j) * policy.gradient(sum(0.5 * policy.logprobs(o).sum() for o in right))
    np.testing.assert_allclose(imitation, expected, rtol=1e-12)
    assert 0 < cosine(imitation, exact) < 0.999
    # 2. A peer that prefers some right responses pulls towards these.
    assert cosine(policy.scion_gradient({right[0]: 0.9, right[1]: 0.1}, 1 - j, 1.0), exact) < 0.999
    # 3. The gap scales the step by (k_S - k_R) / (n - k_R) and leaves its direction.
    gap = policy.scion_gradient(uniform, 0.7 - j, max(p.values()))
    assert cosine(gap, exact) == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(gap, (0.7 - j) / (1 - j) * policy.scion_gradient(uniform, 1 - j, max(p.values())))


def test_for_longer_responses_the_prefix_is_the_peers_not_the_receivers():
    """The exact gradient weighs token t by the probability of the whole response; here it is that of the token alone.
    With both tokens below tau, a token's part is the exact one divided by the other's probability, times 1 / T."""
    policy, response = SoftmaxPolicy(length=2), (1, 4)
    j, exact = policy.success_gradient([response])
    p1, p2 = policy.logprobs(response).exp().tolist()
    tau = max(p1, p2)
    found = policy.scion_gradient({response: 1.0}, 1 - j, tau)
    first, second = policy.index[()], policy.index[(1,)]
    np.testing.assert_allclose(found[first], (1 - j) / (2 * tau) * exact[first] / p2, rtol=1e-12)
    np.testing.assert_allclose(found[second], (1 - j) / (2 * tau) * exact[second] / p1, rtol=1e-12)
    assert cosine(found, exact) > 0  # one response alone: every token is pulled the right way, by another amount


def test_as_the_receiver_catches_up_nothing_is_left_to_imitate():
    own, peer = small_group("A", "q", 4), small_group("B", "q", 4)
    for scope in ({}, {"scope": "any", "advantage": "headroom"}, {"scope": "all_fail"}):
        assert build_method({"name": "scion", **scope}).better_group(own, [own, peer], 0) is None

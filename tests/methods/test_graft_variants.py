"""Every alternative design of GRAFT against GRAFT on the same groups: what changes, and that nothing else does."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from scorer import Scorer

from graftrl.methods import METHODS, PRESETS, build_method
from graftrl.objective import TokenBatch

FAIL, MIXED, ALL = [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]
TWO = [1, 1, 0, 0]


@pytest.fixture
def groups(make_group):
    """q0: A learns from B. q1: B learns from A. q2: nobody solves it. q3: both do in part. q4: B always, A never."""
    rewards = {"A": [FAIL, MIXED, FAIL, MIXED, FAIL], "B": [TWO, FAIL, FAIL, MIXED, ALL]}
    return {m: [make_group(m, f"q{i}", r) for i, r in enumerate(of_model)] for m, of_model in rewards.items()}


def scorer():
    """The four responses of a group get s = 1.65, 0.85, 0.74 and 0.61: two above the threshold of 0.8, two below."""
    means = {"A:0": 0.0, "A:1": -0.5 + np.log(0.85), "A:2": -0.8, "A:3": -1.0}
    return lambda codecs: Scorer(
        lambda row: (
            means[codecs["A"].tokenizer.decode(row.response_token_ids)[:3]]
            if row.source == "B"
            else means[codecs["B"].tokenizer.decode(row.response_token_ids)[:3]]
        )
    )


@pytest.fixture
def exchange_of(groups, context, codecs):
    def run(method, given=None, **changes):
        step = dataclasses.replace(context(scorer()(codecs), 4), **changes)
        return build_method(method).exchange(given or groups, step)

    return run


def described(rows):
    """Everything of a row that training reads."""
    return [
        (
            row.prompt_id, row.kind, row.source, tuple(row.response_token_ids), row.advantages, row.weight,
            tuple(row.old_logprobs), tuple(row.loss_mask), row.ends_with_eos,
        )
        for row in rows
    ]  # fmt: skip


def grafted(exchange, model):
    return [row for row in exchange.rows[model] if row.kind == "grafted"]


def own(exchange, model):
    return [row for row in exchange.rows[model] if row.kind == "own"]


def losses(method, logprobs, old, advantage, kind):
    """Per-token loss and gradient of one row of a kind under the method's objective, all terms of that kind added."""
    x = torch.tensor([logprobs], requires_grad=True)
    mask = torch.ones_like(x, dtype=torch.bool)
    batch = TokenBatch(x, torch.tensor([old]), torch.full_like(x, advantage).detach(), mask, mask, torch.zeros(1))
    loss = sum(term.token_loss(batch).loss_BT for term in method.objective(0).terms if kind in term.kinds)
    loss.sum().backward()
    return loss.detach().numpy()[0], x.grad.numpy()[0]


def same_objective(first, second, rows):
    """Equal losses, gradients and scales for rows of both kinds."""
    for kind in ("own", "grafted"):
        for advantage in (1.0, -1.0):
            args = ([-0.2, -1.0, -3.0], [-1.0, -1.0, -1.0], advantage, kind)
            for one, other in zip(losses(first, *args), losses(second, *args), strict=True):
                np.testing.assert_array_equal(one, other)
    for one, other in zip(first.objective(0).terms, second.objective(0).terms, strict=True):
        np.testing.assert_array_equal(one.scales(rows), other.scales(rows))


def order(method, rows):
    minibatches = method.order(rows, 1, np.random.default_rng(3))
    return [[id(row) for row in minibatch] for minibatch in minibatches]


SELECTION_AND_WEIGHT = [
    "graft-no-gate", "graft-no-floor", "graft-unbalanced", "graft-admit-all-success", "graft-random-prompts",
    "graft-random-admission", "graft-pooled", "graft-success-only", "graft-success-only-no-floor", "graft-delta-0",
    "graft-delta-0.7", "graft-delta-0.8", "graft-delta-0.9",
]  # fmt: skip


@pytest.mark.parametrize("preset", SELECTION_AND_WEIGHT)
def test_designs_of_selection_and_weight_keep_grafts_objective_and_order(preset, exchange_of):
    graft, variant = build_method("graft"), build_method(preset)
    rows = exchange_of("graft").rows["A"]
    same_objective(graft, variant, rows)
    assert order(graft, rows) == order(variant, rows)


@pytest.mark.parametrize("preset", ["graft-sequence-ratio", "graft-luffy-update"])
def test_designs_of_the_loss_keep_grafts_selection_and_order(preset, exchange_of):
    plain, variant = exchange_of("graft"), exchange_of(preset)
    for model in "AB":
        if preset == "graft-sequence-ratio":
            assert described(variant.rows[model]) == described(plain.rows[model])
        else:  # LUFFY's update has no gate: all rows of the same prompts, weight 1
            assert described(variant.rows[model]) == described(exchange_of("graft-no-gate").rows[model])
    rows = plain.rows["A"]
    assert order(build_method("graft"), rows) == order(build_method(preset), rows)


def test_every_preset_and_variant_builds_and_survives_a_round_trip_through_its_settings():
    for name in [*METHODS, *PRESETS]:
        method = build_method(name)
        again = build_method(method.settings.model_dump())
        assert type(again) is type(method) and again.settings == method.settings


def test_no_gate_and_no_floor_admit_all(exchange_of):
    scores = [1.0, 0.85, np.exp(-0.3), np.exp(-0.5)]  # min(s, 1)
    assert [row.weight for row in grafted(exchange_of("graft-no-gate"), "A")] == [1.0] * 4
    np.testing.assert_allclose([r.weight for r in grafted(exchange_of("graft-no-floor"), "A")], scores, rtol=1e-6)
    np.testing.assert_allclose([row.weight for row in grafted(exchange_of("graft"), "A")], scores[:2], rtol=1e-6)
    for preset in ("graft-no-gate", "graft-no-floor"):
        for model in "AB":
            assert described(own(exchange_of(preset), model)) == described(own(exchange_of("graft"), model))


@pytest.mark.parametrize(
    ("preset", "admitted"),
    [("graft-delta-0", 4), ("graft-delta-0.7", 3), ("graft-delta-0.8", 2), ("graft-delta-0.9", 1)],
)
def test_the_threshold_sweep_admits_fewer_as_it_rises(preset, admitted, exchange_of):
    exchange = exchange_of(preset)
    everything = described(grafted(exchange_of("graft-no-floor"), "A"))
    assert described(grafted(exchange, "A")) == everything[:admitted]
    assert described(own(exchange, "A")) == described(own(exchange_of("graft"), "A"))


def test_unbalanced_and_all_success_differ_only_where_the_other_direction_has_less(make_group, exchange_of):
    groups = {
        "A": [make_group("A", "q0", FAIL), make_group("A", "q1", FAIL), make_group("A", "q2", FAIL)],
        "B": [make_group("B", "q0", TWO), make_group("B", "q1", MIXED), make_group("B", "q2", ALL)],
    }

    def received(method):
        return {row.prompt_id for row in grafted(exchange_of(method, groups), "A")}

    assert received("graft") == set()  # B has no candidate, so nobody receives
    assert received("graft-unbalanced") == {"q0", "q1"}
    assert received({"name": "graft-unbalanced", "admit_all_success": True}) == {"q0", "q1", "q2"}


def test_admit_all_success_takes_the_peers_group_without_contrast_too(groups, exchange_of):
    exchange = exchange_of("graft-admit-all-success")
    assert exchange.directions["B->A"]["candidates"] == 2 and exchange_of("graft").directions["B->A"]["candidates"] == 1
    assert {row.prompt_id for row in grafted(exchange, "A")} == {"q4"}  # ranked before q0: k = 4 against 2
    assert {row.advantages for row in grafted(exchange, "A")} == {0.0}
    assert described(exchange.rows["B"]) == described(exchange_of("graft").rows["B"])


def test_random_prompts_match_the_count_of_each_direction_and_ignore_rewards(make_group, exchange_of):
    rewards = {
        "A": [FAIL, FAIL, MIXED, MIXED, ALL],
        "B": [MIXED, MIXED, FAIL, TWO, ALL],
    }  # graft: 1 each, tie -> 2 to A
    groups = {m: [make_group(m, f"q{i}", r) for i, r in enumerate(of_model)] for m, of_model in rewards.items()}
    graft = exchange_of("graft", groups)
    assert [graft.directions[d]["selected"] for d in ("B->A", "A->B")] == [2, 1]
    drawn = Counter()
    for seed in range(300):
        exchange = exchange_of("graft-random-prompts", groups, seed=seed)
        assert [exchange.directions[d]["selected"] for d in ("B->A", "A->B")] == [2, 1]
        drawn.update({t.prompt_id for t in exchange.transfers if t.receiver == "A"})
    assert all(90 < drawn[f"q{i}"] < 150 for i in range(5))  # 600 / 5 = 120
    assert {t.prompt_id for t in exchange.transfers if t.receiver == "A"} == {
        t.prompt_id for t in exchange_of("graft-random-prompts", groups, seed=299).transfers if t.receiver == "A"
    }


def test_random_prompts_transfer_groups_by_grafts_rules(groups, exchange_of):
    for seed in range(20):
        exchange = exchange_of("graft-random-prompts", seed=seed)
        (prompt_id,) = {t.prompt_id for t in exchange.transfers if t.receiver == "A"}
        if prompt_id == "q0":  # what graft itself selects
            assert described(exchange.rows["A"]) == described(exchange_of("graft").rows["A"])
            break
        assert [row for row in own(exchange, "A") if row.prompt_id == prompt_id] == []
        np.testing.assert_allclose([row.weight for row in grafted(exchange, "A")], [1.0, 0.85], rtol=1e-6)
    else:
        pytest.fail("q0 was never drawn")


def test_random_prompts_do_not_depend_on_the_order_of_prompts(groups, exchange_of):
    turned = {model: of_model[::-1] for model, of_model in groups.items()}
    for seed in range(5):
        one, other = (exchange_of("graft-random-prompts", g, seed=seed) for g in (groups, turned))
        assert sorted(described(one.rows["A"])) == sorted(described(other.rows["A"]))


def test_random_admission_draws_as_many_responses_as_the_gate_admits(groups, exchange_of):
    plain = described(grafted(exchange_of("graft-no-floor"), "A"))
    drawn = Counter()
    for seed in range(300):
        exchange = exchange_of("graft-random-admission", seed=seed)
        rows = described(grafted(exchange, "A"))
        assert len(rows) == 2 and all(row in plain for row in rows)  # advantage and weight min(s, 1) included
        drawn.update(plain.index(row) for row in rows)
        stats = exchange.directions["B->A"]
        assert (stats["responses"], stats["admitted"], stats["gated"]) == (4, 2, 2)
    assert all(115 < drawn[i] < 185 for i in range(4))  # 600 / 4
    assert described(own(exchange, "A")) == described(own(exchange_of("graft"), "A"))


def test_random_admission_never_draws_a_response_without_a_score(groups, exchange_of):
    groups["B"][0].responses[3].logprobs[0] = np.nan
    for seed in range(20):
        exchange = exchange_of("graft-random-admission", seed=seed)
        assert len(grafted(exchange, "A")) == 2 and all(np.isfinite(row.weight) for row in grafted(exchange, "A"))
        assert [t.reason for t in exchange.transfers if t.response_index == 3 and t.receiver == "A"] == ["not finite"]


def test_pooled_keeps_the_receivers_failures_and_takes_advantages_over_both_groups(groups, exchange_of):
    exchange = exchange_of("graft-pooled")
    pool = np.array([0, 0, 0, 0, 1, 1, 0, 0], float)
    a = (pool - pool.mean()) / (pool.std(ddof=1) + 1e-6)
    kept = [row for row in exchange.rows["A"] if row.prompt_id == "q0"]
    assert Counter(row.kind for row in kept) == {"own": 4, "grafted": 2}
    np.testing.assert_allclose([row.advantages for row in kept if row.kind == "own"], a[:4], rtol=1e-6)
    np.testing.assert_allclose([row.advantages for row in kept if row.kind == "grafted"], a[4:6], rtol=1e-6)
    np.testing.assert_allclose([row.weight for row in kept if row.kind == "grafted"], [1.0, 0.85], rtol=1e-6)
    assert {row.weight for row in kept if row.kind == "own"} == {1.0}
    others = [row for row in exchange.rows["A"] if row.prompt_id != "q0"]
    assert described(others) == described([r for r in exchange_of("graft").rows["A"] if r.prompt_id != "q0"])


def test_pooled_prompts_train_last_with_all_their_rows(groups, exchange_of):
    method = build_method("graft-pooled")
    minibatches = method.order(exchange_of("graft-pooled").rows["A"], 1, np.random.default_rng(0))
    assert [m[0].prompt_id for m in minibatches] == ["q1", "q2", "q3", "q4", "q0"] and len(minibatches[-1]) == 6


@pytest.mark.parametrize(
    ("preset", "base"), [("graft-success-only", "graft"), ("graft-success-only-no-floor", "graft-no-floor")]
)
def test_success_only_moves_the_successes_with_their_advantages(preset, base, make_group, exchange_of):
    groups = {
        "A": [make_group("A", "q0", FAIL), make_group("A", "q1", MIXED)],
        "B": [make_group("B", "q0", [0, 1, 0, 1]), make_group("B", "q1", FAIL)],
    }
    exchange = exchange_of(preset, groups)
    expected = [row for row in described(grafted(exchange_of(base, groups), "A")) if row[4] > 0]
    assert described(grafted(exchange, "A")) == expected and len(expected) == (1 if base == "graft" else 2)
    assert described(own(exchange, "A")) == described(own(exchange_of(base, groups), "A"))
    assert {t.reward for t in exchange.transfers} == {1.0}
    rows = exchange.rows["A"]
    (term,) = build_method(preset).objective(0).terms
    np.testing.assert_allclose(term.scales(rows), 1 / sum(row.loss_tokens for row in rows))


def test_sequence_ratio_clips_the_length_normalised_ratio_of_the_whole_response():
    method = build_method("graft-sequence-ratio")
    assert (method.settings.clip_low, method.settings.clip_high) == (3e-4, 4e-4)
    for kind in ("own", "grafted"):
        inside = np.exp((0.0006 - 0.0002) / 2)  # 1.0002
        loss, gradient = losses(method, [-0.9994, -2.0002], [-1.0, -2.0], 1.0, kind)
        np.testing.assert_allclose(loss, -inside, rtol=1e-6)
        np.testing.assert_allclose(gradient, -inside, rtol=1e-6)
        loss, gradient = losses(method, [-0.9, -2.0], [-1.0, -2.0], 1.0, kind)  # exp(0.05), clipped for every token
        np.testing.assert_allclose(loss, -1.0004, rtol=1e-6)
        assert (gradient == 0).all()
        loss, _ = losses(method, [-0.9, -2.0], [-1.0, -2.0], -1.0, kind)
        np.testing.assert_allclose(loss, np.exp(0.05), rtol=1e-6)


def test_sequence_ratio_keeps_the_token_mean_over_all_rows(exchange_of):
    rows = exchange_of("graft").rows["A"]
    one, other = (build_method(name).objective(0).terms[0] for name in ("graft", "graft-sequence-ratio"))
    assert one.scales(rows) == other.scales(rows) and one.kinds == other.kinds


def test_luffy_update_shapes_grafted_tokens_and_clips_own_ones_over_one_denominator(exchange_of):
    method, graft = build_method("graft-luffy-update"), build_method("graft")
    p = np.exp([-0.2, -1.0, -3.0])
    loss, gradient = losses(method, [-0.2, -1.0, -3.0], [-1.0, -1.0, -1.0], 1.0, "grafted")
    np.testing.assert_allclose(loss, -p / (p + 0.1), rtol=1e-6)
    np.testing.assert_allclose(gradient, -0.1 * p / (p + 0.1) ** 2, rtol=1e-5)
    args = ([-0.2, -1.0, -3.0], [-1.0, -1.0, -1.0], 1.0, "own")
    np.testing.assert_array_equal(losses(method, *args)[0], losses(graft, *args)[0])
    rows = exchange_of("graft-luffy-update").rows["A"]
    scales = np.array([term.scales(rows) for term in method.objective(0).terms])
    np.testing.assert_allclose(scales.sum(axis=0), graft.objective(0).terms[0].scales(rows))
    assert ((scales > 0).sum(axis=0) == 1).all()


def test_hacpo_update_adds_peers_on_grafts_prompts_alone(groups, exchange_of):
    rewards = {"A": [0.4], "B": [0.2]}
    exchange = exchange_of("graft-hacpo-update", mean_rewards=rewards)
    hacpo, grpo = exchange_of("hacpo", mean_rewards=rewards), exchange_of("grpo")
    for model, prompt_id in (("A", "q0"), ("B", "q1")):
        assert {row.prompt_id for row in exchange.rows[model] if row.kind == "peer"} == {prompt_id}
        assert described([r for r in exchange.rows[model] if r.prompt_id == prompt_id]) == described(
            [r for r in hacpo.rows[model] if r.prompt_id == prompt_id]
        )
        assert described([r for r in exchange.rows[model] if r.prompt_id != prompt_id]) == described(
            [r for r in grpo.rows[model] if r.prompt_id != prompt_id]
        )
    assert {t.prompt_id for t in exchange.transfers} == {"q0", "q1"}
    method, plain = build_method("graft-hacpo-update"), build_method("hacpo")
    rows = exchange.rows["A"]
    assert order(method, rows) == order(plain, rows)
    for b in (0, 3):
        for one, other in zip(method.objective(b).terms, plain.objective(b).terms, strict=True):
            assert one.scales(rows) == other.scales(rows) and one.kinds == other.kinds


def test_sgt_update_imitates_one_success_of_each_prompt_that_graft_selects(groups, exchange_of):
    exchange, sgt = exchange_of("graft-sgt-update"), exchange_of("sgt")
    assert {t.prompt_id for t in sgt.transfers if t.receiver == "A"} == {"q0", "q4"}  # q4: the peer always succeeds
    assert [t.prompt_id for t in exchange.transfers if t.receiver == "A"] == ["q0"]
    for model in "AB":
        kept = [row for row in described(sgt.rows[model]) if not (row[0] == "q4" and row[1] == "sft")]
        assert described(exchange.rows[model]) == kept  # the same draw on the same prompt
    method, plain = build_method("graft-sgt-update"), build_method("sgt")
    rows = exchange.rows["A"]
    for one, other in zip(method.objective(0).terms, plain.objective(0).terms, strict=True):
        assert one.scales(rows) == other.scales(rows)

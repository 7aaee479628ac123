from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scorer import Scorer

from graftrl.methods import build_method

FAIL, ONE, TWO = [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]


@pytest.fixture
def run(make_group, context):
    """A step with two fresh groups of A; stored groups by step."""

    def exchange(stored, *, step=20, seed=7, **options):
        asked = []

        def history(model, steps):
            asked.append((model, steps))
            return [replace(group, log_step=s) for s, groups in stored.items() if s in steps for group in groups]

        groups = {"A": [make_group("A", "q0", ONE), make_group("A", "q1", FAIL)]}
        step_context = replace(context(Scorer(0.0), 4, step=step, history=history), seed=seed)
        return build_method({"name": "replay", **options}).exchange(groups, step_context), asked

    return exchange


def replayed(exchange):
    return [row for row in exchange.rows["A"] if row.kind == "replay"]


def test_fresh_rows_stay_and_half_as_many_stored_responses_join(make_group, run, context):
    exchange, asked = run({19: [make_group("A", f"s{i}", ONE) for i in range(5)]})
    grpo = build_method("grpo").exchange({"A": [make_group("A", "q0", ONE), make_group("A", "q1", FAIL)]},
                                         context(Scorer(0.0), 4))  # fmt: skip
    fresh = [row for row in exchange.rows["A"] if row.kind == "own"]
    assert [(r.prompt_id, r.advantages) for r in fresh] == [(r.prompt_id, r.advantages) for r in grpo.rows["A"]]
    assert len(replayed(exchange)) == 4 and asked == [("A", range(10, 20))]
    assert exchange.diagnostics["A"] == {"stored": 20, "replayed": 4, "age_mean": 1.0}


def test_replayed_rows_keep_their_advantage_and_their_ratio_is_to_generation(make_group, run):
    stored = make_group("A", "s0", TWO, logprob=-0.7)
    exchange, _ = run({15: [stored]}, replay_ratio=0.5)
    rows = replayed(exchange)
    assert len(rows) == 4
    np.testing.assert_allclose([row.advantages for row in rows], [0.866024, 0.866024, -0.866024, -0.866024], atol=1e-5)
    for row, response in zip(rows, stored.responses, strict=True):
        assert row.response_token_ids.tolist() == response.token_ids.tolist() and row.weight == 1.0
        assert (row.old_logprobs == np.float32(-0.7)).all()


def test_responses_older_than_the_limit_are_never_asked_for(make_group, run):
    stored = {9: [make_group("A", "old", ONE)], 10: [make_group("A", "young", ONE)]}
    exchange, _ = run(stored, replay_ratio=5.0)
    assert {row.prompt_id for row in replayed(exchange)} == {"young"} and len(replayed(exchange)) == 4
    exchange, asked = run(stored, step=3, max_age=10)
    assert asked == [("A", range(1, 3))] and replayed(exchange) == []
    assert exchange.diagnostics["A"] == {"stored": 0, "replayed": 0, "age_mean": None}


@pytest.mark.parametrize("priority", [0.0, 0.5, 1.0])
def test_the_draw_follows_the_size_of_the_advantage(make_group, run, priority):
    a = np.array([1.4999969, *[0.4999990] * 3, *[0.0] * 4])
    expected = (a + 1e-6) ** priority / ((a + 1e-6) ** priority).sum()
    stored = {19: [make_group("A", "s0", ONE), make_group("A", "s1", FAIL)]}
    drawn = Counter()
    for seed in range(600):
        exchange, _ = run(stored, seed=seed, replay_ratio=1 / 8, priority=priority)
        (row,) = replayed(exchange)
        drawn[round(float(row.advantages), 1)] += 1
    shares = [expected[0], expected[1:4].sum(), expected[4:].sum()]
    np.testing.assert_allclose([drawn[value] / 600 for value in (1.5, -0.5, 0.0)], shares, atol=0.06)


def test_replayed_rows_are_spread_over_the_fresh_minibatches_and_share_their_denominator(make_group, run):
    method = build_method("replay")
    exchange, _ = run({19: [make_group("A", "q0", ONE), make_group("A", "s1", TWO)]})  # q0 again, from another step
    minibatches = method.order(exchange.rows["A"], 1, np.random.default_rng(0))
    assert [Counter(row.kind for row in m) for m in minibatches] == [{"own": 4, "replay": 2}] * 2
    assert [{row.prompt_id for row in m if row.kind == "own"} for m in minibatches] == [{"q0"}, {"q1"}]
    (term,) = method.objective(0).terms
    np.testing.assert_allclose(term.scales(minibatches[0]), 1 / sum(row.loss_tokens for row in minibatches[0]))


def test_without_fresh_groups_the_replayed_ones_still_train(make_group, context):
    history = lambda model, steps: [make_group("A", f"s{i}", ONE) for i in range(3)]  # noqa: E731
    method = build_method("replay")
    rows = method.exchange({"A": []}, context(Scorer(0.0), 4, step=5, history=history)).rows["A"]
    assert rows == []  # half of no fresh response
    assert method.order(rows, 2, np.random.default_rng(0)) == []

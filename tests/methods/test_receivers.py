"""Peers that only give: every method trains the receivers alone and learns from live and stored peers alike."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from scorer import Scorer

from graftrl.methods import METHODS, PRESETS, build_method
from graftrl.methods.base import peer_row
from graftrl.methods.extensions import UsesScorers

FAIL, MIXED, MORE = [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]
EXCHANGING = [
    name
    for name in [*METHODS, *PRESETS]
    if build_method(name).fewest_models > 1 and not isinstance(build_method(name), UsesScorers)
]


@pytest.fixture
def mixture(make_group):
    """A and B train; C gives. C alone helps A on q0 and B on q1."""
    return {
        "A": [make_group("A", "q0", FAIL), make_group("A", "q1", MIXED), make_group("A", "q2", FAIL)],
        "B": [make_group("B", "q0", FAIL), make_group("B", "q1", FAIL), make_group("B", "q2", MIXED)],
        "C": [make_group("C", "q0", MIXED), make_group("C", "q1", MORE), make_group("C", "q2", FAIL)],
    }


@pytest.fixture
def giving(context, codecs):
    """A context in which peers only give and their tokenizers are not at hand."""

    def make(*receivers, scorer=None, **changes):
        return dataclasses.replace(
            context(scorer or Scorer(-0.5), 4),
            receivers=receivers,
            codecs={name: codecs[name] for name in receivers},
            stored={name: codecs[name].fingerprint for name in codecs if name not in receivers},
            mean_rewards={"A": [0.1], "B": [0.2], "C": [0.2]},
            **changes,
        )

    return make


@pytest.mark.parametrize("name", ["grpo", "dapo", *EXCHANGING])
def test_rows_are_made_for_the_receivers_alone(mixture, giving, name):
    exchange = build_method(name).exchange(mixture, giving("A", "B"))
    assert set(exchange.rows) == {"A", "B"}
    assert {t.receiver for t in exchange.transfers} <= {"A", "B"}
    assert not any(direction.endswith("->C") for direction in exchange.directions)


@pytest.mark.parametrize("name", [name for name in EXCHANGING if name != "scion-self"])  # a control without peers
def test_a_stored_peer_gives_the_rows_that_a_live_one_would(mixture, giving, context, name):
    alone = {"A": mixture["A"], "C": mixture["C"]}
    stored = build_method(name).exchange(alone, giving("A"))
    live = dataclasses.replace(context(Scorer(-0.5), 4), receivers=("A",), mean_rewards={"A": [0.1], "C": [0.2]})
    expected = build_method(name).exchange(alone, live)

    def content(exchange):
        return [
            (row.prompt_id, row.kind, row.source, row.advantages, row.weight, row.response_token_ids.tolist())
            for row in exchange.rows["A"]
        ]

    assert content(stored) == content(expected)
    assert stored.directions == expected.directions and set(stored.directions) == {"C->A"}
    assert any(row.source == "C" for row in stored.rows["A"])


def test_grafts_come_from_the_best_peer_live_or_stored(mixture, giving):
    exchange = build_method("graft-unbalanced").exchange(mixture, giving("A", "B"))
    source_of = {
        model: {row.prompt_id: row.source for row in rows if row.kind == "grafted"}
        for model, rows in exchange.rows.items()
    }
    assert source_of == {"A": {"q0": "C", "q2": "B"}, "B": {"q0": "C", "q1": "C"}}  # A has 1 of 4 on q1, C has 2


def test_balance_is_between_the_receivers(mixture, giving):
    exchange = build_method("graft").exchange(mixture, giving("A", "B"))
    selected = {model: {t.prompt_id for t in exchange.transfers if t.receiver == model} for model in "AB"}
    # Two candidates each: of A q0 (1 of 4) and q2 (1 of 4), of B q0 (1 of 4) and q1 (2 of 4).
    assert selected == {"A": {"q0", "q2"}, "B": {"q0", "q1"}}
    mixture["A"][2] = dataclasses.replace(mixture["A"][1], prompt=mixture["A"][2].prompt)  # A solves q2 now
    exchange = build_method("graft").exchange(mixture, giving("A", "B"))
    selected = {model: {t.prompt_id for t in exchange.transfers if t.receiver == model} for model in "AB"}
    assert selected == {"A": {"q0"}, "B": {"q1"}}  # m = 1, and C's 2 of 4 come first


@pytest.mark.parametrize("name", ["sgt", "luffy"])
def test_a_success_is_drawn_uniformly_among_all_peers(make_group, giving, name):
    groups = {
        "A": [make_group("A", "q0", FAIL)],
        "B": [make_group("B", "q0", MIXED)],
        "C": [make_group("C", "q0", [1, 1, 1, 0])],
    }
    drawn = Counter()
    for seed in range(400):
        (transfer,) = [
            t for t in build_method(name).exchange(groups, giving("A", "B", seed=seed)).transfers if t.receiver == "A"
        ]
        drawn[transfer.source, transfer.response_index] += 1
    assert set(drawn) == {("B", 0), ("C", 0), ("C", 1), ("C", 2)}
    assert all(abs(count - 100) < 4 * np.sqrt(400 * 0.25 * 0.75) for count in drawn.values())


def test_prompts_that_a_stored_peer_lacks_stay_the_receivers_own(mixture, giving):
    del mixture["C"][0]
    for name in EXCHANGING:
        exchange = build_method(name).exchange({"A": mixture["A"], "C": mixture["C"]}, giving("A"))
        assert {row.source for row in exchange.rows["A"] if row.prompt_id == "q0"} == {"A"}


def test_ids_of_a_stored_peer_are_reused_only_where_the_fingerprint_is_the_receivers(make_group, giving, codecs):
    group = make_group("C", "q0", MIXED, texts=["A:1,2;E:3"] * 4)
    group.responses[0].token_ids = np.array([*(codecs["A"].tokenizer.encode(c)[-1] for c in "1,2"), 0])
    context = giving("A")
    same = dataclasses.replace(context, stored={"C": codecs["A"].fingerprint})
    untouched = peer_row(group, 0, "A", same, advantage=0.0, kind="grafted")
    assert untouched.response_token_ids[:-1].tolist() == group.responses[0].token_ids[:-1].tolist()
    for fingerprint in ("", codecs["C"].fingerprint):
        other = dataclasses.replace(context, stored={"C": fingerprint})
        row = peer_row(group, 0, "A", other, advantage=0.0, kind="grafted")
        assert codecs["A"].tokenizer.decode(row.response_token_ids[:-1]) == "A:1,2;E:3"


@pytest.mark.parametrize(
    ("name", "usable"),
    [
        ("graft", {("fail", 1), ("fail", 3)}),
        ("graft-admit-all-success", {("fail", 1), ("fail", 3), ("fail", 4)}),
        ("sgt", {("fail", 1), ("fail", 3), ("fail", 4)}),
        ("luffy", {(own, k) for own in ("fail", "mixed") for k in (1, 3, 4)}),
        ("hacpo", {(own, k) for own in ("fail", "mixed") for k in (0, 1, 3, 4)}),
        ("scion", {("fail", 1), ("fail", 3), ("fail", 4), ("mixed", 3), ("mixed", 4)}),
        ("grpo", set()),
    ],
)
def test_methods_say_where_a_peers_group_is_of_use(make_group, name, usable):
    own = {"fail": make_group("A", "q0", FAIL), "mixed": make_group("A", "q0", MIXED)}
    method = build_method(name)
    assert {(kind, k) for kind, group in own.items() for k in (0, 1, 3, 4) if method.usable(group, k, 4)} == usable

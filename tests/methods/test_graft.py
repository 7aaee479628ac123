import numpy as np
import pytest
from scorer import Scorer

from graftrl.errors import DataError
from graftrl.methods import GRAFT, build_method
from graftrl.methods.graft import GRAFTSettings

FAIL, MIXED, ALL = [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]
A_SUCCESS, A_FAILURE = 1.4999969, -0.4999990  # (1 - 1/4) / (0.5 + 1e-6), (0 - 1/4) / (0.5 + 1e-6)


@pytest.fixture
def complementary(make_group):
    """q0: A learns from B. q1: B learns from A. q2, q3: nobody can give."""
    return {
        "A": [make_group("A", "q0", FAIL), make_group("A", "q1", MIXED), make_group("A", "q2", FAIL),
              make_group("A", "q3", ALL)],
        "B": [make_group("B", "q0", MIXED), make_group("B", "q1", FAIL), make_group("B", "q2", FAIL),
              make_group("B", "q3", FAIL)],
    }  # fmt: skip


def rows_of(exchange, model, prompt_id):
    return [row for row in exchange.rows[model] if row.prompt_id == prompt_id]


def test_the_peers_whole_group_replaces_the_failed_one_in_the_receivers_tokens(complementary, context, codecs):
    exchange = GRAFT(GRAFTSettings()).exchange(complementary, context(Scorer(-0.5), 4))
    grafted = rows_of(exchange, "A", "q0")
    assert [row.kind for row in grafted] == ["grafted"] * 4 and {row.source for row in grafted} == {"B"}
    for row, response in zip(grafted, complementary["B"][0].responses, strict=True):
        expected = [*codecs["A"].tokenizer.encode(response.text, add_special_tokens=False), codecs["A"].eos_id]
        assert row.response_token_ids.tolist() == expected
        assert row.prompt_token_ids.tolist() == codecs["A"].tokenizer.encode("a1,2,3>", add_special_tokens=False)
    assert {row.kind for row in rows_of(exchange, "A", "q1")} == {"own"}


def test_grafted_rows_keep_the_sources_advantages_and_the_scoring_pass_as_old_logprobs(complementary, context):
    exchange = GRAFT(GRAFTSettings()).exchange(complementary, context(Scorer(-0.6), 4))
    grafted = rows_of(exchange, "A", "q0")
    np.testing.assert_allclose([row.advantages for row in grafted], [A_SUCCESS, *[A_FAILURE] * 3], rtol=1e-5)
    np.testing.assert_allclose([row.weight for row in grafted], np.exp(-0.1), rtol=1e-6)
    assert all((row.old_logprobs == np.float32(-0.6)).all() for row in grafted)


def test_one_scoring_pass_per_receiver(complementary, context):
    scorer = Scorer(-0.5)
    GRAFT(GRAFTSettings()).exchange(complementary, context(scorer, 4))
    assert scorer.calls == ["A", "B"]


def test_prompts_that_no_peer_solves_in_part_stay_the_receivers_own(complementary, context):
    exchange = GRAFT(GRAFTSettings()).exchange(complementary, context(Scorer(-0.5), 4))
    for model, prompt_id in (("A", "q2"), ("B", "q2"), ("B", "q3")):  # all fail; the peer solves q3 every time
        assert {row.kind for row in rows_of(exchange, model, prompt_id)} == {"own"}


def test_a_response_below_the_threshold_is_dropped_and_advantages_are_not_normalised_again(complementary, context):
    # Only the failures of the peer's group (its texts start with A:1, A:2, A:3) clear the gate.
    scorer = Scorer(lambda row: -2.0 if row.advantages > 0 else -0.5)
    exchange = GRAFT(GRAFTSettings()).exchange(complementary, context(scorer, 4))
    grafted = rows_of(exchange, "A", "q0")
    np.testing.assert_allclose([row.advantages for row in grafted], [A_FAILURE] * 3, rtol=1e-5)
    stats = exchange.directions["B->A"]
    assert (stats["admitted_successes"], stats["admitted_failures"], stats["gated"]) == (0, 3, 1)


def test_a_prompt_vanishes_when_every_grafted_response_is_gated(complementary, context):
    exchange = GRAFT(GRAFTSettings()).exchange(complementary, context(Scorer(-3.0), 4))
    assert rows_of(exchange, "A", "q0") == []
    minibatches = GRAFT(GRAFTSettings()).order(exchange.rows["A"], 2, np.random.default_rng(0))
    assert [{row.prompt_id for row in minibatch} for minibatch in minibatches] == [{"q1", "q2"}, {"q3"}]


@pytest.mark.parametrize(
    ("weighting", "weights"), [("gate", []), ("no_floor", [np.exp(-1.5)] * 4), ("none", [1.0] * 4)]
)
def test_weighting_variants(complementary, context, weighting, weights):
    exchange = GRAFT(GRAFTSettings(weighting=weighting)).exchange(complementary, context(Scorer(-2.0), 4))
    np.testing.assert_allclose([row.weight for row in rows_of(exchange, "A", "q0")], weights, rtol=1e-6)


def test_a_score_uses_contents_without_the_eos_of_either_side(make_group, context):
    groups = {"A": [make_group("A", "q0", FAIL), make_group("A", "q1", MIXED)],
              "B": [make_group("B", "q0", MIXED), make_group("B", "q1", FAIL)]}  # fmt: skip
    for response in groups["B"][0].responses:
        response.logprobs[-1] = -50.0  # the source's EOS

    class EosScorer(Scorer):
        def __call__(self, model, rows):
            scored = super().__call__(model, rows)
            for values in scored:
                values[-1] = -70.0  # the receiver's EOS
            return scored

    exchange = GRAFT(GRAFTSettings()).exchange(groups, context(EosScorer(-0.5), 4))
    assert [t.score for t in exchange.transfers if t.receiver == "A"] == pytest.approx([1.0] * 4)


def test_non_finite_logprobs_are_gated_and_counted(complementary, context):
    complementary["B"][0].responses[1].logprobs[2] = np.nan
    scorer = Scorer(lambda row: -np.inf if row.response_token_ids[1] == 0 else -0.5)
    exchange = GRAFT(GRAFTSettings()).exchange(complementary, context(scorer, 4))
    assert exchange.directions["B->A"]["gated_not_finite"] >= 1
    assert all(np.isfinite(row.old_logprobs).all() for row in rows_of(exchange, "A", "q0"))


def test_a_response_longer_than_the_receivers_limit_is_rejected_not_cut(complementary, context):
    exchange = GRAFT(GRAFTSettings()).exchange(complementary, context(Scorer(-0.5), 4, limit=3))
    assert rows_of(exchange, "A", "q0") == []
    assert exchange.directions["B->A"]["rejected"] == {"too long": 4}


def test_a_response_cut_at_the_sources_limit_gets_no_eos(make_group, context, codecs):
    groups = {"A": [make_group("A", "q0", FAIL), make_group("A", "q1", MIXED)],
              "B": [make_group("B", "q0", MIXED, finish="length"), make_group("B", "q1", FAIL)]}  # fmt: skip
    exchange = GRAFT(GRAFTSettings()).exchange(groups, context(Scorer(-0.5), 4))
    assert all(row.response_token_ids[-1] != codecs["A"].eos_id for row in rows_of(exchange, "A", "q0"))


def test_without_a_complementary_prompt_graft_is_grpo(make_group, context):
    groups = {"A": [make_group("A", "q0", MIXED), make_group("A", "q1", FAIL)],
              "B": [make_group("B", "q0", MIXED), make_group("B", "q1", ALL)]}  # fmt: skip
    graft = GRAFT(GRAFTSettings()).exchange(groups, context(Scorer(-0.5), 4))
    grpo = build_method("grpo").exchange(groups, context(Scorer(-0.5), 4))
    for model in groups:
        assert [(r.prompt_id, r.kind, r.advantages, r.weight) for r in graft.rows[model]] == [
            (r.prompt_id, r.kind, r.advantages, r.weight) for r in grpo.rows[model]
        ]


def test_three_peers_learn_each_from_the_best_source(make_group, context):
    groups = {
        "A": [make_group("A", "q0", FAIL), make_group("A", "q1", MIXED), make_group("A", "q2", MIXED)],
        "B": [make_group("B", "q0", MIXED), make_group("B", "q1", FAIL), make_group("B", "q2", MIXED)],
        "C": [make_group("C", "q0", [1, 1, 0, 0]), make_group("C", "q1", ALL), make_group("C", "q2", FAIL)],
    }
    exchange = GRAFT(GRAFTSettings()).exchange(groups, context(Scorer(-0.5), 4))
    sources = {(row.prompt_id, row.source) for row in exchange.rows["A"] if row.kind == "grafted"}
    assert sources == {("q0", "C")}
    assert exchange.directions["C->A"]["selected"] == 1 and exchange.directions["B->A"]["selected"] == 0
    assert {row.source for row in exchange.rows["B"] if row.kind == "grafted"} == {"A"}
    assert len({row.source for row in exchange.rows["C"] if row.kind == "grafted"}) == 1


@pytest.mark.parametrize("position", ["last", "first", "uniform"])
def test_peer_position_permutes_minibatches_of_the_same_composition(complementary, context, position):
    exchange = GRAFT(GRAFTSettings()).exchange(complementary, context(Scorer(-0.5), 4))
    method = GRAFT(GRAFTSettings(peer_position=position))
    minibatches = method.order(exchange.rows["A"], 1, np.random.default_rng(3))
    prompts = [minibatch[0].prompt_id for minibatch in minibatches]
    assert sorted(prompts) == ["q0", "q1", "q2", "q3"]
    if position == "last":
        assert prompts == ["q1", "q2", "q3", "q0"]
    if position == "first":
        assert prompts == ["q0", "q1", "q2", "q3"]


def test_the_boundary_minibatch_holds_own_and_grafted_prompts(complementary, context):
    exchange = GRAFT(GRAFTSettings()).exchange(complementary, context(Scorer(-0.5), 4))
    minibatches = GRAFT(GRAFTSettings()).order(exchange.rows["A"], 2, np.random.default_rng(0))
    assert [[row.kind for row in minibatch] for minibatch in minibatches] == [
        ["own"] * 8, ["own"] * 4 + ["grafted"] * 4
    ]  # fmt: skip


def test_the_denominator_counts_admitted_rows_in_full_whatever_their_weight(complementary, context):
    exchange = GRAFT(GRAFTSettings()).exchange(complementary, context(Scorer(-0.6), 4))
    (term,) = GRAFT(GRAFTSettings()).objective(0).terms
    rows = exchange.rows["A"]
    tokens = sum(len(row.response_token_ids) for row in rows)
    assert {row.kind for row in rows} == {"own", "grafted"}
    np.testing.assert_allclose(term.scales(rows), 1 / tokens)


def test_diagnostics_count_every_direction(complementary, context):
    stats = GRAFT(GRAFTSettings()).exchange(complementary, context(Scorer(-0.6), 4)).directions
    assert set(stats) == {"A->B", "B->A"}
    to_a, to_b = stats["B->A"], stats["A->B"]
    assert (to_a["candidates"], to_a["selected"], to_a["responses"], to_a["admitted"]) == (1, 1, 4, 4)
    assert (to_b["candidates"], to_b["selected"]) == (1, 1)
    assert to_a["score_mean"] == pytest.approx(np.exp(-0.1)) and to_a["weight_mean"] == pytest.approx(np.exp(-0.1))
    assert sum(to_a["score_histogram"]) == 4 and to_a["score_histogram"][18] == 4  # 0.9 to 0.95


def test_negative_only_transfer_is_said(make_group, context):
    groups = {
        "A": [make_group("A", "q0", FAIL), make_group("A", "q1", FAIL), make_group("A", "q2", MIXED),
              make_group("A", "q3", MIXED)],
        "B": [make_group("B", "q0", MIXED), make_group("B", "q1", MIXED), make_group("B", "q2", FAIL),
              make_group("B", "q3", FAIL)],
    }  # fmt: skip
    scorer = Scorer(lambda row: -2.0 if row.advantages > 0 else -0.5)
    notes = GRAFT(GRAFTSettings()).exchange(groups, context(scorer, 4)).notes
    assert len(notes) == 2 and "negative-only" in notes[0]


def test_the_order_of_prompts_and_models_does_not_change_the_exchange(complementary, context):
    straight = GRAFT(GRAFTSettings()).exchange(complementary, context(Scorer(-0.5), 4))
    shuffled = {model: groups[::-1] for model, groups in reversed(complementary.items())}
    other = GRAFT(GRAFTSettings()).exchange(shuffled, context(Scorer(-0.5), 4))

    def summary(exchange):
        return {
            model: sorted((row.prompt_id, row.kind, row.source, row.advantages, row.weight) for row in rows)
            for model, rows in exchange.rows.items()
        }

    assert summary(straight) == summary(other)


def test_partial_credit_is_refused(make_group, context):
    groups = {"A": [make_group("A", "q0", [0, 0.5])], "B": [make_group("B", "q0", [0, 1])]}
    with pytest.raises(DataError, match="0 or 1"):
        GRAFT(GRAFTSettings()).exchange(groups, context(Scorer(-0.5), 2))

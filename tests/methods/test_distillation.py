"""The on-policy distillation family against NumPy loops; scorers are tables of log-probabilities, no model runs."""

from __future__ import annotations

import copy
import dataclasses
import zlib

import numpy as np
import pytest
import torch

from graftrl.errors import ConfigError
from graftrl.exchange.spans import total
from graftrl.methods import build_method
from graftrl.methods.distillation import SPAN, in_tokens_of, read_by
from graftrl.methods.extensions import UsesScorers
from graftrl.methods.opd_urm import OUTCOME
from graftrl.objective import TokenBatch
from graftrl.rollout import Response

FAIL, ONE, ALL = [0, 0], [1, 0], [1, 1]
FAMILY = ["opd", "opd_ft", "opd_urm", "p_opd", "w2s_opd", "ra_opd", "avsd"]
LAMBDA = 1.5


class Tables:
    """Log-probabilities of a row's tokens: a function of the scorer, its prompt and the tokens, float32 [T]."""

    def __init__(self):
        self.asked = []

    def __call__(self, name, rows):
        self.asked += [(name, row) for row in rows]
        return [self.of(name, row) for row in rows]

    def of(self, name, row):
        key = f"{name} {row.prompt_token_ids.tolist()} {row.response_token_ids.tolist()}"
        rng = np.random.default_rng(zlib.crc32(key.encode()))
        return -rng.exponential(1.0, len(row.response_token_ids)).astype(np.float32)

    def in_tokens(self, model, name, row, codecs):
        """What scorer `name` holds of the tokens that `model` would write a row of A in, float64."""
        theirs = in_tokens_of(codecs[model], row, codecs["A"])
        prompt = codecs[model].tokenizer.encode("a1,2,3>", add_special_tokens=False)
        read = dataclasses.replace(
            row, prompt_token_ids=np.array(prompt), response_token_ids=theirs.token_ids, loss_mask=np.empty(0, bool)
        )
        return self.of(name, read).astype(np.float64)


@pytest.fixture
def tables():
    return Tables()


@pytest.fixture
def step(codecs, context, tables):
    """Scorers speak the tokens of a model: `step(teacher="A")`."""

    def make(score=None, **speaks):
        scorers = {name: codecs[model] for name, model in speaks.items()}
        return dataclasses.replace(context(score or tables, 2), receivers=("A",), scorers=scorers)

    return make


@pytest.fixture
def groups(make_group):
    return {"A": [make_group("A", "q0", FAIL), make_group("A", "q1", ONE), make_group("A", "q2", ALL)]}


def scorers_of(method):
    return dict.fromkeys(build_method(method).scorers, "A")


def batch(rows, logprobs, reference=None, **changes):
    """What a policy hands to a token loss; `logprobs` and `reference` float64 [T] per row, in the rows' own tokens."""
    longest = max(len(row.response_token_ids) for row in rows)

    def padded(values):
        out = torch.zeros(len(rows), longest, dtype=torch.float64)
        for b, value in enumerate(values):
            out[b, : len(value)] = torch.as_tensor(np.asarray(value, dtype=np.float64))
        return out

    mask = padded([np.ones(len(row.response_token_ids)) for row in rows]).bool()
    weights = [np.full(len(row.response_token_ids), row.advantages) for row in rows]
    return TokenBatch(
        padded(logprobs).requires_grad_(), padded([row.old_logprobs for row in rows]), padded(weights), mask, mask,
        torch.zeros(len(rows)), None if reference is None else padded(reference),
        constants={name: padded([row.constants[name] for row in rows]) for name in rows[0].constants}, **changes,
    )  # fmt: skip


def random_logprobs(rows, seed):
    rng = np.random.default_rng(seed)
    return [-rng.exponential(1.0, len(row.response_token_ids)) for row in rows]


def loss_and_gradient(method, tokens):
    """Of the only term: loss at every token [B, T], and the gradient of its sum in the log-probabilities."""
    (term,) = method.objective(0).terms
    loss = torch.where(tokens.mask_BT, term.token_loss(tokens).loss_BT, 0.0)
    return loss.detach(), torch.autograd.grad(loss.sum(), tokens.logprobs_BT)[0]


# One tokenizer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY)
def test_a_method_asks_for_its_scorers_and_scores_each_response_once_by_each(groups, step, tables, name):
    method = build_method(name)
    assert isinstance(method, UsesScorers)
    exchange = method.exchange(groups, step(**scorers_of(name)))
    kept_before_scoring = 4 if name == "opd_ft" else 6
    assert len(tables.asked) == kept_before_scoring * len(method.scorers)
    assert {scorer for scorer, _ in tables.asked} == set(method.scorers)
    for row in exchange.rows["A"]:
        assert row.kind == "own" and row.advantages == 1.0
        for scorer in method.scorers:
            np.testing.assert_array_equal(row.constants[scorer], tables.of(scorer, row))


EXPECTED_SIGNAL = {
    "opd": lambda c, own, ref: c["teacher"] - own,
    "opd_ft": lambda c, own, ref: c["teacher"] - own,
    "ra_opd": lambda c, own, ref: c["teacher"] - own,
    "p_opd": lambda c, own, ref: c["expert"] - c["base"] - LAMBDA * (own - ref),
    "w2s_opd": lambda c, own, ref: c["positive"] - c["negative"] - LAMBDA * (own - ref),
}
OPTIONS = {"p_opd": {"calibration": LAMBDA}, "w2s_opd": {"strength": 1 / LAMBDA}}


@pytest.mark.parametrize("name", EXPECTED_SIGNAL)
def test_the_gradient_is_the_policy_gradient_of_the_signal(groups, step, name):
    """d loss / d log pi(token) = -ratio * signal, with the signal a constant under the current weights."""
    method = build_method({"name": name, **OPTIONS.get(name, {})})
    rows = method.exchange(groups, step(**scorers_of(name))).rows["A"]
    own, ref = random_logprobs(rows, 1), random_logprobs(rows, 2)
    tokens = batch(rows, own, ref if method.objective(0).needs_reference else None)
    _, gradient = loss_and_gradient(method, tokens)
    for b, row in enumerate(rows):
        signal = EXPECTED_SIGNAL[name](row.constants, own[b], ref[b])
        ratio = np.exp(own[b] - row.old_logprobs)
        np.testing.assert_allclose(gradient[b, : len(own[b])].numpy(), -ratio * signal, rtol=1e-5, atol=1e-6)


def test_lambda_one_with_the_base_as_reference_gives_opds_gradient(groups, step):
    rows = build_method("p_opd").exchange(groups, step(expert="A", base="A")).rows["A"]
    own, base = random_logprobs(rows, 1), [row.constants["base"] for row in rows]
    _, of_transfer = loss_and_gradient(build_method("p_opd"), batch(rows, own, base))
    for row in rows:
        row.constants = {"teacher": row.constants["expert"]}
    _, of_opd = loss_and_gradient(build_method("opd"), batch(rows, own))
    torch.testing.assert_close(of_transfer, of_opd)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("estimator", ["sampled", "full"])
def test_weak_to_strong_with_alpha_is_p_opd_with_lambda_one_over_alpha(alpha, estimator):
    weak = build_method({"name": "w2s_opd", "strength": alpha, "estimator": estimator})
    transfer = build_method(
        {"name": "p_opd", "calibration": 1 / alpha, "estimator": estimator, "expert": "positive", "base": "negative"}
    )
    assert weak.mixture == transfer.mixture and weak.scorers == transfer.scorers
    one, other = weak.objective(0), transfer.objective(0)
    assert (one.needs_reference, one.mixture) == (other.needs_reference, other.mixture)


def test_the_contrast_of_hints_reads_one_model_in_two_contexts(groups, step, tables, codecs):
    """The third contrast pair: positive and negative differ in their prompts alone."""

    class Hinted:
        def __init__(self, codec, hint):
            self.tokenizer, self.eos_id, self.fingerprint = codec.tokenizer, codec.eos_id, codec.fingerprint
            self.hint = hint

        def prompt_token_ids(self, prompt):
            return np.array([self.hint, *codecs["A"].prompt_token_ids(prompt)])

    context = dataclasses.replace(
        step(), scorers={"positive": Hinted(codecs["A"], 7), "negative": Hinted(codecs["A"], 9)}
    )
    rows = build_method("w2s_opd").exchange(groups, context).rows["A"]
    assert {(name, int(row.prompt_token_ids[0])) for name, row in tables.asked} == {("positive", 7), ("negative", 9)}
    assert not np.array_equal(rows[0].constants["positive"], rows[0].constants["negative"])
    full = build_method({"name": "w2s_opd", "estimator": "full"}).exchange(groups, context).rows["A"]
    assert full[0].contexts["positive"][0] == 7 and full[0].contexts["negative"][0] == 9


def test_ft_leaves_out_groups_that_are_right_already(groups, step):
    exchange = build_method("opd_ft").exchange(groups, step(teacher="A"))
    assert [row.prompt_id for row in exchange.rows["A"]] == ["q0", "q0", "q1", "q1"]
    assert exchange.diagnostics["A"] == {"distilled": 4, "left_out": 2, "rejected": {}}


def test_urm_masks_tokens_against_the_outcome_and_keeps_them_in_the_mean(groups, step):
    method = build_method("opd_urm")
    rows = method.exchange(groups, step(teacher="A")).rows["A"]
    own = random_logprobs(rows, 3)
    tokens = batch(rows, own)
    loss, gradient = loss_and_gradient(method, tokens)
    rewards = [0, 0, 1, 0, 1, 1]
    for b, (row, reward) in enumerate(zip(rows, rewards, strict=True)):
        signal = row.constants["teacher"] - own[b]
        kept = (2 * reward - 1) * signal > 0
        expected = -np.exp(own[b] - row.old_logprobs) * signal * kept
        np.testing.assert_allclose(gradient[b, : len(own[b])].numpy(), expected, rtol=1e-6)
        assert row.loss_tokens == len(own[b])
    assert (loss[tokens.mask_BT] == 0).any() and (loss[tokens.mask_BT] != 0).any()


def test_ra_keeps_responses_whose_return_agrees_with_their_reward(make_group, step):
    """Generation log-probabilities are -0.5: a teacher at -0.2 returns +0.3, one at -0.9 returns -0.4."""
    groups = {"A": [make_group("A", "q0", [1, 0], texts=["A:1", "B:22"]), make_group("A", "q1", [0.5, 0])]}
    for teacher, kept in ((-0.2, [1.0, 0.5]), (-0.9, [0.0, 0.5, 0.0]), (-0.5, [1.0, 0.0, 0.5, 0.0])):

        def score(name, rows, teacher=teacher):
            return [np.full(len(row.response_token_ids), teacher, np.float32) for row in rows]

        exchange = build_method("ra_opd").exchange(groups, step(score, teacher="A"))
        rewards = {r.token_ids.tobytes(): r.reward for g in groups["A"] for r in g.responses}
        assert [rewards[row.response_token_ids.tobytes()] for row in exchange.rows["A"]] == kept
        assert exchange.diagnostics["A"]["left_out"] == 4 - len(kept)


def test_avsd_sums_views_by_their_consensus(groups, step):
    method = build_method({"name": "avsd", "views": ["hint", "solution", "answer"]})
    rows = method.exchange(groups, step(hint="A", solution="A", answer="A")).rows["A"]
    own = random_logprobs(rows, 4)
    _, gradient = loss_and_gradient(method, batch(rows, own))
    for b, row in enumerate(rows):
        for t in range(len(own[b])):
            logs = np.array([row.constants[view][t] for view in method.scorers], dtype=np.float64)
            d = logs - own[b][t]
            a, j = d.mean(), np.log(np.exp(logs).mean()) - logs.mean()
            signal = a + abs(a) / np.abs(d).mean() * abs(a) / (abs(a) + j) * j
            expected = -np.exp(own[b][t] - row.old_logprobs[t]) * signal
            assert float(gradient[b, t]) == pytest.approx(expected, rel=1e-5)


def test_avsd_has_no_full_form():
    with pytest.raises(ValueError, match="Input should be 'sampled'"):
        build_method({"name": "avsd", "estimator": "full"})
    with pytest.raises(ValueError, match="names a view twice"):
        build_method({"name": "avsd", "views": ["a", "a"]})


@pytest.mark.parametrize("name", ["opd", "p_opd", "ra_opd", "w2s_opd", "opd_urm"])
@pytest.mark.parametrize("estimator", ["full", "top_k"])
def test_the_full_form_trains_on_the_expected_signal(groups, step, name, estimator):
    method = build_method({"name": name, "estimator": estimator, "top_k": 3})
    objective = method.objective(0)
    assert objective.mixture == method.mixture and not objective.needs_reference
    assert method.mixture.support == (3 if estimator == "top_k" else None)
    rows = method.exchange(groups, step(**scorers_of(name))).rows["A"]
    for row in rows:
        assert set(row.contexts) == set(method.scorers)
    expected = torch.randn(len(rows), max(len(r.response_token_ids) for r in rows), dtype=torch.float64)
    tokens = batch(rows, random_logprobs(rows, 1), expected_signal_BT=expected.requires_grad_())
    loss = objective.terms[0].token_loss(tokens).loss_BT
    (gradient,) = torch.autograd.grad(loss[tokens.mask_BT].sum(), expected)
    if name == "opd_urm":
        teacher = tokens.constants["teacher"]
        kept = tokens.constants[OUTCOME] * (teacher - tokens.logprobs_BT.detach()) > 0
        assert torch.equal(gradient, -(kept & tokens.mask_BT).double())
    else:
        assert torch.equal(gradient, -tokens.mask_BT.double())


@pytest.mark.parametrize("name", FAMILY)
def test_drift_gating_is_an_option_of_every_method(groups, step, name):
    rows = build_method(name).exchange(groups, step(**scorers_of(name))).rows["A"]
    own, ref = random_logprobs(rows, 5), random_logprobs(rows, 6)
    plain, gated = (build_method({"name": name, "drift_tau": tau, "drift_block": 4}) for tau in (0.0, 0.8))
    reference = ref if plain.objective(0).needs_reference else None
    without, _ = loss_and_gradient(plain, batch(rows, own, reference))
    tokens = batch(rows, own, reference)
    with_gate, _ = loss_and_gradient(gated, tokens)
    assert "drift_gate" in gated.objective(0).terms[0].token_loss(tokens).means_BT
    for b, row in enumerate(rows):
        length = len(own[b])
        drift = row.old_logprobs - own[b]
        gates = np.concatenate([np.full(4, np.exp(-0.8 * abs(drift[s : s + 4].mean()))) for s in range(0, length, 4)])
        gates = gates[:length] / gates[:length].mean()
        np.testing.assert_allclose(with_gate[b, :length], without[b, :length] * gates, rtol=1e-6, atol=1e-12)


def test_a_step_is_one_minibatch_unless_told_otherwise(groups, step):
    rows = build_method("opd").exchange(groups, step(teacher="A")).rows["A"]
    rng = np.random.default_rng(0)
    assert [len(batch) for batch in build_method("opd").order(rows, 1, rng)] == [6]
    many = build_method({"name": "opd", "single_minibatch": False})
    assert [len(batch) for batch in many.order(rows, 1, rng)] == [2, 2, 2]
    assert build_method("opd").order([], 1, rng) == []


@pytest.mark.parametrize("estimator", ["sampled", "full", "top_k"])
def test_log_probabilities_that_are_not_finite_are_counted_and_left_out(groups, step, tables, estimator):
    """In the sums over the vocabulary as well: one NaN there would spoil the gradient of the whole minibatch."""

    def score(name, rows):
        values = tables(name, rows)
        if name == "base":
            values[2] = np.full_like(values[2], -np.inf)
        return values

    method = build_method({"name": "p_opd", "estimator": estimator})
    exchange = method.exchange(groups, step(score, expert="A", base="A"))
    assert len(exchange.rows["A"]) == 5
    assert exchange.diagnostics["A"] == {"distilled": 5, "left_out": 0, "rejected": {"not finite": 1}}


# Different tokenizers -------------------------------------------------------------------------------------------------


def test_scorers_read_the_response_in_their_own_tokens_after_their_own_prompt(groups, step, tables, codecs):
    context = step(teacher="B")
    prompt = groups["A"][0].prompt
    row = build_method("opd").exchange({"A": groups["A"][:1]}, context).rows["A"][0]
    name, theirs = tables.asked[0]
    assert name == "teacher" and theirs.response_token_ids[-1] == codecs["B"].eos_id
    assert codecs["B"].decode_response(theirs.response_token_ids, stopped=True) == "A:0,2,3;E:0,6,9"
    assert theirs.response_token_ids.tolist() != row.response_token_ids.tolist()
    assert theirs.prompt_token_ids.tolist() == codecs["B"].prompt_token_ids(prompt).tolist()


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_span_signals_telescope_to_the_sequences_exact_log_ratio(make_group, step, tables, codecs, finish):
    """P-OPD with proxies of another vocabulary: over a response's spans the signal adds up to
    (expert - base) of the whole response in the proxy's tokens - lambda * (target - reference) in the target's."""
    texts = ["A:1,2,3;E:4,5,6", "B:9,9;C:8", "no list"]
    groups = {"A": [make_group("A", "q0", [1, 0, 0], texts=texts, finish=finish)]}
    method = build_method({"name": "p_opd", "calibration": LAMBDA})
    rows = method.exchange(groups, step(expert="B", base="B")).rows["A"]
    own, ref = random_logprobs(rows, 1), random_logprobs(rows, 2)
    tokens = batch(rows, own, ref)
    signal = method.signal(tokens)
    for b, row in enumerate(rows):
        spans = row.constants[SPAN]
        assert spans[-1] + 1 < len(own[b]) or b == 2  # some span of a list has several tokens
        of_proxy = np.subtract(*(tables.in_tokens("B", name, row, codecs).sum() for name in ("expert", "base")))
        of_target = (own[b] - ref[b]).sum()
        values = signal[b, : len(own[b])].numpy()
        assert total(values, spans) == pytest.approx(of_proxy - LAMBDA * of_target, rel=1e-5)
        for span in range(spans[-1] + 1):  # one value for all tokens of a span
            assert len(set(values[spans == span].tolist())) == 1


def test_scorers_of_three_tokenizers_meet_at_common_boundaries(make_group, step, tables, codecs):
    groups = {"A": [make_group("A", "q0", [1, 0], texts=["A:1,2;E:3,4", "A:5,6"])]}
    rows = build_method("p_opd").exchange(groups, step(expert="B", base="C")).rows["A"]
    for row in rows:
        for name, model in (("expert", "B"), ("base", "C")):
            exact = tables.in_tokens(model, name, row, codecs).sum()
            assert total(row.constants[name], row.constants[SPAN]) == pytest.approx(exact, rel=1e-5)


def test_a_span_is_one_action(groups, step):
    """The gradient at a token is that of the span's log-probability times the span's signal."""
    method = build_method("opd")
    rows = method.exchange(groups, step(teacher="B")).rows["A"]
    own = [row.old_logprobs.astype(float) for row in rows]  # ratios of 1
    _, gradient = loss_and_gradient(method, batch(rows, own))
    row, spans = rows[0], rows[0].constants[SPAN]
    for t, span in enumerate(spans):
        expected = row.constants["teacher"][t] - own[0][spans == span].sum()
        assert float(gradient[0, t]) == pytest.approx(-expected, rel=1e-5)


def test_ra_sums_returns_over_spans(make_group, step):
    """A's tokens are at -0.5 each; B's sum is one nat below that of A or one above, so the return is -1/T or +1/T."""
    texts = ["1,2,3,4,5", "6,7,8,9,0"]
    groups = {"A": [make_group("A", "q0", [1, 0], texts=texts)]}
    right, wrong = groups["A"][0].responses
    for nats, kept in ((-1, wrong), (1, right)):
        whole = -0.5 * len(right.token_ids) + nats

        def score(name, rows, whole=whole):
            lengths = [len(row.response_token_ids) for row in rows]
            return [np.full(length, whole / length, np.float32) for length in lengths]

        (row,) = build_method("ra_opd").exchange(groups, step(score, teacher="B")).rows["A"]
        assert len(set(row.constants[SPAN].tolist())) < len(row.response_token_ids)
        assert row.response_token_ids is kept.token_ids


def test_responses_that_a_scorer_cannot_read_are_counted_and_left_out(make_group, step, codecs):
    group = make_group("A", "q0", [1, 0, 0])
    tokenizer = codecs["A"].tokenizer
    unknown = np.array([tokenizer.unk_token_id, codecs["A"].eos_id])
    group.responses[1] = Response("<unk>", unknown, np.full(2, -0.5, np.float32), "stop", 0.0)
    group.responses[2] = Response("", np.array([codecs["A"].eos_id]), np.full(1, -0.5, np.float32), "stop", 0.0)
    exchange = build_method("opd").exchange({"A": [group]}, step(teacher="B"))
    assert len(exchange.rows["A"]) == 1
    assert exchange.diagnostics["A"]["rejected"] == {"special token": 1, "empty": 1}
    # With one tokenizer every response can be read.
    assert len(build_method("opd").exchange({"A": [group]}, step(teacher="A")).rows["A"]) == 3


@pytest.mark.parametrize("estimator", ["full", "top_k"])
def test_the_full_form_needs_one_vocabulary(codecs, estimator):
    method = build_method({"name": "p_opd", "estimator": estimator})
    with pytest.raises(ConfigError, match=rf"scorer 'expert' and model 'A' .* '{estimator}' .* use estimator: sampled"):
        method.check_scorers({"A": codecs["A"]}, {"expert": codecs["B"], "base": codecs["A"]})
    assert method.check_scorers({"A": codecs["A"]}, {"expert": codecs["A"], "base": codecs["A"]}) == []
    (note,) = build_method("opd").check_scorers({"A": codecs["A"]}, {"teacher": codecs["B"]})
    assert "spans of bytes" in note


def test_a_proxys_expert_of_another_architecture_is_refused(codecs):
    """What training changed is the difference of one model to itself; w2s_opd takes any two."""

    def of(architecture):
        codec = copy.copy(codecs["A"])
        codec.architecture = architecture
        return codec

    small, large = of("Llama (layers 2, hidden size 32)"), of("Llama (layers 2, hidden size 64)")
    method = build_method("p_opd")
    with pytest.raises(ConfigError, match=r"'expert' is Llama .*32\), and 'base' is Llama .*64\); .* use w2s_opd"):
        method.check_scorers({"A": codecs["A"]}, {"expert": small, "base": large})
    for expert, base in ((small, small), (codecs["A"], large)):  # the second: not known
        assert method.check_scorers({"A": codecs["A"]}, {"expert": expert, "base": base}) == []
    weak = build_method("w2s_opd")
    assert weak.check_scorers({"A": codecs["A"]}, {"positive": large, "negative": small}) == []


def test_lambda_zero_is_warned_of(codecs):
    same = {"expert": codecs["A"], "base": codecs["A"]}
    (note,) = build_method({"name": "p_opd", "calibration": 0}).check_scorers({"A": codecs["A"]}, same)
    assert "collapses" in note
    assert build_method("p_opd").check_scorers({"A": codecs["A"]}, same) == []


def test_no_candidate_is_read_without_scores(groups, step):
    assert read_by(["teacher"], "A", [], step(teacher="B")) == ([], {})


# RSTG -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def taught(groups, make_group):
    """The teacher C solves q0 (which A fails) in one of four, q1 in two of four; A's own q3 fails and C's does too."""
    groups["A"].append(make_group("A", "q3", FAIL))
    groups["C"] = [make_group("C", f"q{i}", r) for i, r in enumerate(([1, 0, 0, 0], [1, 1, 0, 0], ALL * 2, FAIL * 2))]
    return groups


@pytest.fixture
def rstg(step, codecs):
    def run(groups, **options):
        context = dataclasses.replace(step(C="A"), stored={"C": codecs["C"].fingerprint})
        method = build_method({"name": "rstg", "teacher": "C", **options})
        return method, method.exchange(groups, context)

    return run


def test_rstg_distils_and_imitates_where_only_the_teacher_succeeds(taught, rstg, step):
    _, exchange = rstg(taught)
    rows = exchange.rows["A"]
    of_kind = {kind: [row for row in rows if row.kind == kind] for kind in ("own", "distilled", "sft")}
    assert [row.prompt_id for row in of_kind["own"]] == ["q1", "q1", "q2", "q2", "q3", "q3"]
    assert [(row.prompt_id, row.advantages) for row in of_kind["distilled"]] == [("q0", 0.25), ("q0", 0.25)]
    assert [row.prompt_id for row in of_kind["sft"]] == ["q0"]
    assert all(set(row.contexts) == {"C"} and "C" in row.constants for row in of_kind["distilled"])
    assert not any(row.contexts for row in of_kind["own"])
    assert exchange.directions["C->A"]["candidates"] == 1 and exchange.diagnostics["A"]["distilled"] == 2
    grpo = build_method("grpo").exchange({"A": taught["A"][1:]}, step()).rows["A"]
    assert [row.advantages for row in of_kind["own"]] == [row.advantages for row in grpo]


def test_rstgs_terms_share_the_denominator_of_all_fresh_tokens(taught, rstg):
    method, exchange = rstg(taught, sft_coefficient=0.3, opd_coefficient=0.7)
    rows = exchange.rows["A"]
    clip, distillation, imitation = method.objective(0).terms
    fresh = sum(row.loss_tokens for row in rows if row.kind != "sft")
    for row, of_clip, of_distillation, of_imitation in zip(
        rows, clip.scales(rows), distillation.scales(rows), imitation.scales(rows), strict=True
    ):
        assert of_clip == pytest.approx(1 / fresh if row.kind == "own" else 0)
        assert of_distillation == pytest.approx(0.7 / fresh if row.kind == "distilled" else 0)
        sft = sum(r.loss_tokens for r in rows if r.kind == "sft")
        assert of_imitation == pytest.approx(0.3 / sft if row.kind == "sft" else 0)


@pytest.mark.parametrize("estimator", ["sampled", "full"])
def test_rstg_trains_the_most_important_tokens_by_the_teachers_rate(taught, rstg, estimator):
    method, exchange = rstg(taught, estimator=estimator, top_share=0.3)
    rows = [row for row in exchange.rows["A"] if row.kind == "distilled"]
    own = random_logprobs(rows, 1)
    length = len(own[0])
    rng = np.random.default_rng(2)
    h, d = rng.exponential(size=(2, length)), rng.exponential(size=(2, length))
    expected = torch.from_numpy(-d).requires_grad_()
    tokens = batch(rows, own, expected_signal_BT=expected, entropy_BT=torch.from_numpy(h))
    loss = method.objective(0).terms[1].token_loss(tokens).loss_BT
    leaf = tokens.logprobs_BT if estimator == "sampled" else expected
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    count = int(np.ceil(0.3 * length))
    for b, row in enumerate(rows):
        score = 1 - (1 - h[b] / h[b].max()) * (1 - d[b] / d[b].max())
        chosen = np.zeros(length)
        chosen[np.argsort(-score)[:count]] = 1
        ratio = np.exp(own[b] - row.old_logprobs)
        signal = ratio * (row.constants["C"] - own[b]) if estimator == "sampled" else np.ones(length)
        np.testing.assert_allclose(gradient[b].numpy(), -0.25 * chosen * signal, rtol=1e-6)


def test_rstg_needs_a_teacher_of_the_models_tokenizer(codecs):
    method = build_method({"name": "rstg", "teacher": "C"})
    assert method.scorers == method.rollouts_of == ("C",)
    with pytest.raises(ConfigError, match="rstg chooses tokens by sums over one vocabulary"):
        method.check_scorers({"A": codecs["A"]}, {"C": codecs["C"]})

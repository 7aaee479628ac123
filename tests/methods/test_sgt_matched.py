"""SGT at SCION's strength: the same pull on the logits, SGT's prompts and responses."""

import numpy as np
import pytest
import torch
from scorer import Scorer

from graftrl.methods import build_method
from graftrl.methods.sgt_matched import pull
from graftrl.objective import damped_nll

FAIL, ONE, TWO, ALL = [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]


@pytest.fixture
def groups(make_group):
    rewards = {"A": [FAIL, ONE, FAIL, ALL], "B": [TWO, ALL, FAIL, TWO]}
    return {m: [make_group(m, f"q{i}", r) for i, r in enumerate(of_model)] for m, of_model in rewards.items()}


def imitated(exchange, model):
    return [row for row in exchange.rows[model] if row.kind == "sft"]


def test_the_pull_is_the_norm_of_the_gradient_by_the_logits(groups, context):
    tau = 0.2
    rows = imitated(build_method("scion").exchange(groups, context(Scorer(0.0), 4)), "A")
    rng = np.random.default_rng(0)
    logits = [torch.tensor(rng.normal(0, 2, (len(r.response_token_ids), 90)), requires_grad=True) for r in rows]
    logprobs = [
        x.log_softmax(-1)[range(len(x)), row.response_token_ids.tolist()] for x, row in zip(logits, rows, strict=True)
    ]
    loss = sum(row.advantages * damped_nll(x, tau).mean() for x, row in zip(logprobs, rows, strict=True))
    norm = sum(float(g.abs().sum()) for g in torch.autograd.grad(loss, logits))
    assert pull(rows, [x.detach().numpy() for x in logprobs], tau) == pytest.approx(norm, rel=1e-9)


def test_it_chooses_as_sgt_and_pulls_as_hard_as_scion(groups, context):
    """Every token has p = 0.05. SCION: q0 by 0.5, q1 by 0.75, each damped to half. SGT: q0 alone, undamped."""
    step = context(Scorer(float(np.log(0.05))), 4)
    exchange, sgt = build_method("sgt-matched").exchange(groups, step), build_method("sgt").exchange(groups, step)
    assert [(r.prompt_id, r.response_token_ids.tolist()) for r in imitated(exchange, "A")] == [
        (r.prompt_id, r.response_token_ids.tolist()) for r in imitated(sgt, "A")
    ]
    assert [row.advantages for row in imitated(exchange, "A")] == pytest.approx([(0.5 + 0.75) * 0.5])
    assert exchange.diagnostics["A"] == pytest.approx({"pull": 2 * 1.25 * 0.5 * 0.95, "strength": 0.625})
    assert exchange.directions["B->A"]["advantage_mean"] == pytest.approx(0.625)
    assert [t.advantage for t in exchange.transfers] == pytest.approx([0.625])
    own = {(r.prompt_id, r.advantages) for r in exchange.rows["A"] if r.kind == "own"}
    assert own == {(r.prompt_id, r.advantages) for r in sgt.rows["A"] if r.kind == "own"}


def test_where_either_has_nothing_nothing_is_imitated(make_group, context):
    step = context(Scorer(-1.0), 4)
    for own, peer in ((ONE, ALL), (FAIL, FAIL)):  # SGT leaves mixed prompts alone; nobody solves the other
        groups = {"A": [make_group("A", "q", own)], "B": [make_group("B", "q", peer)]}
        exchange = build_method("sgt-matched").exchange(groups, step)
        assert imitated(exchange, "A") == [] and exchange.diagnostics["A"]["strength"] == 0.0
    known = context(Scorer(0.0), 4)  # the receiver gives every token probability 1: there is no pull to match
    groups = {"A": [make_group("A", "q", FAIL)], "B": [make_group("B", "q", TWO)]}
    assert [r.advantages for r in imitated(build_method("sgt-matched").exchange(groups, known), "A")] == [0.0]


def test_its_loss_is_scions_without_damping():
    matched = build_method({"name": "sgt-matched", "sft_coefficient": 0.5, "tau": 0.3}).objective(0).terms[1]
    assert (matched.kinds, matched.over_prompts, matched.coefficient) == (("sft",), "all", 0.5)

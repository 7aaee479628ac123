from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graftrl.exchange import complementary_candidates, select_complementary
from graftrl.seeds import derive_seed
from graftrl.viewer.reasons import Reason, Rules


def rules(method: Any, models: str = "AB", **more: Any) -> Rules:
    settings = {"name": method} if isinstance(method, str) else method
    content = {"method": settings, "models": {model: {} for model in models}, "seed": 5, "training": {"group_size": 8}}
    return Rules({**content, **more})


def why(of: Rules, own: int, peer: int, moved: list[dict[str, Any]] | None = None) -> Reason:
    counts = {"A": (own, 8), "B": (peer, 8)}
    return of.explain("A", "q", 1, counts, moved or [], {model: {"q": count} for model, count in counts.items()})


def moved(*statuses: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"source": "B", "status": status, "reason": reason} for status, reason in statuses]


def test_words_for_what_was_transferred() -> None:
    fates = moved(("admitted", ""), ("admitted", ""), ("gated", "score"), ("rejected", "too long"))
    assert why(rules("graft"), 0, 4, fates) == Reason(
        "taken",
        "exchanged: the group of B took the place of A's own; 2 admitted, 1 gated by score (s not above 0.8), "
        "1 rejected (too long)",
    )
    refused = why(rules("graft"), 0, 4, moved(("gated", "not finite")))
    assert refused.outcome == "refused"
    assert refused.text.endswith("1 gated (not finite); so A learns nothing from this prompt")
    pooled = why(rules("graft-pooled"), 0, 4, fates[:1])
    assert pooled == Reason("taken", "responses of B beside A's own: 1 admitted")
    ungated = why(rules({"name": "graft", "weighting": "none"}), 0, 4, moved(("gated", "score")))
    assert "gated by score;" in ungated.text


@pytest.mark.parametrize(
    ("method", "own", "peer", "text"),
    [
        ("graft", 3, 4, "not a candidate: A has successes of its own (3 of 8)"),
        ("graft", 0, 0, "not a candidate: A has no success (0 of 8), but B has none either"),
        (
            "graft", 0, 8,
            "not a candidate: A has no success (0 of 8), but B is always right (8 of 8): no contrast to learn from",
        ),
        ("sgt", 1, 8, "not a candidate: sgt takes nothing at A 1 of 8, B 8 of 8 right"),
        ("grpo", 0, 4, "grpo exchanges nothing between models (A 0 of 8, B 4 of 8 right)"),
        ("my.module:Method", 0, 4, "nothing was transferred (A 0 of 8, B 4 of 8 right)"),
    ],
)  # fmt: skip
def test_words_for_what_could_not_be_transferred(method: str, own: int, peer: int, text: str) -> None:
    assert why(rules(method), own, peer) == Reason("none", text)


def test_a_candidate_that_nothing_explains_is_said_to_be_one() -> None:
    for method in ("sgt", {"name": "graft", "balanced": False}, {"name": "graft", "admit_all_success": True}):
        reason = why(rules(method), 0, 8 if method != {"name": "graft", "balanced": False} else 4)
        assert reason.outcome == "passed"
    drawn = why(rules("graft-random-prompts"), 2, 2)
    assert drawn == Reason("passed", "not among the prompts that were drawn (A 2 of 8, B 2 of 8 right)")


def test_stored_peers_are_named_as_the_place_to_look() -> None:
    of = rules("graft", "A", peers={"P": {"log": "runs/p"}})
    reason = of.explain("A", "q", 1, {"A": (0, 8)}, [], {"A": {"q": (0, 8)}})
    assert reason.text == "nothing was transferred (A 0 of 8 right); stored peers' groups are in their own logs"


def test_settings_of_another_version_leave_the_log_to_speak() -> None:
    of = rules({"name": "graft", "no_such_option": 1})
    assert of.method is None
    assert why(of, 0, 4).text == "nothing was transferred (A 0 of 8, B 4 of 8 right)"
    assert not of.usable(0, 8, 4, 8)


@pytest.mark.parametrize("seed", range(6))
def test_balancing_is_told_as_it_was_done(seed: int) -> None:
    """Whatever GRAFT's selection keeps or drops on random steps of three models, the words agree with it."""
    rng = np.random.default_rng(seed)
    prompts = [f"q{i}" for i in range(30)]
    share = rng.choice([0.0, 0.2, 0.6], (3, 30), p=[0.5, 0.25, 0.25])
    k = {
        model: {q: int(rng.binomial(8, p)) for q, p in zip(prompts, row, strict=True)}
        for model, row in zip("ABC", share, strict=True)
    }
    of = rules("graft", "ABC")
    draws = derive_seed(5, "exchange", 7)
    candidates = complementary_candidates(k, 8, seed=draws)
    selected = select_complementary(k, 8, seed=draws)
    of_step = {model: {q: (count, 8) for q, count in of_model.items()} for model, of_model in k.items()}
    dropped = 0
    for receiver in "ABC":
        for q in prompts:
            if q in selected[receiver]:
                continue
            counts = {model: (k[model][q], 8) for model in k}
            reason = of.explain(receiver, q, 7, counts, [], of_step)
            if q not in candidates[receiver]:
                assert reason.outcome == "none"
                assert reason.text.startswith("not a candidate")
                continue
            dropped += 1
            m = min(map(len, candidates.values()))
            last = min(candidates[receiver][kept][1] for kept in selected[receiver])
            ties = len(selected[receiver])
            assert reason.outcome == "passed"
            assert f"{receiver} has {len(candidates[receiver])} candidate" in reason.text
            assert (
                f"has {m}, so {receiver} keeps the {m}{f' ({ties} with ties)' if ties > m else ''} that" in reason.text
            )
            assert reason.text.endswith(f"the last of them {last} of 8")
    assert dropped


def test_nobody_receives_where_one_has_no_candidate() -> None:
    of_step = {"A": {"q": (0, 8), "r": (3, 8)}, "B": {"q": (4, 8), "r": (2, 8)}}
    reason = rules("graft").explain("A", "q", 1, {"A": (0, 8), "B": (4, 8)}, [], of_step)
    assert reason.text.endswith("A has 1 candidate in this step and B has 0, so nobody receives anything")

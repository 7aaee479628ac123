from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from graftrl.evaluation.intervals import Estimate
from graftrl.methods import build_method
from graftrl.probe import evidence
from graftrl.probe.analysis import (
    Compatibility,
    Direction,
    ModelSummary,
    PeerResponses,
    PerStep,
    compatibility,
    estimate_share,
)
from graftrl.probe.verdict import (
    exchange_pays,
    first_method,
    judge,
    negative_only,
    rescued_per_step,
    suggest_threshold,
)

DELTAS = [0.0, 0.5, 0.6, 0.7, 0.8, 0.9]
YES = {"A": "yes", "B": "yes"}


def scored(successes: float, failures: float, count: int = 20, rejected: int = 0) -> Compatibility:
    """All successes with one score, all failures with another; a response a group."""
    scores = [successes] * (count - rejected) + [float("nan")] * rejected + [failures] * count
    right = np.arange(2 * count) < count
    reasons = {"too long": rejected} if rejected else {}
    return compatibility(PeerResponses(np.array(scores), right, np.arange(2 * count), reasons), DELTAS)


def direction(source: str, receiver: str, candidates: int = 40, solved: int = 50, c: Compatibility | None = None):
    exact = Estimate(float(candidates), float(candidates), float(candidates))
    half = Estimate(candidates / 2, candidates / 2, candidates / 2)
    steps = [PerStep(128, exact, half)]
    return Direction(
        source,
        receiver,
        100,
        solved,
        estimate_share(solved, 100),
        solved - candidates,
        candidates,
        candidates,
        steps,
        c,
    )


def both(c: Compatibility | None, **kwargs) -> list[Direction]:
    return [direction("A", "B", c=c, **kwargs), direction("B", "A", c=c, **kwargs)]


def model(prompts: int = 200, truncated: float = 0.0) -> ModelSummary:
    exact = Estimate(0.5, 0.5, 0.5)
    return ModelSummary(prompts, {1: exact, 8: exact}, 0.5, 0.5, 0.0, 400.0, 400.0, 600.0, truncated)


@pytest.mark.parametrize(
    ("count", "prompts", "answer"),
    [
        (8, 200, "yes"),  # Wilson: from 2.04 %
        (7, 200, "unclear"),  # from 1.7 % to 7 %
        (0, 200, "no"),  # up to 1.9 %
        (0, 20, "unclear"),  # up to 16 %
        (3, 3000, "no"),
    ],
)
def test_an_exchange_pays_when_the_whole_interval_lies_above_two_percent(count, prompts, answer):
    assert exchange_pays(count, prompts) == answer


def test_the_suggested_threshold_is_the_largest_that_admits_half_of_the_successes_everywhere():
    assert (
        suggest_threshold([direction("A", "B", c=scored(0.95, 1.0)), direction("B", "A", c=scored(0.75, 1.0))]) == 0.7
    )
    assert suggest_threshold(both(scored(0.3, 1.0))) == 0.0


def test_no_threshold_above_the_papers_is_suggested():
    assert suggest_threshold(both(scored(1.0, 1.0))) == 0.8


def test_half_of_the_successes_are_enough_and_rejected_ones_count():
    assert suggest_threshold(both(scored(0.85, 1.0, count=20, rejected=10))) == 0.8
    assert suggest_threshold(both(scored(0.85, 1.0, count=20, rejected=11))) is None


def test_a_direction_with_few_successes_has_no_say():
    few, many = direction("A", "B", c=scored(0.1, 1.0, count=7)), direction("B", "A", c=scored(0.9, 1.0))
    assert suggest_threshold([few, many]) == 0.8
    assert suggest_threshold([few, direction("B", "A", c=None)]) is None


def test_negative_only_thresholds_are_those_between_successes_and_failures():
    found = negative_only([direction("A", "B", c=scored(0.65, 1.0)), direction("B", "A", c=scored(0.85, 1.0))])
    assert found == {0.7: ["A->B"], 0.8: ["A->B"], 0.9: ["A->B", "B->A"]}


def chosen(directions: list[Direction], winnable=(50, 50), pays=YES, tokens=400.0) -> str:
    counts = dict(zip("AB", winnable, strict=True))
    return first_method(directions, counts, pays, suggest_threshold(directions), tokens).method


def test_the_first_method():
    good = scored(0.9, 1.0)
    assert chosen(both(good)) == "graft"
    assert chosen(both(None)) == "graft"
    assert chosen(both(good), pays={"A": "no", "B": "no"}) == "grpo"
    assert chosen(both(good, candidates=0, solved=0), winnable=(0, 0), pays={"A": "unclear", "B": "no"}) == "grpo"
    assert chosen(both(good, candidates=24)) == "scion"  # 48 of 100 prompts; the peer solves the others every time
    assert chosen(both(good, candidates=25)) == "graft"
    assert chosen(both(scored(0.45, 1.0))) == "scion"  # every s below 0.5
    assert chosen(both(scored(0.55, 1.0))) == "graft"
    assert chosen(both(scored(0.9, 1.0, rejected=15))) == "scion"  # 15 of 20 cannot be put into the receiver's tokens
    assert chosen(both(good), tokens=39.0) == "scion" and chosen(both(good), tokens=40.0) == "graft"
    assert chosen(both(good), tokens=4.5) == "sgt" and chosen(both(good), tokens=5.0) == "scion"
    assert chosen(both(scored(0.45, 1.0)), tokens=3.0) == "sgt"  # whatever the gate
    assert chosen(both(good), winnable=(0, 0), tokens=3.0) == "grpo"
    lopsided = [direction("A", "B", candidates=40), direction("B", "A", candidates=9, solved=10)]
    assert chosen(lopsided, winnable=(10, 50)) == "graft-unbalanced"
    assert chosen([lopsided[0], direction("B", "A", candidates=10)], winnable=(10, 50)) == "graft"


def test_every_recommendation_names_its_evidence_and_stands_in_the_guide():
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "probe.md").read_text()
    assert [s.method for s in evidence.SITUATIONS] == [
        "grpo", "sgt", "scion", "scion", "scion", "graft-unbalanced", "graft",
    ]  # fmt: skip
    assert "\n".join(f"| {' | '.join(cells)} |" for cells in evidence.table_rows()) in guide
    for situation in evidence.SITUATIONS:
        build_method(situation.method)
        if situation.source.startswith("docs/"):
            assert (Path(__file__).parents[2] / situation.source).is_file()


def test_the_verdict_names_the_evidence():
    short = replace(model(), tokens_median=21.0)
    verdict = judge({"A": short, "B": short}, both(scored(0.9, 1.0)), {"A": 50, "B": 50}, 128)
    assert (verdict.method, verdict.situation) == ("scion", evidence.SHORT_RESPONSES)
    assert any(line.startswith("Evidence: measured, docs/results/scion.md; 24") for line in verdict.lines)


def test_rescued_prompts_are_exchanged_groups_with_an_admitted_success():
    # a response a group: half of the groups are successes, all admitted at 0.8
    d = direction("A", "B", candidates=40, solved=50, c=scored(0.9, 1.0))
    assert rescued_per_step(d, "graft", 0.8, 200, 128) == pytest.approx(20 * 0.5)
    assert rescued_per_step(d, "graft-unbalanced", 0.8, 200, 128) == pytest.approx(40 * 0.5)
    assert rescued_per_step(d, "graft", 0.9, 200, 128) == 0.0
    for method in ("sgt", "scion"):
        assert rescued_per_step(d, method, 0.8, 200, 128) == pytest.approx(50 * 128 / 200)
    assert rescued_per_step(d, "grpo", 0.8, 200, 128) == 0.0
    assert rescued_per_step(replace(d, compatibility=None), "graft", None, 200, 128) == 20.0


def test_the_verdict_says_who_gains_what_to_try_and_what_to_mind():
    directions = [
        direction("A", "B", c=scored(0.84, 1.0)),
        direction("B", "A", candidates=1, solved=1, c=scored(0.95, 1.0, count=5, rejected=2)),
    ]
    verdict = judge({"A": model(), "B": model(truncated=0.3)}, directions, {"A": 1, "B": 50}, 128)
    assert verdict.pays == {"A": "unclear", "B": "yes"}
    assert (verdict.method, verdict.threshold) == ("graft-unbalanced", 0.8)
    assert verdict.rescued == {"A": pytest.approx(1 * 3 / 10), "B": pytest.approx(40 / 2)}
    lines = " ".join(verdict.lines)
    assert "An exchange pays for B: of 200 prompts, a peer solves 50 that B fails entirely." in lines
    assert "Too few prompts to tell for A" in lines
    assert "Try first: graft-unbalanced with threshold 0.8" in lines and "A 0.3, B 20.0" in lines
    warnings = "\n".join(verdict.warnings)
    assert "A->B: half of the successes have s below 0.84" in warnings
    assert "negative-only transfer at a threshold of 0.9 (A->B)" in warnings
    assert "B->A: 2 of 10 responses cannot be put into A's tokens (too long 2)" in warnings
    assert "B->A: only 5 right responses" in warnings
    assert "B: 30% of the responses were cut" in warnings and "A: " not in warnings.replace("B->A: ", "")


def test_without_scores_the_verdict_rests_on_counts_alone():
    verdict = judge({"A": model(), "B": model()}, both(None), {"A": 50, "B": 50}, 128)
    assert (verdict.threshold, verdict.method, verdict.warnings) == (None, "graft", [])
    assert "threshold" not in " ".join(verdict.lines)


def test_where_no_threshold_will_do_the_verdict_says_so():
    verdict = judge({"A": model(), "B": model()}, both(scored(0.9, 1.0, rejected=15)), {"A": 50, "B": 50}, 128)
    assert verdict.threshold is None and any("no threshold is suggested" in line for line in verdict.warnings)

"""Which method to try first in which situation, and what that rests on. The one place to change when there is better
evidence; the table in docs/how-to/probe.md is this one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SHORT_TOKENS = 40  # the median response in every laboratory pair is shorter; nothing beyond was measured here
FEW_TOKENS = 5  # a median response below this is hardly more than the answer itself
GATE = 0.5  # a threshold below this no longer tells compatible responses from others

Evidence = Literal["by construction", "measured", "derived and measured", "paper only", "none"]


@dataclass(frozen=True, slots=True)
class Situation:
    """when: in words, for people; `verdict.first_method` has the conditions. reason: as the verdict says it. evidence,
    source: what the recommendation rests on, and where that stands. limits: what the evidence does not say."""

    when: str
    method: str
    reason: str
    evidence: Evidence
    source: str
    limits: str


NOTHING_TO_WIN = Situation(
    "an exchange pays to no receiver, or no prompt that one model fails entirely is solved by another",
    "grpo",
    "hardly any prompt that one model fails entirely is solved by another",
    "by construction",
    "docs/methods/graft.md",
    "methods that also learn on prompts solved in part (scion) might still gain",
)
BARE_ANSWERS = Situation(
    f"the median response of every model is shorter than {FEW_TOKENS} tokens",
    "sgt",
    "a response is hardly more than its answer; there sgt kept the most variety, and no method gained in pass@1",
    "measured",
    "docs/results/real-pair.md",
    "one pair of real models, answers of one token or two, 20 steps, five seeds: no method was above GRPO in pass@1 "
    "beyond chance, sgt with a coefficient of .3 or 1 below; pass@8 above GRPO's by .07 ± .05 with sgt, .03 ± .05 with "
    "scion",
)
ALWAYS_SOLVED = Situation(
    "GRAFT's candidates are fewer than half of the prompts that a peer solves: it solves the others every time",
    "scion",
    "the peer mostly solves these prompts every time; GRAFT only takes groups with a contrast",
    "by construction",
    "docs/methods/scion.md",
    "how much scion gains just there was not measured apart",
)
GATE_SHUT = Situation(
    f"s is known, and no threshold of {GATE:g} or more admits half of the successes",
    "scion",
    "the receiver finds the peer's right responses too improbable for GRAFT's gate",
    "measured",
    "docs/results/scion.md",
    "tiny models: with another separator or very short responses GRAFT gains nothing or loses, and scion gains .19 and "
    ".21 over GRPO; with a separator of three characters scion gained nothing (-.018 ± .025) and sgt ruined both",
)
SHORT_RESPONSES = Situation(
    f"the median response of every model is shorter than {SHORT_TOKENS} tokens",
    "scion",
    "with short responses, imitating one damped success did best in most regimes that were measured",
    "measured",
    "docs/results/scion.md",
    "24 regimes of models of 0.04 to 0.4 million weights, nearly all on one procedural task; sgt is level where its "
    "coefficient is tuned, and did better where a peer is right by luck in a whole family, and where it succeeds after "
    "the receiver has settled on wrong answers",
)
ONE_SIDED = Situation(
    "one direction has less than a quarter of the other's candidates",
    "graft-unbalanced",
    "the exchange is one-sided; balanced, it would shrink to the smaller direction",
    "none",
    "docs/methods/graft.md",
    "follows from the balancing rule; no pair of this kind was trained",
)
IN_PART = Situation(
    "else: failed prompts are solved by the peer in part, in both directions, and responses are long",
    "graft",
    "failed prompts are solved by the peer in part, in both directions",
    "paper only",
    "Park et al. (2026), table 1",
    "models of 1.7 to 3 billion weights on mathematics, where GRAFT gains more than sgt; not reproduced here",
)

SITUATIONS = (NOTHING_TO_WIN, BARE_ANSWERS, ALWAYS_SOLVED, GATE_SHUT, SHORT_RESPONSES, ONE_SIDED, IN_PART)


def table_rows() -> list[list[str]]:
    """Cells of the table for people: situation, method, evidence with its source, limits; the first that holds
    counts."""
    return [[s.when, f"`{s.method}`", f"{s.evidence}: {s.source}", s.limits] for s in SITUATIONS]

"""What to do about it: whether an exchange pays, with which threshold, by which method first. Rules of thumb, each in
one small function, so that better evidence can replace it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from graftrl.probe import evidence
from graftrl.probe.analysis import Compatibility, Direction, ModelSummary, estimate_share
from graftrl.probe.evidence import Situation

WORTHWHILE = 0.02  # of the prompts: below this share of prompts that a peer could rescue, an exchange hardly pays
ADMITTED_SUCCESSES = 0.5  # a suggested threshold lets at least this share of a direction's successes pass
PAPER_THRESHOLD = 0.8
HEADROOM = 0.05  # of s: a gate closer than this to the successes' median may close as the models drift apart
FEWEST_SUCCESSES = 8  # a direction with fewer scored successes has no say in the threshold

Answer = Literal["yes", "no", "unclear"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """pays: per receiver, whether enough prompts could be rescued. winnable: these prompts, as counted.
    threshold: suggested delta; None where s is not known or no swept threshold will do. method, reason: what to try
    first, as of the situation, which has the evidence.
    rescued: per receiver, prompts in a step of `step_prompts` that `method` would rescue: with at least one right peer
    response in the update. lines: the verdict in sentences. warnings: what else a person should know."""

    pays: dict[str, Answer]
    winnable: dict[str, int]
    threshold: float | None
    method: str
    reason: str
    situation: Situation
    step_prompts: int
    rescued: dict[str, float]
    lines: list[str]
    warnings: list[str]


def exchange_pays(winnable: int, prompts: int) -> Answer:
    """Do enough prompts await rescue?

    Compares the 95 % Wilson interval of the share of prompts that the receiver fails entirely and a peer solves with
    WORTHWHILE: "yes" if all of it lies at or above, "no" if all of it lies below, else "unclear" (probe more prompts).
    """
    share = estimate_share(winnable, prompts)
    if share is None or share.low < WORTHWHILE <= share.high:
        return "unclear"
    return "yes" if share.low >= WORTHWHILE else "no"


def suggest_threshold(directions: Sequence[Direction]) -> float | None:
    """The largest tried delta, up to the paper's 0.8, at which every direction still admits ADMITTED_SUCCESSES of its
    successes; directions with fewer than FEWEST_SUCCESSES have no say.

    A gate that drops most successes while failures pass teaches only what not to do. None where s is not known, where
    no direction has enough successes, or where no swept delta will do.
    """
    telling = _telling(directions).values()
    swept = sorted({admission.threshold for c in telling for admission in c.admission}, reverse=True)
    for threshold in swept:
        shares = [c.at(threshold).success_share or 0.0 for c in telling]  # never empty: else nothing was swept
        if threshold <= PAPER_THRESHOLD and min(shares) >= ADMITTED_SUCCESSES:
            return threshold
    return None


def negative_only(directions: Sequence[Direction]) -> dict[float, list[str]]:
    """`{threshold: directions}` where failures pass the gate while successes hardly do (`Admission.negative_only`)."""
    found: dict[float, list[str]] = {}
    for name, c in _telling(directions).items():
        for admission in c.admission:
            if admission.negative_only:
                found.setdefault(admission.threshold, []).append(name)
    return dict(sorted(found.items()))


def _telling(directions: Sequence[Direction]) -> dict[str, Compatibility]:
    """Directions with enough scored successes to say something about the gate."""
    scored = {d.name: d.compatibility for d in directions if d.compatibility is not None}
    return {name: c for name, c in scored.items() if c.successes >= FEWEST_SUCCESSES}


def first_method(
    directions: Sequence[Direction],
    winnable: Mapping[str, int],
    pays: Mapping[str, Answer],
    threshold: float | None,
    tokens: float,
) -> Situation:
    """Which method to try first, and on what evidence: the first situation of `evidence.SITUATIONS` that holds.

    Args:
        tokens: median length of a response, the largest over the models.
    """
    if all(answer == "no" for answer in pays.values()) or not any(winnable.values()):
        return evidence.NOTHING_TO_WIN
    if tokens < evidence.FEW_TOKENS:
        return evidence.BARE_ANSWERS
    candidates = {r: sum(d.candidates for d in directions if d.receiver == r) for r in winnable}
    if sum(candidates.values()) < 0.5 * sum(winnable.values()):
        return evidence.ALWAYS_SOLVED
    if _telling(directions) and (threshold is None or threshold < evidence.GATE):
        return evidence.GATE_SHUT
    if tokens < evidence.SHORT_TOKENS:
        return evidence.SHORT_RESPONSES
    if min(candidates.values()) < 0.25 * max(candidates.values()):
        return evidence.ONE_SIDED
    return evidence.IN_PART


def judge(
    models: Mapping[str, ModelSummary],
    directions: Sequence[Direction],
    winnable: Mapping[str, int],
    step_prompts: int,
) -> Verdict:
    """The verdict from what was measured.

    Args:
        winnable: of `analysis.winnable`.
        step_prompts: one of the step sizes that the directions were estimated for.
    """
    prompts = next(iter(models.values())).prompts
    pays = {receiver: exchange_pays(count, prompts) for receiver, count in winnable.items()}
    threshold = suggest_threshold(directions)
    tokens = max(model.tokens_median for model in models.values())
    situation = first_method(directions, winnable, pays, threshold, tokens)
    method = situation.method
    rescued = {
        receiver: sum(
            rescued_per_step(d, method, threshold, prompts, step_prompts) for d in directions if d.receiver == receiver
        )
        for receiver in models
    }
    return Verdict(
        pays, dict(winnable), threshold, method, situation.reason, situation, step_prompts, rescued,
        lines=_lines(pays, winnable, prompts, situation, threshold, rescued, step_prompts),
        warnings=_warnings(models, directions, threshold),
    )  # fmt: skip


def rescued_per_step(
    direction: Direction, method: str, threshold: float | None, prompts: int, step_prompts: int
) -> float:
    """Prompts of a step for which at least one right response of this direction's source would enter the update.

    For GRAFT: the groups exchanged in a step (balanced or not) times the share of groups with a success above the
    threshold (all, where s is not known); for `sgt` and `scion`: all that the source solves; for `grpo`: none.
    """
    if method == "grpo":
        return 0.0
    if method in ("sgt", "scion"):
        return direction.solved * step_prompts / prompts
    step = next(step for step in direction.per_step if step.prompts == step_prompts)
    groups = step.candidates if method == "graft-unbalanced" else step.selected
    c = direction.compatibility
    share = 1.0 if c is None or threshold is None else c.at(threshold).groups / c.groups
    return groups.value * share


# Words ----------------------------------------------------------------------------------------------------------------


def _lines(
    pays: Mapping[str, Answer],
    winnable: Mapping[str, int],
    prompts: int,
    situation: Situation,
    threshold: float | None,
    rescued: Mapping[str, float],
    step_prompts: int,
) -> list[str]:
    words = {"yes": "An exchange pays", "no": "An exchange hardly pays", "unclear": "Too few prompts to tell"}
    lines = []
    for answer in ("yes", "no", "unclear"):
        receivers = [receiver for receiver, given in pays.items() if given == answer]
        if receivers:
            counts = " and ".join(f"{winnable[receiver]} that {receiver}" for receiver in receivers)
            lines.append(
                f"{words[answer]} for {' and '.join(receivers)}: of {prompts} prompts, a peer solves {counts} fails "
                "entirely."
            )
    method = situation.method
    with_threshold = f" with threshold {threshold:g}" if threshold is not None and method.startswith("graft") else ""
    lines.append(f"Try first: {method}{with_threshold} ({situation.reason}).")
    lines.append(f"Evidence: {situation.evidence}, {situation.source}; {situation.limits}.")
    if method != "grpo":
        counts = ", ".join(f"{receiver} {value:.1f}" for receiver, value in rescued.items())
        lines.append(f"Prompts rescued in a step of {step_prompts}: {counts}.")
    return lines


def _warnings(
    models: Mapping[str, ModelSummary], directions: Sequence[Direction], threshold: float | None
) -> list[str]:
    found = []
    for at, names in negative_only(directions).items():
        found.append(
            f"negative-only transfer at a threshold of {at:g} ({', '.join(names)}): failures pass the gate, successes "
            "hardly do"
        )
    for d in directions:
        c = d.compatibility
        if c is None:
            continue
        if threshold is not None and c.success_quantiles and 0 < c.success_quantiles[1] - threshold < HEADROOM:
            found.append(
                f"{d.name}: half of the successes have s below {c.success_quantiles[1]:.2f}, close to the threshold of "
                f"{threshold:g}: as the models drift apart, the gate may shut out all of them"
            )
        rejected, responses = sum(c.rejected.values()), c.successes + c.failures
        if rejected > 0.1 * responses:
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(c.rejected.items()))
            found.append(
                f"{d.name}: {rejected} of {responses} responses cannot be put into {d.receiver}'s tokens ({reasons})"
            )
        if c.successes < FEWEST_SUCCESSES and d.candidates:
            found.append(f"{d.name}: only {c.successes} right responses were scored; they have no say in the threshold")
    for name, model in models.items():
        if model.truncated > 0.2:
            found.append(
                f"{name}: {model.truncated:.0%} of the responses were cut at the token limit; raise "
                "sampling.max_response_tokens"
            )
    if threshold is None and any(d.compatibility for d in directions):
        found.append(
            f"no threshold is suggested: no swept one up to {PAPER_THRESHOLD:g} admits "
            f"{ADMITTED_SUCCESSES:.0%} of the successes in every direction, or too few were scored"
        )
    return found

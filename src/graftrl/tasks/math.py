"""The verifier of mathematical answers: the last box of a response against the reference."""

from __future__ import annotations

import re
from dataclasses import dataclass

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

from graftrl.rollout import FinishReason, Prompt
from graftrl.tasks.base import Grade
from graftrl.tasks.boxes import BoxError, last_box
from graftrl.tasks.equivalence import equal_forms, equivalent, normalize_spelling, parsable

MAX_ANSWER_CHARS = 2000
_UNBOXED_TAIL_CHARS = 500
_PLAIN = re.compile(
    r"-?(?:\d{1,50}(?:\.\d{1,50})?|\d{0,9}\\[dt]?frac\{\d{1,9}\}\{\d{1,9}\}|\d{0,9}\\sqrt\{\d{1,9}\}|\d{0,9}\\pi"
    r"|\d{1,9}\\%|\d{1,9}\^\\circ|\(-?\d{1,9}(?:, ?-?\d{1,9}){1,3}\))"
)


@dataclass(frozen=True)
class MathVerifier:
    r"""Reward 1 iff the last \boxed{} (or \fbox{}) of the response is equivalent to the prompt's reference.

    require_box: without a box the reward is 0. When False, the final answer of a response without a box is searched
        for in its last 500 characters, which can be exploited by listing candidates.

    check_reference: say so when the reference itself cannot be graded against, instead of "wrong answer".

    Has no clock of its own: some inputs hang inside C code, so run it in a `VerificationPool`.
    """

    require_box: bool = True
    check_reference: bool = False

    def __call__(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> Grade:
        if self.check_reference and not (prompt.reference and parsable(prompt.reference)):
            return Grade(0.0, "unusable reference: empty or not parsable")
        try:
            answer = last_box(response)
        except BoxError as error:
            if self.require_box or str(error) != "no boxed answer":
                return Grade(0.0, str(error))
            return _verdict(_unboxed_equivalent(prompt.reference, response[-_UNBOXED_TAIL_CHARS:]))
        if len(answer) > MAX_ANSWER_CHARS:
            return Grade(0.0, f"boxed answer longer than {MAX_ANSWER_CHARS} characters")
        return _verdict(equivalent(prompt.reference, answer))


@dataclass(frozen=True)
class ReferenceCheck:
    """Reward 1 iff the prompt's reference can be graded against at all; used when a data set is loaded."""

    def __call__(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> Grade:
        return Grade(float(parsable(prompt.reference)), "")


def plain(reference: str) -> bool:
    """Whether the reference is a number, fraction, root or tuple so plain that it surely can be parsed."""
    return _PLAIN.fullmatch(reference) is not None


def _verdict(correct: bool) -> Grade:
    return Grade(1.0, "correct") if correct else Grade(0.0, "wrong answer")


def _unboxed_equivalent(reference: str, text: str) -> bool:
    gold = parse(rf"\boxed{{{normalize_spelling(reference)}}}", parsing_timeout=None)
    target = parse(text, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None)
    return equal_forms(tuple(gold), tuple(target))

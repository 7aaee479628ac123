"""The verifier of programming problems: run the response where it can do no harm, compare what its function returns."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from graftrl.rollout import FinishReason, Prompt
from graftrl.tasks.base import TIME_LIMIT, Grade
from graftrl.tasks.code.extract import program_of
from graftrl.tasks.code.oracles import is_right
from graftrl.tasks.code.plain import loads
from graftrl.tasks.code.problems import METADATA_FIELD, Problem
from graftrl.tasks.code.sandbox import Child, Sandbox, TimeLimit, TooMuch, confined

SLOWER = 4.0  # how many times as long as the problem's own solution a response may take; as in EvalPlus
_KEPT_BYTES = 512 * 1024**2  # expected results that a worker remembers
_STARTUP_S = 5.0
_BROKEN = "the problem's own solution fails"
# A right value is written in not much more than the expected one. Longer lines are not read: made for it, they cost
# this process far more time and memory than they took to write.
_LONGER, _SHORT_BYTES = 16, 65_536


class _SaysBroken(RuntimeError):
    """A child says that its sandbox does not hold. So may the code of a response."""

    def __init__(self, layers: Any) -> None:
        super().__init__(f"the sandbox does not hold: {', '.join(map(str, layers))[:200]}")


@dataclass(frozen=True)
class CodeVerifier:
    """Reward 1 iff the response's function passes all tests of the problem.

    The problem's own solution runs first, once in each process: it gives the results that are expected, and the time. A
    response may take `SLOWER` times as long, but at least `time_s` and at most `max_time_s` seconds of wall-clock time.

    Has a clock of its own: a pool need not restart a worker for an endless loop.
    """

    sandbox: Sandbox = field(default_factory=Sandbox)
    time_s: float = 5.0
    max_time_s: float = 60.0

    @property
    def limit_s(self) -> float:
        """Seconds after which it has surely answered: a solution, a response, and the start of their processes."""
        return 2 * (self.max_time_s + _STARTUP_S)

    def __call__(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> Grade:
        problem = prompt.metadata[METADATA_FIELD]
        if problem.fault:
            return Grade(0.0, f"unusable problem: {problem.fault}")
        program = program_of(problem, response)
        if program is None:
            return Grade(0.0, "no code in the response")
        known = expected_results(problem, self)
        if known.fault:
            return Grade(0.0, f"{_BROKEN}: {known.fault}")
        limit_s = min(max(self.time_s, SLOWER * known.seconds), self.max_time_s)
        try:
            fault = self._fault(problem, program, known, limit_s)
        except _SaysBroken:
            if not self.sandbox.weaker and not self.sandbox.holds():
                raise
            fault = "wrong answer"
        return Grade(0.0, fault) if fault else Grade(1.0, "correct")

    def _fault(self, problem: Problem, program: Sequence[str], known: Expected, limit_s: float) -> str:
        try:
            if problem.tests:
                return self._fault_in_tests(problem, program, limit_s)
            return self._fault_in_calls(problem, program, known, limit_s)
        except TimeLimit:
            return TIME_LIMIT
        except TooMuch:
            return "too much output"

    def _fault_in_calls(self, problem: Problem, program: Sequence[str], known: Expected, limit_s: float) -> str:
        calls = [call for call, kept in zip(problem.calls.splitlines(), known.results, strict=True) if kept is not None]
        expected = [kept for kept in known.results if kept is not None]
        with self._solution(problem, program, calls, limit_s) as child:
            answers = _answers(child)
            for call, wanted in zip(calls, expected, strict=True):
                kind, content = next(answers, (b"", b""))
                if kind != b"+":
                    return _fault_of(kind, content)
                if content != wanted and not _right(problem, call, content, wanted):
                    return "wrong answer"
        return ""

    def _fault_in_tests(self, problem: Problem, program: Sequence[str], limit_s: float) -> str:
        with ExitStack() as stack:
            pipes = [*os.pipe(), *os.pipe()]
            heard, asked, answered, answering = pipes
            name = problem.entry_point
            try:
                job: dict[str, Any] = {"role": "solution", "program": program, "entry_point": name}
                job |= {"all_calls_follow": False}
                solution = stack.enter_context(
                    confined(self.sandbox, job, limit_s=limit_s, pipes=(heard, heard), reply_to=answering)
                )
                job = {"role": "tests", "setup": [problem.setup], "tests": problem.tests, "entry_point": name}
                child = stack.enter_context(confined(self.sandbox, job, limit_s=limit_s, pipes=(asked, answered)))
                child.watched += solution.watched
            finally:
                for pipe in pipes:  # each end is left to the process that uses it, so that its end is noticed
                    os.close(pipe)
            kind, content = next(_answers(child), (b"", b""))
            if kind != b"+":
                return _fault_of(kind, content)
            verdict = _loaded(content)  # what a solution said of its exception may be in it
            if not isinstance(verdict, dict):
                return "wrong answer"
            return "" if verdict["passed"] is True else _fault_of(b"!", verdict["fault"])

    def _solution(self, problem: Problem, program: Sequence[str], calls: Sequence[str], limit_s: float) -> Any:
        job = {"role": "solution", "program": program, "entry_point": problem.entry_point, "all_calls_follow": True}
        return confined(self.sandbox, job, "".join(call + "\n" for call in calls).encode(), limit_s=limit_s)


@dataclass(frozen=True)
class SolutionCheck:
    """Reward 1 iff the problem's own solution passes its tests, under the limits of `verifier`."""

    verifier: CodeVerifier

    @property
    def limit_s(self) -> float:
        return self.verifier.limit_s

    def __call__(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> Grade:
        problem = prompt.metadata[METADATA_FIELD]
        fault = problem.fault or expected_results(problem, self.verifier).fault
        return Grade(float(not fault), fault or "correct")


@dataclass(frozen=True)
class Expected:
    """What a problem's own solution showed.

    fault: why it cannot serve; "" as a rule. seconds: wall-clock time of all its calls.
    results: for each call the line of its value, or None where it ran out of memory or the value cannot be written
        down: such calls are left out. Empty for test code.
    """

    fault: str
    seconds: float
    results: tuple[bytes | None, ...] = ()


_remembered: OrderedDict[tuple[Problem, CodeVerifier], Expected] = OrderedDict()


def expected_results(problem: Problem, verifier: CodeVerifier) -> Expected:
    """What the problem's own solution shows; remembered in this process."""
    key = (problem, verifier)
    if key not in _remembered:
        _remembered[key] = _observe(problem, verifier)
    _remembered.move_to_end(key)
    kept = sum(_size(expected) for expected in _remembered.values())
    while kept > _KEPT_BYTES and len(_remembered) > 1:
        kept -= _size(_remembered.popitem(last=False)[1])
    return _remembered[key]


def _size(expected: Expected) -> int:
    return 1000 + sum(len(result) for result in expected.results if result is not None)


def _observe(problem: Problem, verifier: CodeVerifier) -> Expected:
    if not problem.solution:
        return Expected("" if problem.tests else "there is none", 0.0)
    started = time.monotonic()
    results: list[bytes | None] = []
    calls = problem.calls.splitlines()
    try:
        if problem.tests:
            fault = verifier._fault_in_tests(problem, (problem.solution,), verifier.max_time_s)
            return Expected(fault, time.monotonic() - started)
        with verifier._solution(problem, (problem.solution,), calls, verifier.max_time_s) as child:
            for call, (kind, content) in zip(calls, _answers(child), strict=False):
                if kind == b"#" or (kind == b"-" and loads(content)["type"] == "MemoryError"):
                    results.append(None)
                elif kind != b"+":
                    return Expected(_fault_of(kind, content), 0.0)
                elif b'{"o":' in content and not _right(problem, call, content, content):
                    return Expected("it returns what is no plain data", 0.0)
                else:
                    results.append(content)
    except TimeLimit:
        return Expected(TIME_LIMIT, 0.0)
    except TooMuch:
        return Expected("too much output", 0.0)
    if len(results) < len(calls):
        return Expected(_fault_of(b"", b""), 0.0)
    if not any(result is not None for result in results):
        return Expected("no result can be compared", 0.0)
    return Expected("", time.monotonic() - started, tuple(results))


def _answers(child: Child) -> Iterator[tuple[bytes, bytes]]:
    """Kind and content of each answer; that a program was loaded is none."""
    for line in child.lines():
        if line[:1] != b"=":
            yield line[:1], line[1:]


def _right(problem: Problem, call: str, content: bytes, wanted: bytes) -> bool:
    if len(content) > _LONGER * len(wanted) + _SHORT_BYTES:
        return False
    arguments, _ = loads(call)
    expected = loads(wanted)
    try:
        value = loads(content)
    except (ValueError, TypeError, RecursionError, MemoryError):  # a program may write what it likes
        return False
    return is_right(problem.rule, problem.atol, arguments, value, expected)


def _fault_of(kind: bytes, content: Any) -> str:
    """A short phrase, of which there are few: they are counted."""
    if kind == b"#":
        return "a result too large or too deep"
    if kind not in (b"!", b"-"):
        return "ended before it answered"
    fault = _loaded(content) if isinstance(content, bytes) else content
    what = fault.get("kind") if isinstance(fault, dict) else None
    if what == "sandbox":
        layers = fault.get("layers")
        raise _SaysBroken(layers if isinstance(layers, list) else [])
    if what == "raised":
        name = str(fault.get("type"))
        name = name if name.isidentifier() and len(name) < 40 else "an exception"
        if fault.get("tests"):
            return f"the tests raise {name}"
        return (
            "not valid Python"
            if kind == b"!" and name in ("SyntaxError", "IndentationError", "TabError")
            else f"raised {name}"
        )
    return {
        "missing": "the function is missing",
        "wrong": "wrong answer",
        "ended": "ended before it answered",
        "unwritable": "a result too large or too deep",
        "no calls": "the tests never call the function",
    }.get(str(what), "wrong answer")


def _loaded(content: bytes) -> Any:
    if len(content) > _SHORT_BYTES:
        return None
    try:
        return loads(content)
    except (ValueError, TypeError, RecursionError):
        return None

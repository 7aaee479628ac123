"""Every solution of HumanEval, HumanEval+ and MBPP+ through the verifier; `python benchmarks/code_solutions.py FOLDER`.

FOLDER holds HumanEval.jsonl.gz, HumanEvalPlus.jsonl.gz and MbppPlus.jsonl.gz as their authors release them. Three kinds
of responses to each problem: its own solution, which must get reward 1; a function that returns None, and its own
solution with a wrong result for the last call, which must get 0. Then the cost of one response that is graded at once.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from graftrl.rollout import Prompt
from graftrl.tasks.build import code_verifier
from graftrl.tasks.code.layouts import problem_of, read_problems
from graftrl.tasks.code.problems import Problem
from graftrl.tasks.code.verifier import CodeVerifier, expected_results
from graftrl.tasks.config import CodeConfig, DataSource
from graftrl.tasks.pool import Item, VerificationPool

FILES = ("HumanEval", "HumanEvalPlus", "MbppPlus")
WORKERS = os.cpu_count() or 1
LAST_WRONG = """
_right, _calls, _depth = {name}, [0], [0]
def {name}(*arguments, **named):
    _calls[0] += _depth[0] == 0  # a recursive solution calls this one
    _depth[0] += 1
    value = _right(*arguments, **named)
    _depth[0] -= 1
    return ["wrong", "wrong"] if _depth[0] == 0 and _calls[0] == {calls} else value
"""


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("data")
    for name in FILES:
        source = DataSource(path=folder / f"{name}.jsonl.gz")
        config = CodeConfig(train=source)
        prompts = read_problems(source, config)
        verifier, _ = code_verifier(config)
        measure(name, prompts, verifier)
    measure_cost(verifier)


def measure(name: str, prompts: list[Prompt], verifier: CodeVerifier) -> None:
    left_out = {}
    responses: dict[str, list[Item]] = {"own solution": [], "returns None": [], "last call wrong": []}
    for prompt in prompts:
        problem = problem_of(prompt)
        responses["own solution"].append((prompt, fenced(problem.solution), "stop"))
        responses["returns None"].append((prompt, fenced(f"def {problem.entry_point}(*_): return None"), "stop"))
    started = time.perf_counter()
    report(name, "own solution", responses["own solution"], verifier, 1.0)
    report(name, "returns None", responses["returns None"], verifier, 0.0)
    if problem_of(prompts[0]).calls:
        for prompt in prompts:
            problem = problem_of(prompt)
            kept = sum(result is not None for result in expected_results(problem, verifier).results)
            if kept < len(problem.calls.splitlines()):
                left_out[prompt.id] = len(problem.calls.splitlines()) - kept
            responses["last call wrong"].append((prompt, fenced(last_wrong(problem, kept)), "stop"))
        report(name, "last call wrong", responses["last call wrong"], verifier, 0.0)
        calls = sum(len(problem_of(prompt).calls.splitlines()) for prompt in prompts)
        print(f"{name}: {calls:,} calls; left out because their result is too large: {left_out or 'none'}")
    print(f"{name}: {time.perf_counter() - started:.0f} s in all, {WORKERS} workers", flush=True)


def report(name: str, kind: str, items: list[Item], verifier: CodeVerifier, wanted: float) -> None:
    started = time.perf_counter()
    with VerificationPool(WORKERS, limit_s=5.0) as pool:
        grades = pool.grade(verifier, items)
    seconds = time.perf_counter() - started
    others = {item[0].id: grade.reason for item, grade in zip(items, grades, strict=True) if grade.reward != wanted}
    print(
        f"{name}, {kind}: reward {wanted:g} for {len(items) - len(others)} of {len(items)} in {seconds:.0f} s"
        + (f"; not for {others}" if others else ""),
        flush=True,
    )


def measure_cost(verifier: CodeVerifier) -> None:
    by_calls = Problem("f", solution="def f(x): return x", calls="[[1],{}]\n")
    by_tests = Problem("f", solution="def f(x): return x", setup="", tests="assert f(1) == 1")
    for kind, problem in (("calls", by_calls), ("test code", by_tests)):
        prompt = Prompt("p", (), "", "code", {"code": problem})
        verifier(prompt, fenced(problem.solution), "stop")
        times = []
        for _ in range(20):
            started, before = time.perf_counter(), os.times()
            verifier(prompt, fenced(problem.solution), "stop")
            after = os.times()
            processor = sum(after[:4]) - sum(before[:4])
            times.append((time.perf_counter() - started, processor))
        wall, processor = (sorted(column)[len(times) // 2] for column in zip(*times, strict=True))
        print(f"one short response, by {kind}: {1000 * wall:.0f} ms, {1000 * processor:.0f} ms of processor time")


def last_wrong(problem: Problem, calls: int) -> str:
    return problem.solution + LAST_WRONG.format(name=problem.entry_point, calls=calls)


def fenced(code: str) -> str:
    return f"~~~~python\n{code}\n~~~~"


if __name__ == "__main__":
    main()

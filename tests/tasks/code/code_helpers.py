"""Problems, responses and sandboxed runs for the tests of code tasks."""

from __future__ import annotations

import textwrap
from typing import Any

from graftrl.rollout import Prompt
from graftrl.tasks.base import Grade
from graftrl.tasks.code.plain import dumps, loads
from graftrl.tasks.code.problems import METADATA_FIELD, Problem
from graftrl.tasks.code.sandbox import Sandbox, confined
from graftrl.tasks.code.verifier import CodeVerifier

SOLUTION = "def add(a, b):\n    return a + b\n"
CALLS = [(1, 2), (40, 987_654_281), (-1, 1)]  # a result that no program holds by chance: 987654321


def by_calls(solution: str = SOLUTION, calls: Any = CALLS, name: str = "add", **fields: Any) -> Problem:
    lines = "".join(dumps([list(call), {}]).decode() + "\n" for call in calls)
    return Problem(entry_point=name, solution=solution, calls=lines, **fields)


def by_tests(tests: str = "assert add(1, 2) == 3\nassert add(40, 987654281) == 987654321", **fields: Any) -> Problem:
    return Problem(**{"entry_point": "add", "solution": SOLUTION, "setup": SOLUTION, "tests": tests} | fields)


def prompt_of(problem: Problem, identifier: str = "p") -> Prompt:
    return Prompt(identifier, ({"role": "user", "content": "?"},), "", "code", {METADATA_FIELD: problem})


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{textwrap.dedent(code)}\n```\n"


def grade(problem: Problem, code: str, time_s: float = 5.0, **options: Any) -> Grade:
    verifier = CodeVerifier(time_s=time_s, **options)
    return verifier(prompt_of(problem), fenced(code), "stop")


def run(code: str, *arguments: Any, limit_s: float = 10.0, sandbox: Sandbox | None = None) -> Any:
    """What `act` of the code returns in the sandbox; name and message of what it raises; None if it ends instead."""
    job = {"role": "solution", "program": [textwrap.dedent(code)], "entry_point": "act", "all_calls_follow": True}
    with confined(sandbox or Sandbox(), job, dumps([list(arguments), {}]) + b"\n", limit_s=limit_s) as child:
        answers = [(line[:1], loads(line[1:])) for line in child.lines()]
    kind, content = answers[-1]
    if kind in (b"-", b"!"):
        return f"{content['type']}: {content['message']}"
    return content if kind == b"+" else None

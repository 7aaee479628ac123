"""The program that a response stands for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from graftrl.tasks.code.problems import Problem

_FENCE = re.compile(r"( {0,3})(`{3,}|~{3,})[ \t]*([\w+#.-]*)")
_LANGUAGES = ("", "python", "python3", "py")
_TOP_LEVEL = re.compile(r"import\s+\w|from\s+\S+\s+import\b|(?:async\s+)?def\s|class\s+\w+\s*[:(]|@\w")


def program_of(problem: Problem, response: str) -> tuple[str, ...] | None:
    """The parts of the program, to be run one after the other; None if the response holds no code.

    That is the last fenced block, of those that define the function if any does; without a block, the code from its
    first top-level statement on if it defines the function, else the completion of the problem's own code. A block or a
    text that does not define the function completes the problem's code as well.
    """
    blocks = [block for block in _blocks(response) if block.strip()]
    defining = [block for block in blocks if _defines(problem, block)]
    if defining:
        return _whole(problem, defining[-1])
    if not blocks and _defines(problem, response):
        return _whole(problem, _from_first_statement(response))
    completion = _completion(blocks[-1] if blocks else response)
    if problem.context and completion is not None:
        return (f"{problem.context.rstrip()}\n{completion}",)
    return (blocks[-1],) if blocks else None


def _whole(problem: Problem, code: str) -> tuple[str, ...]:
    return (problem.preamble, code) if problem.preamble else (code,)


def _defines(problem: Problem, code: str) -> bool:
    name = re.escape(problem.entry_point)
    return (
        re.search(rf"^(?:(?:async[ \t]+)?def[ \t]+{name}\b|class[ \t]+{name}\b|{name}[ \t]*=)", code, re.M) is not None
    )


def _blocks(text: str) -> Iterator[str]:
    """Contents of the fenced blocks that may be Python, in order; the last may lack its end."""
    fence, indent, language, lines = "", "", "", list[str]()
    for line in text.splitlines():
        found = _FENCE.match(line)
        if not fence:
            if found is not None:
                indent, fence, language, lines = found[1], found[2], found[3].lower(), []
        elif found is not None and found[2].startswith(fence) and not line[found.end(2) :].strip():
            if language in _LANGUAGES:
                yield "\n".join(lines) + "\n"
            fence = ""
        else:
            lines.append(line.removeprefix(indent))
    if fence and language in _LANGUAGES:
        yield "\n".join(lines) + "\n"


def _from_first_statement(text: str) -> str:
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if _TOP_LEVEL.match(line))
    last = first
    for number in range(first, len(lines)):  # prose after the code is at the left margin too
        line = lines[number]
        if line[:1] in (" ", "\t", ")", "]", "}", "#") or _TOP_LEVEL.match(line):
            last = number
        elif line.strip() and not re.match(r"[A-Za-z_][\w.\[\]'\"]*[ \t]*(?:[-+*/|&]?=|\()", line):
            break
    return "\n".join(lines[first : last + 1]) + "\n"


def _completion(text: str) -> str | None:
    """The body with which a text goes on: its lines up to the next one at the left margin. None if it has none."""
    body: list[str] = []
    for line in text.splitlines():
        if line.strip() and line[:1] not in (" ", "\t"):
            break
        body.append(line)
    return "\n".join(body) + "\n" if any(line.strip() for line in body) else None

"""Grading a file of responses: what `graftrl grade FILE.jsonl` does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from graftrl.errors import ConfigError, DataError
from graftrl.rollout import Prompt
from graftrl.tasks.base import Task
from graftrl.tasks.data import read_jsonl
from graftrl.tasks.math import MathVerifier
from graftrl.tasks.pool import Item, VerificationPool

_WINDOW_LINES = 64  # graded together, so that all workers are busy and output still streams


def grade_file(
    path: Path, *, workers: int = 2, limit_s: float = 5.0, require_box: bool = True, task: Task | None = None
) -> Iterator[dict[str, Any]]:
    """Yield every line of a JSONL file with `reward` (float) and `reason` added, in order, as they are graded.

    A line needs `answer` (the reference: text or a number) and `response` (text); other fields are kept. A reference
    that is empty or cannot be parsed gives reward 0 and a reason that says so.

    Args:
        limit_s: seconds for each line.
        task: whose verifier grades instead; a line then needs `id`, of one of its prompts, in place of `answer`.

    Raises:
        DataError: a line that cannot be graded, by file and line, after yielding the lines before it.
        ConfigError: a task without a list of prompts.
    """
    verifier = MathVerifier(require_box=require_box, check_reference=True) if task is None else task.verifier
    lines = _checked(path) if task is None else _of_task(path, task)
    with VerificationPool(workers, limit_s) as pool:
        fault: DataError | None = None
        while fault is None:
            window: list[tuple[dict[str, Any], Item]] = []
            try:
                window.extend(islice(lines, _WINDOW_LINES))  # keeps what it got when a line is bad
            except DataError as error:
                fault = error
            if not window and fault is None:
                return
            grades = pool.grade(verifier, [item for _, item in window])
            for (line, _), grade in zip(window, grades, strict=True):
                yield line | {"reward": grade.reward, "reason": grade.reason}
        raise fault


def _of_task(path: Path, task: Task) -> Iterator[tuple[dict[str, Any], Item]]:
    if not isinstance(task.train, list | tuple):  # too many to go over
        raise ConfigError(f"the task {task.name!r} makes its problems as it goes, so that none can be found by its id")
    prompts = {prompt.id: prompt for prompts in (task.train, task.validation) for prompt in prompts}
    for number, line in read_jsonl(path):
        response = _response(path, number, line, "id")
        prompt = prompts.get(str(line["id"]))
        if prompt is None:
            known = next(iter(prompts))
            raise DataError(f"{path}, line {number}: the task has no prompt {line['id']!r}; there is {known!r}")
        yield line, (prompt, response, "stop")


def _checked(path: Path) -> Iterator[tuple[dict[str, Any], Item]]:
    for number, line in read_jsonl(path):
        response, answer = _response(path, number, line, "answer"), line.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise DataError(f"{path}, line {number}: field 'answer' is neither text nor a number")
        yield line, (Prompt(str(number), (), str(answer).strip(), "math"), response, "stop")


def _response(path: Path, number: int, line: dict[str, Any], other: str) -> str:
    """The line's response, where it has that and the other field."""
    for name in (other, "response"):
        if line.get(name) is None:
            raise DataError(f"{path}, line {number}: no field {name!r}; the line has: {', '.join(line) or 'none'}")
    if not isinstance(line["response"], str):
        raise DataError(f"{path}, line {number}: field 'response' is no text")
    return line["response"]

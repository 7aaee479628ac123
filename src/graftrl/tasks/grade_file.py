"""Grading a file of responses: what `graftrl grade FILE.jsonl` does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from graftrl.errors import DataError
from graftrl.rollout import Prompt
from graftrl.tasks.data import read_jsonl
from graftrl.tasks.math import MathVerifier
from graftrl.tasks.pool import Item, VerificationPool

_WINDOW_LINES = 64  # graded together, so that all workers are busy and output still streams


def grade_file(
    path: Path, *, workers: int = 2, limit_s: float = 5.0, require_box: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield every line of a JSONL file with `reward` (float) and `reason` added, in order, as they are graded.

    A line needs `answer` (the reference: text or a number) and `response` (text); other fields are kept. A reference
    that is empty or cannot be parsed gives reward 0 and a reason that says so. limit_s: seconds for each line.

    Raises DataError naming file and line for a line that cannot be graded, after yielding the lines before it.
    """
    verifier = MathVerifier(require_box=require_box, check_reference=True)
    lines = _checked(path)
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


def _checked(path: Path) -> Iterator[tuple[dict[str, Any], Item]]:
    for number, line in read_jsonl(path):
        for name in ("answer", "response"):
            if line.get(name) is None:
                raise DataError(f"{path}, line {number}: no field {name!r}; the line has: {', '.join(line) or 'none'}")
        answer, response = line["answer"], line["response"]
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise DataError(f"{path}, line {number}: field 'answer' is neither text nor a number")
        if not isinstance(response, str):
            raise DataError(f"{path}, line {number}: field 'response' is no text")
        yield line, (Prompt(str(number), (), str(answer).strip(), "math"), response, "stop")

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graftrl.errors import DataError
from graftrl.tasks.grade_file import grade_file


def _file(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_lines_come_back_in_order_with_reward_and_reason(tmp_path: Path) -> None:
    lines = [{"answer": i, "response": rf"\boxed{{{min(i, 80)}}}", "index": i} for i in range(90)]
    graded = list(grade_file(_file(tmp_path / "in.jsonl", *lines), workers=1))
    assert [line["index"] for line in graded] == list(range(90))
    assert [line["reward"] for line in graded] == [1.0] * 81 + [0.0] * 9
    assert graded[0] == {"answer": 0, "response": r"\boxed{0}", "index": 0, "reward": 1.0, "reason": "correct"}


def test_an_unusable_reference_scores_zero_and_says_so(tmp_path: Path) -> None:
    path = _file(
        tmp_path / "in.jsonl", *({"answer": text, "response": rf"\boxed{{{text}}}"} for text in ("", "t(0,4]"))
    )
    for line in grade_file(path, workers=1):
        assert line["reward"] == 0.0
        assert line["reason"].startswith("unusable reference")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "in.jsonl, line 3: not readable as JSON"),
        ({"answer": "5"}, "in.jsonl, line 3: no field 'response'; the line has: answer"),
        ({"answer": ["5"], "response": ""}, "line 3: field 'answer' is neither"),
        ({"answer": "5", "response": 5}, "line 3: field 'response' is no text"),
    ],
)
def test_a_bad_line_is_named_after_the_good_ones_before_it(tmp_path: Path, bad: Any, message: str) -> None:
    good = {"answer": "5", "response": r"\boxed{5}"}
    lines = grade_file(_file(tmp_path / "in.jsonl", good, good, bad, good), workers=1)
    assert [next(lines)["reward"], next(lines)["reward"]] == [1.0, 1.0]
    with pytest.raises(DataError, match=message):
        next(lines)


def test_a_box_is_not_needed_when_not_required(tmp_path: Path) -> None:
    path = _file(tmp_path / "in.jsonl", {"answer": "5", "response": "The answer is 5."})
    assert [next(grade_file(path, workers=1, require_box=need))["reward"] for need in (True, False)] == [0.0, 1.0]


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """A recipe's task of the kind code with one problem."""
    _file(tmp_path / "p.jsonl", {"id": "p1", "problem": "Write twice(x).", "tests": ["assert twice(2) == 4"]})
    task = f"{{kind: code, sandbox: weaker, train: {{path: {tmp_path / 'p.jsonl'}}}}}"
    (tmp_path / "recipe.yaml").write_text(f"task: {task}\n")
    return tmp_path / "recipe.yaml"


def test_a_tasks_verifier_grades_its_problems_by_id(tmp_path: Path, problems: Path, graftrl: Any) -> None:
    responses = ["```python\ndef twice(x): return 2 * x\n```", "```python\ndef twice(x): return x\n```"]
    lines = [{"id": "p1", "response": text} for text in responses]
    file = _file(tmp_path / "in.jsonl", *lines, {"id": "p2", "response": ""})
    code, out, err = graftrl("grade", file, "--task", problems, "--workers", 1)
    graded = [json.loads(line) for line in out.splitlines()]
    assert [(line["reward"], line["reason"]) for line in graded] == [(1.0, "correct"), (0.0, "wrong answer")]
    assert code == 2 and err.count("\n") == 1 and "line 3: the task has no prompt 'p2'; there is 'p1'" in err


def test_a_task_that_makes_its_problems_as_it_goes_has_none_to_grade(tmp_path: Path, graftrl: Any) -> None:
    (tmp_path / "recipe.yaml").write_text("task: {kind: hidden_programs}\n")
    file = _file(tmp_path / "in.jsonl", {"id": "1", "response": ""})
    code, _, err = graftrl("grade", file, "--task", tmp_path / "recipe.yaml")
    assert code == 2 and "makes its problems as it goes" in err and err.count("\n") == 1

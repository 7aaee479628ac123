from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import polars
import pytest
from pydantic import TypeAdapter, ValidationError

from graftrl.errors import ConfigError, DataError
from graftrl.tasks import build_task
from graftrl.tasks.base import Task
from graftrl.tasks.config import DataSource, MathConfig, TaskConfig
from graftrl.tasks.math import MathVerifier

SUFFIX = r"Let's think step by step and output the final answer within \boxed{}."
ROWS = [
    {"id": "a", "problem": "1+1?", "answer": "2", "level": 3},
    {"id": "b", "problem": "a half?", "answer": r"\frac12"},
    {"id": "c", "problem": "Who?", "answer": r"\text{Ann}"},
]


def _task(**settings: Any) -> Task:
    return build_task(TypeAdapter(TaskConfig).validate_python(settings))


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _math(path: Path, **source: Any) -> Task:
    return _task(kind="math", train={"path": path, **source})


def test_problems_become_prompts_with_the_suffix(tmp_path: Path) -> None:
    task = _math(_jsonl(tmp_path / "train.jsonl", ROWS))
    assert [prompt.id for prompt in task.train] == ["a", "b", "c"]
    assert task.train[0].messages == ({"role": "user", "content": f"1+1? {SUFFIX}"},)
    assert task.train[0].reference == "2"
    assert task.train[0].metadata == {"level": 3}
    assert task.verifier == MathVerifier()
    assert (task.validation, task.notes, task.in_process) == ([], (), False)


def test_system_message_and_template_are_configurable(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "train.jsonl", ROWS)
    task = _task(kind="math", train={"path": path}, system="Be brief.", template="Q: {problem} {x}\nA:")
    assert [message["content"] for message in task.train[0].messages] == ["Be brief.", "Q: 1+1? {x}\nA:"]


def test_a_complete_dump_of_settings_with_a_template_can_be_loaded_again(tmp_path: Path) -> None:
    settings = MathConfig(train=DataSource(path=tmp_path / "a.jsonl"), template="{problem}")
    assert MathConfig.model_validate(settings.model_dump(mode="json")) == settings


def test_a_list_of_answers_is_one_reference(tmp_path: Path) -> None:
    rows = [{"id": "a", "problem": "x^2=4?", "answer": ["2", "-2"]}, {"id": "b", "problem": "1+1?", "answer": [2]}]
    assert [prompt.reference for prompt in _math(_jsonl(tmp_path / "a.jsonl", rows)).train] == ["2, -2", "2"]
    rows = [{"id": "a", "problem": "x^2=4?", "answer": []}]
    with pytest.raises(DataError, match="neither text nor a number"):
        _math(_jsonl(tmp_path / "b.jsonl", rows))


def test_parquet_gives_the_same_prompts_as_jsonl(tmp_path: Path) -> None:
    polars.DataFrame(ROWS).write_parquet(tmp_path / "train.parquet")
    parquet = _math(tmp_path / "train.parquet").train
    assert [prompt.reference for prompt in parquet] == [row["answer"] for row in ROWS]


def test_hub_rows_are_read_with_subset_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*arguments: str, split: str) -> list[dict[str, Any]]:
        assert (arguments, split) == (("org/set", "main"), "test")
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = _task(kind="math", train={"hub": "org/set", "subset": "main", "split": "test"})
    assert [prompt.id for prompt in task.train] == ["a", "b", "c"]


def test_rows_without_ids_are_named_after_file_and_row(tmp_path: Path) -> None:
    rows = [{"question": "1?", "solution": 1}, {"question": "2?", "solution": 2.5}]
    task = _math(_jsonl(tmp_path / "own.jsonl", rows), problem_field="question", answer_field="solution")
    assert [(prompt.id, prompt.reference) for prompt in task.train] == [("own-1", "1"), ("own-2", "2.5")]


def test_a_limit_draws_a_seeded_subset_in_file_order(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "train.jsonl", [{"id": str(i), "problem": "?", "answer": i} for i in range(50)])
    drawn = [[int(prompt.id) for prompt in _math(path, limit=10, seed=seed).train] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] == sorted(drawn[0]) != drawn[2]
    assert len(drawn[0]) == 10


def test_unusable_references_are_left_out_and_reported(tmp_path: Path) -> None:
    rows = [*ROWS, {"id": "d", "problem": "?", "answer": ""}, {"id": "e", "problem": "?", "answer": "np.arcsin(10/13)"}]
    path = _jsonl(tmp_path / "train.jsonl", rows)
    task = _math(path)
    assert [prompt.id for prompt in task.train] == ["a", "b", "c"]
    assert task.notes == (
        f"{path}: 1 of 5 rows left out for an empty reference answer: d",
        f"{path}: 1 of 4 rows left out for a reference that cannot be parsed: e",
    )


def test_the_two_empty_references_of_the_math_training_set_are_left_out(shared_data: Path, tmp_path: Path) -> None:
    lines = (shared_data / "math_train.jsonl").read_text().splitlines(keepends=True)[5300:5400]
    (tmp_path / "part.jsonl").write_text("".join(lines))
    task = _math(tmp_path / "part.jsonl")
    assert len(task.train) == 98
    assert len(task.notes) == 1
    assert "math-train-5341, math-train-5343" in task.notes[0]


def test_validation_problems_that_are_in_training_are_reported(tmp_path: Path) -> None:
    train, validation = _jsonl(tmp_path / "t.jsonl", ROWS), _jsonl(tmp_path / "v.jsonl", ROWS[1:2])
    task = _task(kind="math", train={"path": train}, validation={"path": validation})
    assert task.notes == ("1 of 1 validation prompts are also in training",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": "a", "problem": "?", "answer": "1"}\n{"id": ', r"data\.jsonl, line 2: not readable as JSON"),
        ("[1]\n", r"data\.jsonl, line 1: not a JSON object but list"),
        ('{"id": "a", "problem": "?"}\n', r"data\.jsonl, row 1: no field 'answer'; the row has: id, problem"),
        ('{"id": "a", "problem": "?", "answer": "1"}\n{"problem": "?", "answer": "1"}', r"row 2: no field 'id'"),
        ('{"id": "a", "problem": 3, "answer": "1"}\n', r"row 1: field 'problem' is no text"),
        ('{"id": "a", "problem": "?", "answer": {"x": 1}}\n', r"row 1: field 'answer' is neither text nor a number"),
        ('{"id": "a", "problem": "?", "answer": "1"}\n' * 2, "the id 'a' occurs more than once"),
        ('{"id": "a", "problem": "?", "answer": ""}\n', "all 1 rows have an empty reference answer"),
        ("\n", "the data set is empty"),
        ('"\xff', "line 1: not"),
    ],
)
def test_a_fault_in_the_data_is_named_with_file_and_row(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "data.jsonl").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=message):
        _math(tmp_path / "data.jsonl")


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        _math(tmp_path / "nothing.jsonl")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"broken\.parquet: not readable as Parquet"):
        _math(tmp_path / "broken.parquet")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "math", "train": {"path": "a.csv"}}, "a.csv is none of .jsonl"),
        ({"kind": "math", "train": {}}, "give either `path` or `hub`"),
        ({"kind": "math", "train": {"path": "a.jsonl"}, "template": "?"}, "must contain {problem}"),
        ({"kind": "math", "train": {"path": "a.jsonl"}, "template": "{problem}", "suffix": "!"}, "replaces `suffix`"),
        ({"kind": "maths"}, "maths"),
        ({"kind": "function", "verifier": "x.y", "prompts": "a:b"}, "module:function"),
        ({"kind": "function", "verifier": "x:y"}, "give either `prompts`"),
        ({"kind": "reasoning_gym", "datasets": []}, "at least 1"),
        ({"kind": "reasoning_gym", "datasets": [{"name": "x"}], "answer_pattern": "last"}, "exactly one group"),
        ({"kind": "reasoning_gym", "datasets": [{"name": "x"}], "answer_pattern": "("}, "no regular expression"),
        ({"kind": "reasoning_gym", "datasets": [{"name": "x"}], "template": "?"}, "must contain {question}"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(TaskConfig).validate_python(settings)


def test_own_functions_give_prompts_and_verifier() -> None:
    task = _task(kind="function", prompts="task_helpers:prompts", verifier="task_helpers:obey")
    assert [prompt.id for prompt in task.train] == ["prompts-1", "b", "c"]
    assert (task.train[0].text, task.train[0].reference, task.train[0].metadata) == ("say one", "1", {"level": 2})
    assert task.train[1].messages[0] == {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("task_helpers:twins", DataError, "the id 'a' occurs more than once"),
        ("task_helpers:strange", DataError, "item 1: unknown key 'question'"),
        ("task_helpers:nothing", ConfigError, "cannot import 'task_helpers:nothing'"),
        ("task_helpers:NOT_A_FUNCTION", ConfigError, "is not a function"),
    ],
)
def test_faulty_functions_are_named(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _task(kind="function", prompts=name, verifier="task_helpers:obey")


def test_a_module_in_the_working_directory_is_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_in_cwd.py").write_text(
        "def check(prompt, response, finish_reason):\n    return response == 'y'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = _jsonl(tmp_path / "train.jsonl", ROWS)
    task = _task(kind="function", train={"path": path}, verifier="mine_in_cwd:check")
    assert task.verifier(task.train[0], "y", "stop").reward == 1.0
    assert task.train[0].text == "1+1?"


@pytest.mark.parametrize(
    ("result", "reward", "reason"),
    [
        ("true", 1.0, "correct"),
        ("half", 0.5, "score 0.5"),
        ("two", 0.0, r"verifier returned 2.0, outside [0, 1]"),
        ("nan", 0.0, r"verifier returned nan, outside [0, 1]"),
        ("text", 0.0, "verifier returned str, not a bool, number or Grade"),
        ("none", 0.0, "verifier returned NoneType, not a bool, number or Grade"),
    ],
)
def test_results_of_an_own_verifier_become_grades(result: str, reward: float, reason: str) -> None:
    task = _task(kind="function", prompts="task_helpers:prompts", verifier="task_helpers:obey")
    grade = task.verifier(task.train[0], f"return {result}", "stop")
    assert (grade.reward, grade.reason) == (reward, reason)


def test_hidden_programs_is_a_task_kind() -> None:
    task = _task(kind="hidden_programs", train_size=10, validation_size=24)
    assert (len(task.train), len(task.validation), task.in_process) == (10, 24, True)


def test_a_reference_that_is_a_whole_solution_is_its_last_box(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "problem": "1+1?", "answer": r"First \boxed{1}, so the sum is \boxed{\frac{4}{2}}."},
        {"id": "b", "problem": "?", "answer": r"The answer is \boxed{}."},
    ]
    task = _math(_jsonl(tmp_path / "train.jsonl", rows))
    assert [prompt.reference for prompt in task.train] == [r"\frac{4}{2}"]
    assert task.train[0].metadata == {"answer": rows[0]["answer"]}  # the solution is kept for methods that show it
    assert "b" in task.notes[0]

from __future__ import annotations

import json

import pytest

from graftrl.errors import DataError
from graftrl.logs.matching import TaskPrompts, text_id
from graftrl.tasks.config import CodeConfig, DataSource, MathConfig

PROBLEMS = {"a": "What is 1+1?", "b": "What is 1+1? Halve it.", "c": "Name a {prime}."}


@pytest.fixture
def task(tmp_path) -> MathConfig:
    path = tmp_path / "train.jsonl"
    rows = [{"id": key, "problem": problem, "answer": "2"} for key, problem in PROBLEMS.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return MathConfig(train=DataSource(path=path), system="Be brief.")


def ids(task: MathConfig, *texts: str) -> list[str | None]:
    return [None if match is None else match.prompt.id for match in TaskPrompts(task).find(texts)]


def test_ids_depend_on_the_text_alone():
    assert text_id([{"role": "user", "content": "hi"}]) == text_id([{"role": "system", "content": "hi"}])
    assert text_id([{"role": "user", "content": "hi"}]) == "sha256-8f434346648f6b96"
    assert text_id([{"role": "user", "content": "hi "}]) != text_id([{"role": "user", "content": "hi"}])


def test_a_problem_is_found_bare_and_inside_any_template(task):
    texts = ["What is 1+1?", "  Name a {prime}.\n", "system\nx\nuser\nName a {prime}. Think.\nassistant\n"]
    assert ids(task, *texts) == ["a", "c", "c"]


def test_of_problems_within_each_other_the_longest_counts(task):
    assert ids(task, "user\nWhat is 1+1? Halve it.\nassistant\n") == ["b"]


def test_a_prompt_that_holds_two_problems_is_refused(task):
    with pytest.raises(DataError, match="contains several problems of the task: 'c', 'a'"):
        ids(task, "What is 1+1?\n2\nName a {prime}.")


def test_unknown_prompts_match_nothing(task):
    assert ids(task, "What is 2+2?", "") == [None, None]


def test_whether_the_recipe_asks_in_the_same_words(task):
    suffix = task.suffix
    same, other = TaskPrompts(task).find([f"user\nWhat is 1+1? {suffix}\nassistant\n", "What is 1+1? Go."])
    assert same is not None and same.alike
    assert same.prompt.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"What is 1+1? {suffix}"},
    )
    assert other is not None and not other.alike and other.prompt.id == "a"


def test_ids_of_a_source_without_ids_are_those_of_the_task(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"problem": "p one", "answer": "1"}\n\n{"problem": "p two", "answer": "1"}\n')
    assert ids(MathConfig(train=DataSource(path=path)), "p two", "p one") == ["mine-3", "mine-1"]


def test_repeated_problems_get_the_first_id_and_are_counted(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"problem": "p", "answer": "1"}\n{"problem": "p", "answer": "2"}\n')
    found = TaskPrompts(MathConfig(train=DataSource(path=path)))
    (match,) = found.find(["p"])
    assert match is not None and match.prompt.id == "mine-1" and found.repeated == 1


def test_problems_of_a_code_task_are_found_by_their_text(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"problem": "Write twice(x).", "tests": "assert twice(1) == 2"}) + "\n")
    task = CodeConfig(train=DataSource(path=path))
    (match,) = TaskPrompts(task).find(["user: Write twice(x). In Python."])
    assert match is not None and (match.prompt.id, match.alike) == ("p-1", False)
    assert match.prompt.messages == task.messages("Write twice(x).")

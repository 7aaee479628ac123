from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path

import pytest
from task_helpers import prompt

from graftrl.tasks.base import Grade
from graftrl.tasks.math import MathVerifier, ReferenceCheck
from graftrl.tasks.pool import Item, VerificationPool

TOWER = r"\boxed{10^{(5^{5^{5^{5^{5}}} \cdot \log_{10}(5)} - 4)}}"


def _grade(reference: str, response: str, **options: bool) -> Grade:
    return MathVerifier(**options)(prompt(reference), response, "stop")


@pytest.mark.parametrize(
    ("reference", "response", "reward", "reason"),
    [
        ("5", r"\boxed{5}", 1.0, "correct"),
        ("5", r"first \boxed{5} and finally \boxed{7}", 0.0, "wrong answer"),
        ("3", r"\boxed{1} \boxed{2} \boxed{3}", 1.0, "correct"),
        ("3", r"\boxed{1,2,3}", 0.0, "wrong answer"),
        ("5", "The answer is 5.", 0.0, "no boxed answer"),
        ("5", r"\boxed{}", 0.0, "empty box"),
        ("5", r"\boxed{5", 0.0, "unclosed box"),
        ("5", r"\boxed{\boxed{5}}", 1.0, "correct"),
        (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}", 0.0, "wrong answer"),
        ("5", r"\boxed{" + "5" * 2001 + "}", 0.0, "boxed answer longer than 2000 characters"),
    ],
)
def test_only_the_last_box_is_graded(reference: str, response: str, reward: float, reason: str) -> None:
    assert _grade(reference, response) == Grade(reward, reason)


def test_grading_works_in_a_thread_that_is_not_the_main_one() -> None:
    grades: list[Grade] = []
    thread = threading.Thread(target=lambda: grades.append(_grade(r"\frac{1}{3}", r"\boxed{\frac{2}{6}}")))
    thread.start()
    thread.join()
    assert grades == [Grade(1.0, "correct")]


def test_a_power_tower_scores_zero_and_the_next_item_is_graded() -> None:
    items: list[Item] = [(prompt("5"), text, "stop") for text in (r"\boxed{\frac{10}{2}}", TOWER, r"\boxed{5.0}")]
    with VerificationPool(workers=1, limit_s=2.0) as pool:
        assert [grade.reward for grade in pool.grade(MathVerifier(), items)] == [1.0, 0.0, 1.0]
        assert pool.outcomes["timeouts"] == 1


@pytest.mark.parametrize(
    ("reference", "response", "reward"),
    [("5", "The answer is 5.", 1.0), ("5", "so $x = 5$", 1.0), ("5", "The answer is 6.", 0.0), ("5", r"\boxed{}", 0.0)],
)
def test_without_require_box_an_unboxed_answer_is_searched(reference: str, response: str, reward: float) -> None:
    assert _grade(reference, response, require_box=False).reward == reward


def test_the_verifier_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(MathVerifier(require_box=False))) == MathVerifier(require_box=False)


@pytest.mark.parametrize("name", ["math500", "aime2024", "aime2025", "amc23", "minerva_math", "olympiadbench"])
def test_every_reference_of_a_benchmark_equals_itself(shared_data: Path, pool: VerificationPool, name: str) -> None:
    rows = [json.loads(line) for line in (shared_data / f"{name}.jsonl").open()]
    items: list[Item] = [(prompt(row["answer"], row["id"]), rf"So \boxed{{{row['answer']}}}.", "stop") for row in rows]
    grades = pool.grade(MathVerifier(), items)
    assert [(row["id"], row["answer"]) for row, grade in zip(rows, grades, strict=True) if grade.reward != 1.0] == []


def test_every_reference_of_math500_can_be_parsed(shared_data: Path, pool: VerificationPool) -> None:
    rows = [json.loads(line) for line in (shared_data / "math500.jsonl").open()]
    items: list[Item] = [(prompt(row["answer"], row["id"]), "", "stop") for row in rows]
    assert all(grade.reward == 1.0 for grade in pool.grade(ReferenceCheck(), items))

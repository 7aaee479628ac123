from __future__ import annotations

from typing import Any

import pytest

from graftrl.errors import ConfigError, DataError
from graftrl.rollout import Prompt
from graftrl.tasks.base import Task
from graftrl.tasks.config import ReasoningGymConfig
from graftrl.tasks.gym import build_reasoning_gym, extract_answer
from graftrl.tasks.pool import Item, VerificationPool

pytest.importorskip("reasoning_gym")
TINY = {"name": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def _task(**settings: Any) -> Task:
    defaults = {"datasets": [{"name": "chain_sum"}], "train_size": 20, "validation_size": 10}
    return build_reasoning_gym(ReasoningGymConfig.model_validate(defaults | settings))


def _questions(prompts: Any) -> list[str]:
    return [prompt.metadata["entry"]["question"] for prompt in prompts]


@pytest.mark.parametrize(
    ("pattern", "response", "answer"),
    [
        ("boxed", r"\boxed{1} \boxed{2}", "2"),
        ("boxed", r"\boxed{\text{yes}}", "yes"),
        ("boxed", "2", None),
        ("tag", "<answer>1</answer> <answer> 2\n</answer>", "2"),
        ("tag", "<answer>1", None),
        ("first_integer", "-3 then 4", "-3"),
        ("last_integer", "-3 then 4.", "4"),
        ("last_integer", "none", None),
        ("first_line", "\n  12 \nbecause", "12"),
        ("first_line", " \n", None),
        (r"=\s*(\d+)", "1 = 2 = 3", "3"),
    ],
)
def test_answers_are_extracted_by_pattern(pattern: str, response: str, answer: str | None) -> None:
    assert extract_answer(pattern, response) == answer


def test_only_the_full_score_on_the_extracted_answer_counts(pool: VerificationPool) -> None:
    task = _task(answer_pattern="boxed")
    prompt: Prompt = task.train[0]
    right = prompt.reference
    items: list[Item] = [
        (prompt, text, "stop")
        for text in (rf"\boxed{{{right}}}", rf"\boxed{{The answer is {right}}}", f"The answer is {right}", r"\boxed{x}")
    ]
    grades = pool.grade(task.verifier, items)
    assert [grade.reward for grade in grades] == [1.0, 0.0, 0.0, 0.0]
    assert grades[1].reason.startswith("wrong answer (score 0.")
    assert grades[2].reason == "no answer in the expected format"


def test_splits_of_a_small_set_are_disjoint_by_question() -> None:
    task = _task(datasets=[TINY], train_size=40, validation_size=60, shots=3)
    train, validation = _questions(task.train), _questions(task.validation)
    assert not set(train) & set(validation)
    assert len(set(validation)) == len(validation) < 60
    assert f"{60 - len(validation)} of 60 validation questions left out" in task.notes[-1]


def test_shots_stand_before_the_question_and_in_no_split() -> None:
    task = _task(shots=2, answer_pattern="tag", template="Q: {question}\nA:")
    head = task.train[0].text.split("\n\n")
    assert len(head) == 3
    assert all(shot.startswith("Q: ") and shot.endswith("</answer>") for shot in head[:2])
    shots = {shot.removeprefix("Q: ").partition("\nA:")[0] for shot in head[:2]}
    assert not shots & {*_questions(task.train), *_questions(task.validation)}


def test_a_seed_gives_the_same_prompts_again_and_neighbouring_seeds_other_ones() -> None:
    first, again, other = (_questions(_task(seed=seed).train) for seed in (0, 0, 1))
    assert first == again
    assert not set(first) & set(other)


def test_weights_set_the_shares_of_a_mixture() -> None:
    task = _task(datasets=[{"name": "chain_sum", "weight": 3}, {"name": "spell_backward"}], train_size=40)
    names = [prompt.metadata["dataset"] for prompt in task.train]
    assert names.count("chain_sum") == 30
    assert names != sorted(names)


def test_unknown_sets_settings_and_exhausted_sets_are_refused() -> None:
    with pytest.raises(ConfigError, match="'chainsum' not registered"):
        _task(datasets=[{"name": "chainsum"}])
    with pytest.raises(ConfigError, match="bogus"):
        _task(datasets=[{"name": "chain_sum", "config": {"bogus": 1}}])
    with pytest.raises(DataError, match="too few different questions"):
        _task(datasets=[TINY], train_size=3000, validation_size=20)

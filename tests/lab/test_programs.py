"""Operations, draw of programs, prompts and verifier of the hidden-programs task."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from pydantic import ValidationError

from graftrl.errors import ConfigError
from graftrl.lab.programs import (
    OPERATIONS,
    HiddenProgramsConfig,
    build_hidden_programs,
    draw_programs,
    execute,
    write_demonstration,
)
from graftrl.rollout import Prompt

CONFIG = HiddenProgramsConfig()


@pytest.mark.parametrize(
    ("letter", "expected"),
    [
        ("A", [6, 2, 9, 5, 1, 4, 1, 3]),
        ("B", [6, 8, 5, 8, 4, 0, 7, 3]),
        ("C", [3, 3, 4, 4, 5, 9, 9, 9]),
        ("D", [1, 4, 1, 5, 9, 2, 6, 3]),
        ("E", [9, 3, 2, 3, 5, 7, 6, 8]),
        ("F", [1, 3, 1, 4, 9, 5, 6, 2]),
        ("G", [3, 1, 1, 1, 1, 1, 1, 1]),
        ("H", [3, 2, 6, 4, 9, 4, 8, 3]),
        ("I", [6, 4, 7, 4, 8, 2, 5, 9]),
    ],
)
def test_operation(letter: str, expected: list[int]) -> None:
    digits = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    assert OPERATIONS[letter](digits).tolist() == expected
    assert OPERATIONS[letter](np.stack([digits, digits])).tolist() == [expected, expected]


def test_swap_leaves_an_odd_last_digit() -> None:
    assert OPERATIONS["F"](np.array([1, 2, 3])).tolist() == [2, 1, 3]


def test_demonstration() -> None:
    digits = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    assert write_demonstration(("A", "E"), digits) == "A:6,2,9,5,1,4,1,3;E:8,6,7,5,3,2,3,9"
    assert write_demonstration(("A", "E"), digits, "|") == "A:6,2,9,5,1,4,1,3|E:8,6,7,5,3,2,3,9"


@pytest.mark.parametrize("seed", range(5))
def test_programs_differ_and_none_is_degenerate(seed: int) -> None:
    programs = draw_programs(HiddenProgramsConfig(program_seed=seed, families=26, validation_size=26))
    digits = np.random.default_rng(1).integers(0, 10, (50, 8))
    outputs = [execute(program, digits)[1] for program in programs.values()]
    assert list(programs) == list("abcdefghijklmnopqrstuvwxyz")
    assert all(first != second for first, second in programs.values())
    assert len({output.tobytes() for output in outputs}) == 26
    assert not any((output == digits).all() or (output == output[:, :1]).all() for output in outputs)


def test_programs_come_from_their_seed_alone() -> None:
    assert draw_programs(CONFIG) == draw_programs(CONFIG.model_copy(update={"seed": 7, "separator": "|"}))
    assert draw_programs(CONFIG) != draw_programs(CONFIG.model_copy(update={"program_seed": 1}))


def test_too_many_families_for_the_programs_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftrl.lab.programs.PROGRAMS", (("A", "B"), ("B", "A"), ("C", "G"), ("A", "D")))
    assert set(draw_programs(HiddenProgramsConfig(families=2)).values()) in (
        {("A", "B"), ("A", "D")},
        {("B", "A"), ("A", "D")},
    )
    with pytest.raises(ConfigError, match="only 2 programs differ"):
        draw_programs(HiddenProgramsConfig(families=3))


@pytest.mark.parametrize(
    "settings",
    [
        {"separator": ":"},
        {"separator": "A"},
        {"separator": ""},
        {"validation_size": 100},
        {"length": 3, "validation_size": 720},
        {"families": 27},
        {"unknown": 1},
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        HiddenProgramsConfig.model_validate(settings)


def test_references_are_the_hidden_programs_output() -> None:
    task = build_hidden_programs(CONFIG)
    programs = draw_programs(CONFIG)
    for prompt in [*task.train[:50], *task.validation[:50]]:
        digits = np.array([int(digit) for digit in prompt.text[1:-1].split(",")])
        demonstration = write_demonstration(programs[prompt.text[0]], digits)
        assert prompt.metadata == {"family": prompt.text[0], "solution": demonstration}
        assert task.verifier(prompt, demonstration, "stop").reward == 1.0


def test_train_item_is_a_function_of_seed_and_index() -> None:
    train = build_hidden_programs(CONFIG).train
    assert len(train) == 100_000
    assert train[123].id == "train-000123"
    assert train[-1] == train[99_999]
    assert train[5:8] == [train[5], train[6], train[7]]
    assert train[123] == build_hidden_programs(CONFIG.model_copy(update={"train_size": 124})).train[123]
    assert train[123].text != build_hidden_programs(CONFIG.model_copy(update={"seed": 1})).train[123].text
    assert pickle.loads(pickle.dumps(train))[77] == train[77]
    with pytest.raises(IndexError):
        train[100_000]


def test_prompts_agree_between_processes() -> None:
    code = (
        "from graftrl.lab.programs import *; t = build_hidden_programs(HiddenProgramsConfig());"
        "print([t.train[123], t.train[45678], t.validation[7]])"
    )
    task = build_hidden_programs(CONFIG)
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other.strip() == repr([task.train[123], task.train[45678], task.validation[7]])


@pytest.mark.parametrize("length", [4, 8])
def test_validation_is_balanced_distinct_and_disjoint_from_train(length: int) -> None:
    task = build_hidden_programs(HiddenProgramsConfig(length=length, validation_size=240))
    texts = {prompt.text for prompt in task.validation}
    assert len(texts) == len(task.validation) == 240
    assert len({prompt.id for prompt in task.validation}) == 240
    assert set(Counter(prompt.metadata["family"] for prompt in task.validation).values()) == {20}
    assert not texts & {prompt.text for prompt in task.train[:5000]}


def prompt() -> Prompt:
    return Prompt("x", ({"role": "user", "content": "c3,1,4>"},), reference="5,8,6", task="hidden_programs")


@pytest.mark.parametrize(
    ("response", "finish_reason", "reward"),
    [
        ("A:4,1,3;B:5,8,6", "stop", 1.0),
        ("B:6,8,5;A:5,8,6", "stop", 1.0),  # another program, the same list
        ("D:0,0,0;I:5,8,6", "stop", 1.0),  # only the last list counts
        ("5,8,6", "stop", 0.0),
        (":5,8,6", "stop", 1.0),
        ("", "stop", 0.0),
        ("A:4,1,3;B:5,8,6", "length", 0.0),
        ("A:5,8,6;B:4,1,3", "stop", 0.0),
        ("A:4,1,3;B:5,8,6,", "stop", 0.0),
        ("A:4,1,3;B:5,8", "stop", 0.0),
    ],
)
def test_verifier(response: str, finish_reason: str, reward: float) -> None:
    task = build_hidden_programs(CONFIG)
    assert task.in_process
    assert task.verifier(prompt(), response, finish_reason).reward == reward  # type: ignore[arg-type]


def test_an_imperfect_verifier_counts_a_fixed_share_of_wrong_lists_right_in_training_alone() -> None:
    exact = build_hidden_programs(CONFIG)
    lenient = build_hidden_programs(CONFIG.model_copy(update={"false_positives": 0.1}))
    wrong = [f"A:1;B:{i},{i}" for i in range(20)]
    rewards = np.array([[lenient.verifier(p, text, "stop").reward for text in wrong] for p in lenient.train[:200]])
    assert rewards.mean() == pytest.approx(0.1, abs=0.02)  # 4,000 pairs: four standard errors
    again = np.array([[lenient.verifier(p, text, "stop").reward for text in wrong] for p in lenient.train[:200]])
    assert (rewards == again).all()
    assert not any(exact.verifier(p, text, "stop").reward for p in exact.train[:200] for text in wrong)
    assert not any(lenient.verifier(p, text, "stop").reward for p in lenient.validation for text in wrong)
    assert not any(lenient.verifier(p, text, "length").reward for p in lenient.train[:200] for text in wrong)
    assert [p.text for p in lenient.train[:5]] == [p.text for p in exact.train[:5]]

from __future__ import annotations

import gzip
import json
from pathlib import Path

import polars as pl
import pytest
from code_helpers import fenced

from graftrl.errors import ConfigError, DataError
from graftrl.tasks import build_task
from graftrl.tasks.code.layouts import problem_of, read_problems
from graftrl.tasks.code.plain import loads
from graftrl.tasks.code.verifier import CodeVerifier
from graftrl.tasks.config import CODE_TEMPLATE, CodeConfig, DataSource
from graftrl.tasks.pool import VerificationPool

HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'import math\n\ndef helper(x):\n    return x\n\ndef half(x):\n    """Half of x."""\n',
    "entry_point": "half",
    "canonical_solution": "    return helper(x) / 2\n",
    "test": "def check(candidate):\n    assert candidate(helper(3)) == 1.5\n",
}
PLUS = {
    "task_id": "HumanEval/0", "prompt": HUMANEVAL["prompt"], "entry_point": "half",
    "canonical_solution": "    return x / 2\n", "base_input": [[3]], "plus_input": [[4], [10**30]], "atol": 0,
}  # fmt: skip
MBPP = {
    "task_id": 7, "text": "Write a function to double a number.",
    "code": "def aid(x):\r\n  return x\r\ndef twice(x):\r\n  return aid(x) * 2",
    "test_list": ["assert twice(2) == 4", "assert twice(aid(3)) == 6"], "test_setup_code": "import math",
}  # fmt: skip
MBPP_HUB = {
    "task_id": 7, "prompt": "Write a function to double a number.", "code": "def twice(x):\n  return x * 2",
    "source_file": "x.ipynb", "test_imports": ["import math"], "test_list": ["assert twice(2) == 4"],
    "test": "import numpy as np\ninputs = [[2], [3]]\nresults = [4, 6]\n"
    "for arguments, wanted in zip(inputs, results):\n    assert np.allclose(twice(*arguments), wanted)\n",
}  # fmt: skip
OWN = {"id": "a", "problem": "Write twice(x).", "tests": ["assert twice(2) == 4", "assert twice(3) == 6"]}


def _file(folder: Path, *rows: dict, name: str = "rows.jsonl") -> Path:
    path = folder / name
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def _config(folder: Path, *rows: dict, name: str = "rows.jsonl", source: dict | None = None, **options) -> CodeConfig:
    return CodeConfig(train=DataSource(path=_file(folder, *rows, name=name), **(source or {})), **options)


def _only(config: CodeConfig):
    (prompt,) = read_problems(config.train, config)
    return prompt


def _grade(prompt, code: str):
    return CodeVerifier()(prompt, fenced(code), "stop")


TWICE, THRICE = "def twice(x): return x + x", "def twice(x): return x * 3"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.ndjson", "rows.jsonl.gz"])
def test_humaneval_rows(name, tmp_path):
    prompt = _only(_config(tmp_path, HUMANEVAL, name=name))
    assert prompt.id == "HumanEval/0"
    assert prompt.messages[0]["content"] == CODE_TEMPLATE.replace("{problem}", HUMANEVAL["prompt"])
    assert prompt.metadata["solution"] == prompt.reference
    assert problem_of(prompt).preamble == "import math\n\ndef helper(x):\n    return x"
    assert _grade(prompt, "def half(x): return helper(x) * 0.5").reward == 1.0
    assert _grade(prompt, "def half(x): return x // 2").reason == "wrong answer"
    assert CodeVerifier()(prompt, "    return x * math.sqrt(0.25)\n", "stop").reward == 1.0


def test_evalplus_rows(tmp_path):
    prompt = _only(_config(tmp_path, PLUS))
    assert [loads(line) for line in problem_of(prompt).calls.splitlines()] == [[[3], {}], [[4], {}], [[10**30], {}]]
    assert _grade(prompt, "def half(x): return x / 2").reward == 1.0
    assert _grade(prompt, "def half(x): return {3: 1.5, 4: 2}[x]").reason == "raised KeyError"


@pytest.mark.parametrize("row", [MBPP, MBPP_HUB])
def test_mbpp_rows(row, tmp_path):
    prompt = _only(_config(tmp_path, row))
    assert prompt.id == "7"
    assert prompt.text.endswith("double a number.\nYour function must pass this test:\nassert twice(2) == 4")
    assert problem_of(prompt).entry_point == "twice"
    assert _grade(prompt, TWICE).reward == 1.0
    assert _grade(prompt, THRICE).reason == "wrong answer"


@pytest.mark.parametrize("solution", [None, "def twice(x): return 2 * x"])
def test_rows_with_fields_of_your_own(solution, tmp_path):
    row = {"nr": 3, "question": "Write twice(x).", "checks": OWN["tests"], "gold": solution, "before": "import math"}
    prompt = _only(
        _config(
            tmp_path, row, source={"id_field": "nr", "problem_field": "question", "answer_field": "gold"},
            tests_field="checks", setup_field="before",
        )
    )  # fmt: skip
    assert (prompt.id, prompt.reference) == ("3", solution or "")
    assert _grade(prompt, TWICE).reward == 1.0
    assert _grade(prompt, THRICE).reason == "wrong answer"


def test_parquet_rows(tmp_path):
    path = tmp_path / "rows.parquet"
    pl.DataFrame([OWN | {"entry_point": "twice"}]).write_parquet(path)
    prompt = _only(CodeConfig(train=DataSource(path=path)))
    assert _grade(prompt, TWICE).reward == 1.0


def test_a_row_without_an_id_is_called_by_its_number(tmp_path):
    row = {key: value for key, value in OWN.items() if key != "id"}
    assert _only(_config(tmp_path, row, name="rows.jsonl.gz")).id == "rows-1"


MBPP_PLUS_TYPES = [
    (2, [[1, 2], [3]], [(1, 2), (3,)]),
    (63, [[[1, 2], [3, 4]]], [[(1, 2), (3, 4)]]),
    (75, [[[6, 24]], 6], [[(6, 24)], 6]),
    (106, [[5], [9, 10]], [[5], (9, 10)]),
    (115, [[[1, 2], []]], [[{1, 2}, {}]]),
    (124, ["0", "1j"], [0.0, 1j]),
    (250, [[10, 8], 8], [(10, 8), 8]),
    (252, ["1"], [1 + 0j]),
    (259, [[[1, 3], [4, 5]], [[6, 7]]], [((1, 3), (4, 5)), ((6, 7),)]),
    (278, [[1, 5, [4, 6], 10]], [(1, 5, (4, 6), 10)]),
    (307, [["H", 5, [], True], 2, 50], [("H", 5, [], True), 2, 50]),
    (580, [[4, [7, [1]]]], ((4, (7, (1,))),)),
    (722, [{"Cierra": [6.2, 70]}, 6.0], [{"Cierra": (6.2, 70)}, 6.0]),
    (3, [[1, 2]], [[1, 2]]),
]


@pytest.mark.parametrize(("number", "written", "meant"), MBPP_PLUS_TYPES, ids=[str(row[0]) for row in MBPP_PLUS_TYPES])
def test_arguments_of_mbpp_plus_get_the_types_that_json_lacks(number, written, meant, tmp_path):
    row = PLUS | {"task_id": f"Mbpp/{number}", "prompt": "Text.", "base_input": [written], "plus_input": {}}
    (call,) = problem_of(_only(_config(tmp_path, row))).calls.splitlines()
    assert repr(loads(call)[0]) == repr(list(meant))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, "unknown layout, with the fields question. Known are evalplus"),
        (PLUS | {"prompt": 3}, "not a problem of the layout 'evalplus' \\(field 'prompt' is no text\\)"),
        (PLUS | {"base_input": 3}, "field 'base_input' is no list"),
        (PLUS | {"task_id": "Mbpp/2", "prompt": "x", "base_input": [[3]]}, "not a problem of the layout 'evalplus'"),
        (MBPP | {"text": None}, "no field 'text'; the row has: task_id, code"),
    ],
)
def test_a_bad_row_is_named(row, message, tmp_path):
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 2: .*{message}"):
        config = _config(tmp_path, OWN, row)
        read_problems(config.train, config)


def test_a_layout_that_is_named_is_not_guessed(tmp_path):
    config = _config(tmp_path, OWN, layout="humaneval")
    with pytest.raises(DataError, match="no field 'prompt'; the row has: id, problem, tests"):
        read_problems(config.train, config)


def test_a_broken_archive_is_named(tmp_path):
    path = _file(tmp_path, OWN, name="rows.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz, line \d: not readable"):
        read_problems(DataSource(path=path), CodeConfig(train=DataSource(path=path)))
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz"):
        read_problems(DataSource(path=path), CodeConfig(train=DataSource(path=path)))


UNUSABLE = [
    (OWN | {"id": "b", "tests": []}, "no tests"),
    (PLUS | {"task_id": "b", "base_input": [], "plus_input": []}, "no tests"),
    (OWN | {"id": "b", "tests": "assert True"}, "no function under test can be found"),
]


@pytest.mark.parametrize(("row", "fault"), UNUSABLE)
def test_problems_that_cannot_be_graded_are_left_out_of_training_and_named(row, fault, tmp_path):
    task = build_task(_config(tmp_path, OWN, row))
    assert [prompt.id for prompt in task.train] == ["a"]
    assert task.notes == (f"{tmp_path / 'rows.jsonl'}: 1 of 2 rows left out for {fault}: b",)
    unusable = read_problems(_config(tmp_path, row).train, _config(tmp_path, row))[0]
    assert _grade(unusable, TWICE).reason == f"unusable problem: {fault}"


def test_nothing_usable_is_an_error(tmp_path):
    with pytest.raises(DataError, match="all 1 rows have no tests"):
        build_task(_config(tmp_path, OWN | {"tests": []}))


def test_the_check_runs_solutions_and_leaves_out_what_they_fail(tmp_path):
    good, bad = OWN | {"answer": "def twice(x): return 2 * x"}, OWN | {"id": "b", "answer": THRICE}
    unknown = OWN | {"id": "c"}
    task = build_task(_config(tmp_path, good, bad, unknown, check=True))
    assert [prompt.id for prompt in task.train] == ["a", "c"]
    assert task.notes == (
        f"{tmp_path / 'rows.jsonl'}: 1 of 3 rows left out for a solution of their own that fails: wrong answer: b",
    )
    assert len(build_task(_config(tmp_path, good, bad, unknown)).train) == 3


def test_a_task_grades_in_the_pool(tmp_path, pool: VerificationPool):
    task = build_task(_config(tmp_path, OWN, HUMANEVAL))
    items = [(task.train[0], fenced(code), "stop") for code in (TWICE, THRICE)]
    items += [(task.train[1], "I do not know.", "stop")]
    grades = pool.grade(task.verifier, items)
    assert [(grade.reward, grade.reason) for grade in grades] == [
        (1.0, "correct"), (0.0, "wrong answer"), (0.0, "no code in the response"),
    ]  # fmt: skip


def test_settings_that_cannot_work_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"time_s \(9\) is more than max_time_s \(3\)"):
        _config(tmp_path, OWN, time_s=9, max_time_s=3)
    with pytest.raises(ValueError, match=r"must contain \{problem\}"):
        _config(tmp_path, OWN, template="Write it.")
    with pytest.raises(ConfigError, match="'no-such-thing' is not installed"):
        build_task(_config(tmp_path, OWN, packages=("no-such-thing",)))


SAMPLE = {"HumanEval": range(0, 164, 16), "HumanEvalPlus": range(4, 164, 12), "MbppPlus": range(1, 378, 20)}


@pytest.mark.parametrize("name", SAMPLE)
def test_solutions_of_the_benchmarks_are_right_and_others_wrong(name, shared_data, pool):
    """44 of the 706 problems; benchmarks/code_solutions.py does all of them."""
    source = DataSource(path=shared_data / f"{name}.jsonl.gz")
    prompts = read_problems(source, CodeConfig(train=source))
    chosen = [prompts[index] for index in SAMPLE[name]]
    right = [(prompt, fenced(prompt.reference), "stop") for prompt in chosen]
    wrong = [(prompt, fenced(f"def {problem_of(prompt).entry_point}(*_): return object"), "stop") for prompt in chosen]
    grades = pool.grade(CodeVerifier(), [*right, *wrong])
    assert [grade.reward for grade in grades] == [1.0] * len(chosen) + [0.0] * len(chosen)
    assert {"HumanEval": 164, "HumanEvalPlus": 164, "MbppPlus": 378}[name] == len(prompts)

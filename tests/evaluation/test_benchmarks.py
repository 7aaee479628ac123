"""Which problems a benchmark has, and that none of them is left out."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
import yaml

from graftrl.errors import ConfigError, DataError
from graftrl.evaluation import benchmarks
from graftrl.evaluation.benchmarks import KNOWN, BenchmarkOptions, find_benchmarks, reopen
from graftrl.tasks import data
from graftrl.tasks.config import MATH_SUFFIX
from graftrl.tasks.math import MathVerifier
from graftrl.tasks.pool import VerificationPool

ROWS = [{"id": "a", "problem": "1+1?", "answer": "2"}, {"id": "b", "problem": "a half?", "answer": r"\frac12"}]
MATH = [name for name, known in KNOWN.items() if known.kind == "math"]


def load(*names: object, **options: object):
    return find_benchmarks([str(name) for name in names], BenchmarkOptions(**options))


def test_known_benchmarks_have_their_published_sizes(shared_data, monkeypatch):
    monkeypatch.setattr(benchmarks, "usable_references", lambda references: references)  # seconds, for other tests
    found = load(*KNOWN, data=shared_data)
    sizes = {b.name: len(b.prompts) for b in found}
    assert sizes == {**{name: known.problems for name, known in KNOWN.items()}, "olympiadbench": 675}
    assert [sizes[name] for name in ("math500", "aime2024", "aime2025", "amc23", "minerva")] == [500, 30, 30, 40, 272]
    assert (sizes["humaneval+"], sizes["mbpp+"]) == (164, 378)
    (note,) = [note for b in found for note in b.notes]
    assert note.endswith("has 675 problems, the published benchmark 674; scores do not compare exactly")
    assert all({prompt.task for prompt in b.prompts} == {b.name} and b.kind == KNOWN[b.name].kind for b in found)
    first = found[0].prompts[0]
    assert first.id == "test/precalculus/807.json" and first.reference == r"\left( 3, \frac{\pi}{2} \right)"
    assert first.messages[-1]["content"].endswith(MATH_SUFFIX)


@pytest.mark.parametrize("name", MATH)
def test_the_hub_is_asked_with_the_fields_of_the_table(monkeypatch, name):
    known, asked = KNOWN[name], []

    def rows(source):
        asked.append(source)
        return iter([{source.id_field: 7, source.problem_field: "1+1?", source.answer_field: "2"}])

    monkeypatch.setattr(data, "_hub_rows", rows)
    (found,) = load(name)
    source = asked[0]
    assert (source.hub, source.subset, source.split) == (known.hub, known.subset, known.split)
    assert [(prompt.id, prompt.reference) for prompt in found.prompts] == [("7", "2")]
    assert f"the published benchmark {known.problems}" in found.notes[0]


PROGRAM = {
    "task_id": 3, "prompt": "Write a function to double a number.", "code": "def twice(x): return 2 * x",
    "test_imports": [], "test_list": ["assert twice(2) == 4"], "test": "assert twice(3) == 6",
}  # fmt: skip


def test_programming_benchmarks_are_graded_by_running_them(monkeypatch):
    asked, rows = [], [PROGRAM, {**PROGRAM, "task_id": 4, "test_list": [], "test": ""}]
    monkeypatch.setattr(data, "_hub_rows", lambda source: asked.append(source) or iter(rows))
    (found,) = load("mbpp+", template="Do: {problem}")
    assert (asked[0].hub, asked[0].split, found.kind) == ("evalplus/mbppplus", "test", "code")
    assert [prompt.id for prompt in found.prompts] == ["3", "4"] and found.unusable == ("4",)
    assert found.prompts[0].text.startswith("Do: Write a function to double a number.\nYour function must pass")
    code = ("def twice(x): return x + x", "def twice(x): return x")
    with VerificationPool(1, 20.0) as pool:
        grades = pool.grade(found.verifier, [(found.prompts[0], f"```python\n{text}\n```", "stop") for text in code])
    assert [grade.reward for grade in grades] == [1.0, 0.0]
    again = reopen("mbpp+", json.loads(json.dumps(found.record())), found.prompts)
    assert (again.prompts, again.verifier, again.unusable) == (found.prompts, found.verifier, ("4",))


def test_an_unreachable_hub_is_told_with_a_way_out(monkeypatch):
    def unreachable(source):
        raise DataError("hub:x: no network")

    monkeypatch.setattr(data, "_hub_rows", unreachable)
    with pytest.raises(DataError, match=r"hub:x: no network; --data FOLDER reads amc23\.jsonl or amc23\.parquet"):
        load("amc23")


def test_local_copies_may_have_the_hubs_fields(tmp_path, write_rows):
    write_rows("amc23.jsonl", [{"id": 3, "question": "1+1?", "answer": "2"}])
    write_rows("math500.jsonl", [{"unique_id": "test/a", "problem": "1+1?", "answer": "2"}])
    write_rows("gsm8k.jsonl", [{"question": "1+1?", "answer": "One and one.\n#### 1,002"}])
    rows = [{"id": 1, "question": "x^2=4?", "final_answer": ["$2$", "$-2$"]}]
    pl.DataFrame(rows).write_parquet(tmp_path / "olympiadbench.parquet")
    found = load("amc23", "math500", "gsm8k", "olympiadbench", data=tmp_path)
    assert [b.prompts[0].id for b in found] == ["3", "test/a", "gsm8k-1", "1"]
    assert [b.prompts[0].reference for b in found] == ["2", "2", "1,002", "$2$, $-2$"]
    assert all(b.unusable == () for b in found)


def test_own_files_with_own_fields_and_words(write_rows):
    path = write_rows("my set.jsonl", [{"nr": 1, "q": "1+1?", "a": 2}])
    fields = {"id_field": "nr", "problem_field": "q", "answer_field": "a"}
    (found,) = load(path, system="Be brief.", template="Q: {problem} {x}", **fields)
    assert (found.name, found.prompts[0].id, found.prompts[0].reference) == ("my-set", "1", "2")
    assert [message["content"] for message in found.prompts[0].messages] == ["Be brief.", "Q: 1+1? {x}"]
    assert found.verifier == MathVerifier(check_reference=True)


def test_an_own_benchmark_in_the_data_folder_goes_by_its_name(tmp_path, write_rows):
    write_rows("mine.jsonl", ROWS)
    (found,) = load("mine", data=tmp_path)
    assert (found.name, len(found.prompts)) == ("mine", 2)


def test_problems_with_useless_references_stay_and_are_named(write_rows):
    rows = [*ROWS, {"id": "c", "problem": "?", "answer": ""}, {"id": "d", "problem": "?", "answer": "t(0,4]"}]
    solution = {"id": "e", "problem": "?", "answer": r"We find \boxed{7"}  # a solution whose answer is cut off
    (found,) = load(write_rows("x.jsonl", [*rows, solution]))
    assert [prompt.id for prompt in found.prompts] == ["a", "b", "c", "d", "e"] and found.unusable == ("c", "d", "e")


def test_a_task_files_validation_prompts_are_a_benchmark(tmp_path, write_rows):
    rows = write_rows("rows.jsonl", [*ROWS, {"id": "c", "problem": "?", "answer": ""}])
    train = write_rows("train.jsonl", ROWS)
    tasks = {
        "math": {
            "train": {"path": str(train)},
            "validation": {"path": str(rows)},
            "require_box": False,
            "suffix": "Go.",
        },
        "function": {"train": {"path": str(train)}, "validation": {"path": str(rows)}, "verifier": "toy_task:verify"},
        "hidden_programs": {"validation_size": 24},
    }
    for kind, settings in tasks.items():
        (tmp_path / f"{kind}.yaml").write_text(yaml.safe_dump({"task": {"kind": kind, **settings}}))
    mathematics, function, programs = load(*(tmp_path / f"{kind}.yaml" for kind in tasks))
    assert [b.kind for b in (mathematics, function, programs)] == list(tasks)
    assert mathematics.verifier == MathVerifier(require_box=False, check_reference=True)
    assert mathematics.prompts[0].text == "1+1? Go." and mathematics.unusable == ("c",)
    assert (
        len(function.prompts) == 3 and function.unusable == ()
    )  # what a reference is worth is the verifier's business
    assert len(programs.prompts) == 24 and programs.in_process
    assert {prompt.task for prompt in programs.prompts} == {"hidden_programs"}


@pytest.mark.parametrize(
    ("names", "options", "error", "message"),
    [
        (["math50"], {}, ConfigError, "unknown benchmark 'math50'; did you mean 'math500'"),
        (["problems.csv"], {}, ConfigError, r"unknown benchmark 'problems.csv'.* or give a \.jsonl"),
        ([], {}, ConfigError, "no benchmark is named; known are math500"),
        (["none.jsonl"], {}, DataError, "none.jsonl: no such file"),
        (["empty.jsonl"], {}, DataError, "empty.jsonl: the data set is empty"),
        (["twice.jsonl"], {}, DataError, "the id 'a' occurs more than once"),
        (["rows.jsonl", "sub/rows.jsonl"], {}, ConfigError, "two benchmarks are called 'rows'"),
        (
            ["rows.jsonl"],
            {"answer_field": "gold"},
            DataError,
            "row 1: no field 'gold'; the row has: id, problem, answer",
        ),
        (["rows.jsonl"], {"template": "no place"}, ConfigError, "must contain {problem}"),
        (["math500"], {"data": Path("nowhere")}, DataError, "nowhere: no such folder"),
        (
            ["minerva"],
            {"data": Path("sub")},
            DataError,
            "no copy of minerva: none of minerva.jsonl, minerva_math.jsonl",
        ),
        (["empty.yaml"], {}, DataError, "has no validation prompts"),
        (["empty.yaml"], {"system": "s"}, ConfigError, "--system is for problem files"),
        (["none.yaml"], {}, ConfigError, "none.yaml: no such"),
    ],
)
def test_what_cannot_be_evaluated_is_one_clear_line(write_rows, tmp_path, monkeypatch, names, options, error, message):
    monkeypatch.chdir(tmp_path)
    write_rows("rows.jsonl", ROWS)
    write_rows("sub/rows.jsonl", ROWS)
    write_rows("empty.jsonl", [])
    write_rows("twice.jsonl", [ROWS[0], ROWS[0]])
    (tmp_path / "empty.yaml").write_text("task: {kind: math, train: {path: rows.jsonl}}")
    with pytest.raises(error, match=message) as caught:
        load(*names, **options)
    assert "\n" not in str(caught.value)


def test_a_record_reopens_mathematics_from_the_log_and_other_tasks_from_their_settings(tmp_path, write_rows):
    path = write_rows("rows.jsonl", ROWS)
    (found,) = load(path)
    record = json.loads(json.dumps(found.record()))
    assert record["problems"] == 2 and record["sha256"] != load(path, template="{problem}")[0].record()["sha256"]
    path.unlink()
    again = reopen("rows", record, found.prompts)
    assert (again.prompts, again.verifier, again.kind) == (found.prompts, found.verifier, "math")

    (tmp_path / "programs.yaml").write_text("task: {kind: hidden_programs, validation_size: 12}")
    (programs,) = load(tmp_path / "programs.yaml")
    record = json.loads(json.dumps(programs.record()))
    assert reopen("programs", record, ()).prompts == programs.prompts
    record["config"]["seed"] = 1
    with pytest.raises(DataError, match="its prompts are not those that were evaluated"):
        reopen("programs", record, ())

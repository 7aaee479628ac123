"""Responses are kept, drawn reproducibly, and never drawn twice."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from graftrl.errors import DataError, ModelError
from graftrl.evaluation import sampling
from graftrl.evaluation.benchmarks import BenchmarkOptions, find_benchmarks
from graftrl.evaluation.models import find_models
from graftrl.evaluation.sampling import Draws, Responses, grade_again, logged_prompts
from graftrl.logs.reader import RolloutLog
from graftrl.logs.validate import validate_log
from graftrl.seeds import derive_seed
from graftrl.tasks import VerificationPool

DRAWS = Draws(seed=3, samples=2, temperature=0.6, top_p=0.95, max_tokens=30)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(sampling, "CHUNK", 4)


@pytest.fixture(scope="module")
def pool():
    with VerificationPool(1, 20.0) as shared:
        yield shared


@pytest.fixture
def programs(tmp_path):
    (tmp_path / "programs.yaml").write_text("task: {kind: hidden_programs, validation_size: 12}")
    return find_benchmarks([str(tmp_path / "programs.yaml")], BenchmarkOptions())


@pytest.fixture
def numbers(write_rows):
    rows = [{"id": f"s{i}", "problem": f"{i}+1?", "answer": str(i + 1)} for i in range(6)]
    return find_benchmarks(
        [str(write_rows("one.jsonl", rows)), str(write_rows("two.jsonl", rows[:3]))], BenchmarkOptions()
    )


def nothing(done: int, wanted: int) -> None:
    pass


def frames(root: Path) -> pl.DataFrame:
    return pl.concat([pl.read_parquet(file) for file in sorted((root / "rollouts").glob("*/*/*.parquet"))])


def test_a_real_model_is_sampled_into_rollout_logs(tmp_path, warm, programs, pool):
    responses = Responses(tmp_path / "out", DRAWS, runs=2, limit=10)
    (subject,) = find_models([warm["A"]], {})
    seen: list[tuple[int, int]] = []
    responses.sample([subject], programs, pool, lambda *progress: seen.append(progress))
    assert seen == [(4, 20), (8, 20), (10, 20), (14, 20), (18, 20), (20, 20), (20, 20)]
    folder = tmp_path / "out" / "rollouts" / subject.name / "programs"
    assert list(validate_log(folder)) == []
    log = RolloutLog(folder)
    assert log.models == (subject.name,) and log.steps(subject.name) == [1, 2]
    assert log.sampling(subject.name) == {(0.6, 0.95, 0)}
    assert log.group_index(subject.name)["n"].to_list() == [2] * 20
    answers = responses.answers(subject.name, programs[0])
    rows = frames(tmp_path / "out")
    assert answers.right.sum() == rows["reward"].sum() > 0
    assert answers.tokens.sum() == rows["token_ids"].list.len().sum()
    first, second = (rows.filter(pl.col("step") == step)["text"] for step in (1, 2))
    assert first.to_list() != second.to_list()  # runs are independent draws


def test_an_interrupted_evaluation_goes_on_to_the_same_responses(tmp_path, warm, programs, pool, monkeypatch):
    subjects = find_models([warm["A"], warm["B"]], {})
    Responses(tmp_path / "whole", DRAWS, 1, None).sample(subjects, programs, pool, nothing)
    write, written = sampling.write_rollouts, []

    def killed(path: Path, **content: object) -> None:
        written.append(path.relative_to(tmp_path / "cut"))
        if len(written) == 5:
            raise KeyboardInterrupt
        write(path, **content)

    cut = Responses(tmp_path / "cut", DRAWS, 1, None)
    monkeypatch.setattr(sampling, "write_rollouts", killed)
    with pytest.raises(KeyboardInterrupt):
        cut.sample(subjects, programs, pool, nothing)
    assert len(list((tmp_path / "cut").rglob("*.parquet"))) == 4
    written[:] = ["later"] * 10
    cut.sample(subjects, programs, pool, nothing)
    assert len(set(written)) == 3  # the two chunks that lacked; nothing was done again
    assert frames(tmp_path / "cut").drop("run").equals(frames(tmp_path / "whole").drop("run"))


def test_models_take_turns_and_finished_ones_are_not_loaded(tmp_path, numbers, pool, speaker):
    a, b = find_models(["x/a", "x/b"], {})
    responses = Responses(tmp_path, DRAWS, 1, None)
    responses.sample([a], numbers, pool, nothing)
    assert speaker.loaded_names == ["a"]
    responses.sample([a, b], numbers, pool, nothing)  # the speaker refuses to be loaded beside another one
    assert speaker.loaded_names == ["a", "b"]
    Responses(tmp_path, DRAWS, 2, None).sample([a, b], numbers, pool, nothing)
    assert speaker.loaded_names == ["a", "b", "a", "b"]
    assert {call[0] for call in speaker.calls[-6:]} == {"a", "b"} and len(speaker.calls) == 12


def test_draws_are_a_function_of_seed_model_benchmark_run_and_chunk(tmp_path, numbers, pool, speaker):
    (a,) = find_models(["x/a"], {})
    Responses(tmp_path, DRAWS, 2, None).sample([a], numbers, pool, nothing)
    found = {call[3]: call[1] for call in speaker.calls}
    assert found == {
        derive_seed(3, "evaluation", "a", name, run, chunk): ids
        for run in (1, 2)
        for name, chunk, ids in (
            ("one", 0, ["s0", "s1", "s2", "s3"]),
            ("one", 1, ["s4", "s5"]),
            ("two", 0, ["s0", "s1", "s2"]),
        )
    }
    n, settings = speaker.calls[0][2], speaker.calls[0][4]
    assert n == 2 and (settings.temperature, settings.top_p, settings.max_response_tokens) == (0.6, 0.95, 30)


def test_a_cut_chunk_is_filled_up_when_more_problems_are_asked_for(tmp_path, numbers, pool, speaker):
    (a,) = find_models(["x/a"], {})
    Responses(tmp_path, DRAWS, 1, 3).sample([a], numbers[:1], pool, nothing)
    assert [call[1] for call in speaker.calls] == [["s0", "s1", "s2"]]
    Responses(tmp_path, DRAWS, 1, None).sample([a], numbers[:1], pool, nothing)
    assert [call[1] for call in speaker.calls[1:]] == [["s0", "s1", "s2", "s3"], ["s4", "s5"]]
    few = Responses(tmp_path, DRAWS, 1, 2)
    assert few.complete("a", numbers[0]) and few.answers("a", numbers[0]).problems == ("s0", "s1")


def test_a_problem_that_does_not_fit_is_told_before_anything_is_sampled(tmp_path, numbers, pool, speaker):
    subjects = find_models(["x/a", "x/b"], {})
    responses = Responses(tmp_path, DRAWS, 1, None)
    speaker.context = 40  # the problems have 13 words with their instruction
    with pytest.raises(ModelError, match=r"'a' has 40 positions, but problem 's0' of one takes 13 .* to 27 or less"):
        responses.check(subjects, numbers)
    speaker.context = 10
    with pytest.raises(ModelError, match=r"10 positions, but problem 's0' of one takes 13$"):
        responses.check(subjects, numbers)
    with pytest.raises(ModelError, match="no GGUF file"):
        responses.check(find_models(["nowhere/m.gguf"], {}), numbers)
    assert speaker.loaded_names == []


def test_grading_again_changes_rewards_and_nothing_else(tmp_path, numbers, pool, speaker):
    (a,) = find_models(["x/a"], {})
    responses = Responses(tmp_path, DRAWS, 1, None)
    speaker.say = staticmethod(lambda model, prompt, index: r"\boxed{1}" if index else "no box")
    responses.sample([a], numbers[:1], pool, nothing)
    files = responses.files("a", numbers[0])
    before = frames(tmp_path)
    assert [grade_again(file, numbers[0], pool) for file in files] == [0, 0]
    assert frames(tmp_path).equals(before)
    damaged = pl.read_parquet(files[0]).with_columns(reward=pl.lit(1.0))
    damaged.write_parquet(files[0], metadata={"graftrl": json.dumps({"schema_version": 1})})
    assert grade_again(files[0], numbers[0], pool) == 7  # of eight responses only s0's boxed 1 is right
    assert frames(tmp_path).equals(before)
    assert logged_prompts(files) == list(numbers[0].prompts)
    with pytest.raises(DataError, match="two has no problem 's3'"):
        grade_again(files[0], numbers[1], pool)


def test_numbers_of_answers_do_not_depend_on_the_chunks(tmp_path, numbers, pool, speaker, monkeypatch):
    (a,) = find_models(["x/a"], {})
    speaker.say = staticmethod(lambda model, prompt, index: r"\boxed{3}" + " w" * index + ("..." if index else ""))
    found = []
    for size in (1, 4, 100):
        monkeypatch.setattr(sampling, "CHUNK", size)
        responses = Responses(tmp_path / str(size), DRAWS, 1, None)
        responses.sample([a], numbers[:1], pool, nothing)
        answers = responses.answers("a", numbers[0])
        found.append([answers.right.tolist(), answers.tokens.tolist(), answers.cut.tolist()])
    assert found[0] == found[1] == found[2]
    assert found[0][0] == [[0, 0, 2, 0, 0, 0]] and np.array(found[0][2]).sum() == 6

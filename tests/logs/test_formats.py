from __future__ import annotations

import json

import polars as pl
import pytest

from graftrl.errors import DataError
from graftrl.logs.formats import read_trl, read_verl


def write_verl(path, *lines: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def line(**fields) -> dict:
    return {"input": "user\nhi\nassistant\n", "output": "yo", "gts": "42", "score": 1.0, "step": 3, **fields}


class TestVerl:
    def test_fields(self, tmp_path):
        write_verl(tmp_path / "3.jsonl", line(acc=True))
        (response,) = read_verl(tmp_path, None, [])
        assert (response.step, response.text, response.reference, response.reward) == (3, "yo", "42", 1.0)
        assert response.messages == ({"role": "user", "content": "user\nhi\nassistant\n"},)
        assert response.plain and response.rendered
        assert response.where == f"{tmp_path / '3.jsonl'}, line 1"

    def test_files_come_in_the_order_of_their_numbers(self, tmp_path):
        for step in (10, 2, 1):
            write_verl(tmp_path / f"{step}.jsonl", line(step=step))
        assert [response.step for response in read_verl(tmp_path, None, [])] == [1, 2, 10]

    def test_step_from_the_file_name_and_gts_missing_as_in_older_versions(self, tmp_path):
        old = line()
        del old["step"], old["gts"]
        write_verl(tmp_path / "17.jsonl", old)
        (response,) = read_verl(tmp_path / "17.jsonl", None, [])
        assert (response.step, response.reference) == (17, None)

    def test_references_that_are_no_text_are_kept_as_json(self, tmp_path):
        write_verl(tmp_path / "3.jsonl", line(gts=["1", "2"]), line(gts=4))
        assert [response.reference for response in read_verl(tmp_path, None, [])] == ['["1", "2"]', "4"]

    def test_another_field_as_reward(self, tmp_path):
        write_verl(tmp_path / "3.jsonl", line(score=-1.0, acc=True))
        assert [response.reward for response in read_verl(tmp_path, "acc", [])] == [1.0]

    def test_nan_is_no_reward(self, tmp_path):
        write_verl(tmp_path / "3.jsonl", line(score=float("nan")), line(score=None))
        assert [response.reward for response in read_verl(tmp_path, None, [])] == [None, None]

    @pytest.mark.parametrize(
        ("fields", "fault"),
        [
            ({"output": None}, "field 'output' is missing"),
            ({"input": 3}, "field 'input' is no text"),
            ({"score": "good"}, "field 'score' is 'good', not a number"),
            ({"step": "three"}, "field 'step' is 'three', not a step number"),
            ({"step": -1}, "field 'step' is -1"),
        ],
    )
    def test_faults_are_named_with_their_line(self, tmp_path, fields, fault):
        write_verl(tmp_path / "3.jsonl", line(), line(**fields))
        with pytest.raises(DataError, match=rf"3\.jsonl, line 2: {fault}"):
            list(read_verl(tmp_path, None, []))

    def test_missing_reward_field_lists_what_there_is(self, tmp_path):
        write_verl(tmp_path / "3.jsonl", line())
        with pytest.raises(DataError, match="no field 'acc'; it has: input, output, gts, score, step"):
            list(read_verl(tmp_path, "acc", []))

    def test_torn_last_line(self, tmp_path):
        write_verl(tmp_path / "3.jsonl", line(), line())
        file = tmp_path / "3.jsonl"
        file.write_text(file.read_text()[:-10])
        with pytest.raises(DataError, match=r"3\.jsonl, line 2: not readable as JSON"):
            list(read_verl(tmp_path, None, []))

    def test_nothing_there(self, tmp_path):
        with pytest.raises(DataError, match=r"holds no \.jsonl file"):
            list(read_verl(tmp_path, None, []))


def chat(text: str, role: str = "assistant") -> list[dict]:
    return [{"role": role, "content": text}]


def write_trl(folder, step: int, rows: dict) -> None:
    n = len(rows["prompt"])
    folder.mkdir(exist_ok=True)
    columns = {"step": [step] * n, **rows, "advantage": [0.0] * n}
    pl.DataFrame(columns).write_parquet(folder / f"completions_{step:05d}.parquet")


class TestTRL:
    def test_texts(self, tmp_path):
        write_trl(tmp_path, 1, {"prompt": ["p"], "completion": ["c"], "accuracy": [1.0]})
        (response,) = read_trl(tmp_path, None, [])
        assert (response.step, response.text, response.reward, response.reference) == (1, "c", 1.0, None)
        assert response.messages == ({"role": "user", "content": "p"},)
        assert response.plain and not response.rendered

    def test_chat_messages(self, tmp_path):
        prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]
        write_trl(tmp_path, 1, {"prompt": [prompt], "completion": [chat("c")], "accuracy": [0.0]})
        (response,) = read_trl(tmp_path, None, [])
        assert (response.messages, response.text, response.plain) == (tuple(prompt), "c", False)

    def test_text_blocks_are_joined(self, tmp_path):
        blocks = [{"role": "assistant", "content": [{"type": "text", "text": t} for t in ("a", "b")]}]
        write_trl(tmp_path, 1, {"prompt": ["p"], "completion": [blocks], "accuracy": [0.0]})
        assert next(iter(read_trl(tmp_path, None, []))).text == "ab"

    def test_a_batch_that_serves_several_steps_is_read_once(self, tmp_path):
        for step, text in ((1, "a"), (2, "a"), (3, "b"), (4, "a")):
            write_trl(tmp_path, step, {"prompt": ["p"] * 2, "completion": [text, "x"], "accuracy": [0.0] * 2})
        notes: list[str] = []
        assert [response.step for response in read_trl(tmp_path, None, notes)] == [1, 1, 3, 3, 4, 4]
        assert notes == ["1 files repeat the generation batch of the file before and were left out"]

    def test_reward_must_be_chosen_among_several(self, tmp_path):
        rows = {"prompt": ["p"], "completion": ["c"], "accuracy": [1.0], "format": [0.5], "extra": ["x"]}
        write_trl(tmp_path, 1, rows)
        with pytest.raises(DataError, match="Choose it with --reward; columns of numbers: accuracy, format"):
            list(read_trl(tmp_path, None, []))
        assert next(iter(read_trl(tmp_path, "format", []))).reward == 0.5

    def test_unscored_completions_have_no_reward(self, tmp_path):
        write_trl(tmp_path, 1, {"prompt": ["p"], "completion": ["c"], "accuracy": [float("nan")]})
        assert next(iter(read_trl(tmp_path, None, []))).reward is None

    @pytest.mark.parametrize(
        ("completion", "fault"),
        [
            ([chat("a")[0], chat("b", "tool")[0]], "not one assistant message"),
            (
                [{"role": "assistant", "content": "a", "tool_calls": [{"name": "f"}]}],
                "'tool_calls' besides its content",
            ),
            ([{"role": "assistant", "content": "a", "thinking": "hm"}], "'thinking' besides its content"),
            ([{"role": "assistant", "content": [{"type": "image", "text": None}]}], "holds 'image'"),
        ],
    )
    def test_what_is_no_single_text_is_refused(self, tmp_path, completion, fault):
        write_trl(tmp_path, 1, {"prompt": ["p"], "completion": [completion], "accuracy": [0.0]})
        with pytest.raises(DataError, match=rf"completions_00001\.parquet, row 1: .*{fault}"):
            list(read_trl(tmp_path, None, []))

    def test_a_prompt_needs_a_question(self, tmp_path):
        write_trl(tmp_path, 1, {"prompt": [chat("hm")], "completion": ["c"], "accuracy": [0.0]})
        with pytest.raises(DataError, match="row 1: the prompt asks nothing"):
            list(read_trl(tmp_path, None, []))

    def test_torn_file_and_missing_column(self, tmp_path):
        write_trl(tmp_path, 1, {"prompt": ["p"], "accuracy": [0.0]})
        file = tmp_path / "completions_00001.parquet"
        with pytest.raises(DataError, match="no column 'completion'; it has: step, prompt, accuracy, advantage"):
            list(read_trl(tmp_path, None, []))
        file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(DataError, match=r"completions_00001\.parquet: not readable as Parquet"):
            list(read_trl(tmp_path, None, []))

from __future__ import annotations

import json
import statistics
from pathlib import Path

import polars as pl
import pytest

from graftrl.errors import DataError, RunError
from graftrl.logs import importing
from graftrl.logs.formats import Foreign
from graftrl.logs.importing import ImportSettings, import_log
from graftrl.logs.matching import TaskPrompts, text_id
from graftrl.logs.reader import RolloutLog
from graftrl.policies.config import ModelSettings
from graftrl.policies.loading import load_skeleton
from graftrl.tasks.config import DataSource, MathConfig

SETTINGS = ImportSettings(model="A", run="old", sampling=(1.0, 1.0, 0))


def foreign(prompt: str, text: str, reward: float | None = 1.0, step: int = 1, **fields) -> Foreign:
    messages = ({"role": "user", "content": prompt},)
    given = {"where": "x.jsonl, line 7", "reference": "42", "plain": True, "rendered": False, **fields}
    return Foreign(step=step, messages=messages, text=text, reward=reward, **given)


def imported(out: Path, *responses: Foreign, settings: ImportSettings = SETTINGS, **arguments):
    report = import_log(responses, out, settings, **arguments)
    return report, pl.read_parquet(out / "*.parquet")


@pytest.fixture(scope="module")
def codec(pair):
    return load_skeleton("A", ModelSettings(path=pair["A"]))[1]


class TestGroups:
    def test_equal_prompts_of_a_step_are_a_group_wherever_they_stand(self, tmp_path):
        report, _ = imported(
            tmp_path / "log",
            foreign("p", "1", 1.0), foreign("q", "2", 0.0), foreign("p", "3", 0.0),
            foreign("p", "4", 1.0, step=2), foreign("q", "5", 1.0), foreign("p", "6", 0.0, step=2),
        )  # fmt: skip
        assert (report.responses, report.groups, report.steps) == (6, 3, 2)
        p, q = (text_id([{"role": "user", "content": text}]) for text in "pq")
        log = RolloutLog(tmp_path / "log")
        assert log.group_index("A").rows() == [(1, p, 2, 1), (1, q, 2, 1), (2, p, 2, 1)]
        frame = pl.read_parquet(tmp_path / "log" / "step-000001.parquet").filter(prompt_id=p)
        assert frame.select("response_index", "text").rows() == [(0, "1"), (1, "3")]

    def test_advantages_are_group_relative(self, tmp_path):
        rewards = [1.0, 0.0, 0.0]
        _, frame = imported(tmp_path / "log", *(foreign("p", "x", reward) for reward in rewards))
        mean, std = statistics.mean(rewards), statistics.stdev(rewards)
        assert frame["advantage"].to_list() == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards])

    def test_no_advantage_where_a_reward_is_missing_or_alone(self, tmp_path):
        report, frame = imported(
            tmp_path / "log", foreign("p", "x"), foreign("p", "y", None), foreign("q", "z"), foreign("r", "x"),
            foreign("r", "y"),
        )  # fmt: skip
        assert frame["advantage"].to_list() == [None, None, None, 0.0, 0.0]
        assert report.counts["ungraded"] == 1 and report.counts["single"] == 1

    def test_result_is_the_same_however_often_text_goes_to_disk(self, tmp_path, monkeypatch):
        responses = [foreign(f"p{i % 3}", str(i), float(i % 2), step=1 + i % 2) for i in range(30)]
        _, whole = imported(tmp_path / "a", *responses)
        monkeypatch.setattr(importing, "_SPILL_CHARACTERS", 5)
        _, spilled = imported(tmp_path / "b", *responses)
        assert whole.equals(spilled)
        assert {file.name for file in (tmp_path / "b").iterdir()} == {"step-000001.parquet", "step-000002.parquet"}


class TestColumns:
    def test_nothing_is_guessed(self, tmp_path):
        settings = ImportSettings(model="A", run="old", sampling=(0.7, None, None))
        _, frame = imported(tmp_path / "log", foreign("p", "x"), settings=settings)
        row = frame.row(0, named=True)
        assert (row["temperature"], row["top_p"], row["top_k"]) == (0.7, None, None)
        assert row["finish_reason"] is row["token_ids"] is row["logprobs"] is row["tokenizer_fingerprint"] is None
        assert (row["run"], row["model"], row["step"], row["policy_version"]) == ("old", "A", 1, 0)
        assert (row["task"], row["reference"], row["grade_reason"]) == ("imported", "42", "imported reward 1.0")

    def test_threshold_makes_rewards_0_or_1(self, tmp_path):
        settings = ImportSettings(model="A", run="old", sampling=(1.0, 1.0, 0), success_above=0.0)
        rewards = [-1.0, 0.0, 0.3, 5.0, None]
        _, frame = imported(tmp_path / "log", *(foreign("p", "x", r) for r in rewards), settings=settings)
        assert frame["reward"].to_list() == [0.0, 0.0, 1.0, 1.0, None]
        assert frame["grade_reason"][3] == "imported reward 5.0"

    def test_rewards_outside_0_to_1_need_a_threshold(self, tmp_path):
        with pytest.raises(DataError, match=r"x\.jsonl, line 7: the reward -1 is not in \[0, 1\]; --success-above"):
            imported(tmp_path / "log", foreign("p", "x", -1.0))

    def test_partial_rewards_are_kept(self, tmp_path):
        _, frame = imported(tmp_path / "log", foreign("p", "x", 0.25))
        assert frame["reward"].to_list() == [0.25]


class TestTokens:
    def test_finished_responses_end_with_eos(self, tmp_path, codec):
        settings = ImportSettings(model="A", run="old", sampling=(1.0, 1.0, 0), assume_finished=True)
        report, frame = imported(tmp_path / "log", foreign("p", "A:6,2"), settings=settings, codec=codec)
        expected = [*codec.tokenizer.encode("A:6,2", add_special_tokens=False), codec.tokenizer.eos_token_id]
        assert frame["token_ids"].to_list() == [expected]
        assert frame["finish_reason"].to_list() == ["stop"]
        assert frame["tokenizer_fingerprint"].to_list() == [codec.fingerprint]
        assert report.counts["unknown finish"] == 0

    def test_responses_as_long_as_the_limit_were_cut(self, tmp_path, codec):
        texts = ["A:6,2", "A:6,2;", "A:6"]  # 4, 5 and 3 tokens
        settings = ImportSettings(model="A", run="old", sampling=(1.0, 1.0, 0), max_response_tokens=4)
        _, frame = imported(tmp_path / "log", *(foreign("p", t) for t in texts), settings=settings, codec=codec)
        assert frame["finish_reason"].to_list() == ["length", "length", "stop"]
        eos = codec.tokenizer.eos_token_id
        assert [ids[-1] == eos for ids in frame["token_ids"].to_list()] == [False, False, True]
        assert [len(ids) for ids in frame["token_ids"].to_list()] == [4, 5, 4]

    def test_lengths_just_below_the_limit_are_reported(self, tmp_path, codec):
        settings = ImportSettings(model="A", run="old", sampling=(1.0, 1.0, 0), max_response_tokens=50)
        texts = ["1" * 49, "1" * 48, "1" * 50]
        report, _ = imported(tmp_path / "log", *(foreign("p", t) for t in texts), settings=settings, codec=codec)
        assert report.counts["near limit"] == 1
        assert any("2 % shorter than the limit" in note for note in report.notes())

    def test_text_that_does_not_survive_encoding_gets_no_ids_and_is_counted(self, tmp_path, codec):
        settings = ImportSettings(model="A", run="old", sampling=(1.0, 1.0, 0), assume_finished=True)
        report, frame = imported(
            tmp_path / "log", foreign("p", "A:1"), foreign("p", "é"), settings=settings, codec=codec
        )
        assert frame["token_ids"].is_null().to_list() == [False, True]
        assert "1 responses have no token ids: changed by round trip" in report.notes()

    def test_a_limit_needs_a_tokenizer(self, tmp_path):
        settings = ImportSettings(model="A", run="old", sampling=(1.0, 1.0, 0), max_response_tokens=4)
        with pytest.raises(DataError, match="needs --tokenizer"):
            imported(tmp_path / "log", foreign("p", "x"), settings=settings)

    def test_unknown_finish_reasons_are_reported(self, tmp_path):
        report, _ = imported(tmp_path / "log", foreign("p", "x"))
        assert any("1 responses: whether they ended by themselves is unknown" in note for note in report.notes())


class TestTask:
    @pytest.fixture
    def task(self, tmp_path) -> TaskPrompts:
        path = tmp_path / "train.jsonl"
        rows = [{"id": f"id-{i}", "problem": f"{i}+1?", "answer": str(i + 1)} for i in range(3)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return TaskPrompts(MathConfig(train=DataSource(path=path), suffix="Go:"))

    def test_ids_references_and_task_are_the_recipes(self, tmp_path, task):
        _, frame = imported(tmp_path / "log", foreign("2+1? Go:", "3", reference="three"), task=task)
        row = frame.row(0, named=True)
        assert (row["prompt_id"], row["reference"], row["task"]) == ("id-2", "3", "math")

    def test_rendered_prompts_in_the_recipes_words_become_messages_again(self, tmp_path, task):
        rendered = foreign("user\n2+1? Go:\nassistant\n", "3", rendered=True)
        report, frame = imported(tmp_path / "log", rendered, task=task)
        assert frame["messages"].to_list() == [[{"role": "user", "content": "2+1? Go:"}]]
        assert not {"unlike", "rendered", "plain"} & {name for name, count in report.counts.items() if count}

    def test_rendered_prompts_in_other_words_stay_and_are_reported(self, tmp_path, task):
        report, frame = imported(tmp_path / "log", foreign("user\n2+1?\n", "3", rendered=True), task=task)
        assert frame["messages"].to_list() == [[{"role": "user", "content": "user\n2+1?\n"}]]
        assert frame["prompt_id"].to_list() == ["id-2"] and report.counts["unlike"] == 1

    def test_a_template_that_gives_another_prompt_is_reported(self, tmp_path, codec):
        path = tmp_path / "train.jsonl"
        path.write_text('{"problem": "c1,2>", "answer": "1"}\n{"problem": "c3,4>", "answer": "1"}\n')
        task = TaskPrompts(MathConfig(train=DataSource(path=path), suffix=""))
        same = foreign("c1,2>", "3", rendered=True)  # the laboratory's template adds nothing to the message
        other = foreign("d;c3,4>", "2", rendered=True)
        report, _ = imported(tmp_path / "log", same, same, other, task=task, codec=codec)
        assert report.counts["other rendering"] == 1

    def test_without_a_task_rendered_and_plain_prompts_are_reported(self, tmp_path):
        chat = foreign("r", "x", plain=False)
        report, _ = imported(tmp_path / "log", foreign("p", "x"), foreign("q", "x", rendered=True), chat)
        assert (report.counts["plain"], report.counts["rendered"]) == (1, 1)

    def test_a_given_beginning_of_the_answer_is_no_part_of_the_problem(self, tmp_path, task):
        messages = ({"role": "user", "content": "2+1?"}, {"role": "assistant", "content": "0+1? no,"})
        given = Foreign("x", 1, messages, "3", None, 1.0, plain=False, rendered=False)
        _, frame = imported(tmp_path / "log", given, task=task)
        assert frame["prompt_id"].to_list() == ["id-2"]
        assert frame["messages"].to_list() == [list(messages)]

    def test_prompts_that_the_task_does_not_have(self, tmp_path, task):
        responses = [foreign("2+1?", "3"), foreign("9+9?", "18")]
        with pytest.raises(
            DataError, match=r"line 7: the prompt '9\+9\?'... is none of the task's .* --drop-unmatched"
        ):
            imported(tmp_path / "log", *responses, task=task)
        assert not (tmp_path / "log").exists()
        settings = ImportSettings(model="A", run="old", sampling=(1.0, 1.0, 0), drop_unmatched=True)
        report, frame = imported(tmp_path / "log", *responses, settings=settings, task=task)
        assert frame["prompt_id"].to_list() == ["id-2"] and report.counts["unmatched"] == 1

    def test_one_id_in_two_wordings_is_refused(self, tmp_path, task):
        with pytest.raises(DataError, match="step 1 asks prompt 'id-2' in two different wordings"):
            imported(tmp_path / "log", foreign("2+1?", "3"), foreign("Say 2+1?", "3"), task=task)

    def test_no_match_at_all(self, tmp_path, task):
        settings = ImportSettings(model="A", run="old", sampling=(1.0, 1.0, 0), drop_unmatched=True)
        with pytest.raises(DataError, match="no prompt of the log is one of the task's training prompts"):
            imported(tmp_path / "log", foreign("9+9?", "18"), settings=settings, task=task)


class TestOut:
    def test_an_existing_folder_is_left_alone(self, tmp_path):
        (tmp_path / "log").mkdir()
        (tmp_path / "log" / "mine").write_text("x")
        with pytest.raises(DataError, match="log: exists already"):
            imported(tmp_path / "log", foreign("p", "x"))
        assert (tmp_path / "log" / "mine").read_text() == "x"

    def test_a_failure_leaves_nothing(self, tmp_path):
        with pytest.raises(DataError, match="-5 is not in"):
            imported(tmp_path / "log", foreign("p", "x"), foreign("p", "x", -5.0, step=2))
        assert list(tmp_path.iterdir()) == []

    def test_what_a_killed_import_left_is_no_obstacle(self, tmp_path):
        (tmp_path / ".log.tmp" / ".parts").mkdir(parents=True)
        (tmp_path / ".log.tmp" / ".parts" / "1-0.parquet").write_bytes(b"PAR1")
        _, frame = imported(tmp_path / "log", foreign("p", "x"))
        assert frame.height == 1 and not (tmp_path / ".log.tmp").exists()

    def test_empty_source(self, tmp_path):
        with pytest.raises(DataError, match="old: holds no response"):
            imported(tmp_path / "log")

    def test_a_folder_that_cannot_be_written_is_one_clear_error(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(RunError, match="log: cannot be written"):
            imported(tmp_path / "file" / "log", foreign("p", "x"))

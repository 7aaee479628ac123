from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from graftrl.errors import DataError
from graftrl.logs.reader import RolloutLog
from graftrl.policies.config import SamplingSettings


class TestCatalog:
    def test_models_steps_sampling_and_tokenizers(self, log):
        opened = RolloutLog(log)
        assert opened.models == ("A", "B")
        assert opened.steps("A") == [1, 2, 3]
        assert opened.sampling("B") == {(1.0, 1.0, 0)}
        assert opened.fingerprints("B") == {"tokenizer-of-B"}

    def test_run_folder_parquet_folder_and_single_file_are_logs(self, log):
        folder = log / "rollouts"
        assert RolloutLog(log).files == RolloutLog(folder).files == sorted(folder.glob("*.parquet"))
        assert RolloutLog(folder / "step-000002.parquet").steps("A") == [2]

    def test_several_logs_read_as_one(self, write_log):
        first = write_log("one", {1: {"A": {"p": (1, 0)}}})
        second = write_log("two", {2: {"A": {"p": (1, 1)}}}, SamplingSettings(temperature=0.5))
        opened = RolloutLog([first, second])
        assert opened.steps("A") == [1, 2]
        assert opened.sampling("A") == {(1.0, 1.0, 0), (0.5, 1.0, 0)}

    def test_group_index_counts_successes_in_step_order(self, log):
        assert RolloutLog(log).group_index("A").rows() == [
            (1, "p1", 4, 2),
            (1, "p2", 4, 0),
            (2, "p3", 4, 0),
            (2, "p4", 4, 0),
            (3, "p1", 4, 4),
            (3, "p2", 4, 0),
        ]

    def test_only_reward_1_is_a_success(self, write_log):
        log = write_log("run", {1: {"A": {"p": (0.9, 1.0, 0.0)}}})
        assert RolloutLog(log).group_index("A").rows() == [(1, "p", 3, 1)]

    def test_a_group_over_two_files_counts_as_one(self, log):
        file = log / "rollouts" / "step-000001.parquet"
        frame = pl.read_parquet(file)
        for name, part in (("1a", frame.filter(pl.col("response_index") < 1)), ("1b", frame)):
            part = part if name == "1a" else part.filter(pl.col("response_index") >= 1)
            part.write_parquet(file.with_name(f"{name}.parquet"), metadata={"graftrl": '{"schema_version": 1}'})
        file.unlink()
        opened = RolloutLog(log)
        assert opened.group_index("A").row(0) == (1, "p1", 4, 2)
        assert [r.text for r in opened.groups("A", [(1, "p1")])[1, "p1"].responses] == ["Ap10", "Ap11", "Ap12", "Ap13"]

    def test_a_log_without_the_model_says_which_it_has(self, log):
        with pytest.raises(DataError, match="no responses of a model 'C'; the log has: A, B"):
            RolloutLog(log).steps("C")


class TestGroups:
    def test_group_is_what_was_written(self, log):
        group = RolloutLog(log).groups("B", [(3, "p2")])[3, "p2"]
        assert (group.model, group.prompt.id, group.prompt.reference, group.prompt.task) == ("B", "p2", "42", "test")
        assert group.prompt.messages == ({"role": "user", "content": "problem p2"},)
        assert group.rewards.tolist() == [1, 0, 0, 1]
        third = group.responses[2]
        assert (third.text, third.finish_reason, third.grade_reason) == ("Bp22", "stop", "wrong")
        assert third.token_ids.tolist() == [*map(ord, "Bp22"), 0] and third.token_ids.dtype == np.int64
        assert third.logprobs.tolist() == pytest.approx([-1, -1 / 2, -1 / 3, -1 / 4, -1 / 5])
        assert third.logprobs.dtype == np.float32

    def test_the_same_prompt_in_two_steps_is_two_groups(self, log):
        groups = RolloutLog(log).groups("A", [(3, "p1"), (1, "p1")])
        assert list(groups) == [(3, "p1"), (1, "p1")]
        assert [group.successes for group in groups.values()] == [4, 2]

    def test_pairs_of_step_and_prompt_are_not_mixed(self, log):
        assert list(RolloutLog(log).groups("A", [(1, "p1"), (3, "p2")])) == [(1, "p1"), (3, "p2")]

    def test_no_keys_no_groups(self, log):
        assert RolloutLog(log).groups("A", []) == {}

    def test_responses_come_in_the_order_of_their_index(self, log, edit_file):
        edit_file(log / "rollouts" / "step-000002.parquet", pl.all().reverse())
        group = RolloutLog(log).groups("A", [(2, "p3")])[2, "p3"]
        assert [response.text for response in group.responses] == ["Ap30", "Ap31", "Ap32", "Ap33"]

    def test_only_the_file_of_the_step_is_read(self, log):
        opened = RolloutLog(log)
        for step in (1, 3):
            (log / "rollouts" / f"step-00000{step}.parquet").unlink()
        assert opened.groups("B", [(2, "p3")])[2, "p3"].successes == 2

    def test_unknown_group_is_named(self, log):
        with pytest.raises(DataError, match="no group of 'A' on prompt 'p9' in step 2"):
            RolloutLog(log).groups("A", [(2, "p3"), (2, "p9")])

    def test_responses_without_logprobs_say_what_adds_them(self, log, edit_file):
        file = log / "rollouts" / "step-000001.parquet"
        edit_file(file, pl.lit(None, pl.List(pl.Float32)).alias("logprobs"))
        opened = RolloutLog(log)
        assert opened.group_index("A").height == 6  # the counts need none
        with pytest.raises(DataError, match=r"step-000001\.parquet, row 1: .* no log-probabilities; `graftrl logs sc"):
            opened.groups("A", [(1, "p1")])

    def test_a_row_index_seen_twice_is_refused(self, log):
        twice = log / "rollouts" / "copy.parquet"
        twice.write_bytes((log / "rollouts" / "step-000001.parquet").read_bytes())
        with pytest.raises(DataError, match="'A', step 1, prompt 'p1': response_index 0 occurs twice"):
            RolloutLog(log).groups("A", [(1, "p1")])

    def test_groups_of_several_steps_are_read_at_once_whatever_other_columns_their_files_have(self, log, edit_file):
        keys = [(3, "p2"), (1, "p1"), (2, "p3")]
        expected = RolloutLog(log).groups("A", keys)
        edit_file(log / "rollouts" / "step-000002.parquet", pl.lit("x").alias("comment"))
        found = RolloutLog(log).groups("A", keys)
        assert list(found) == keys
        for key in keys:
            for one, other in zip(found[key].responses, expected[key].responses, strict=True):
                assert one.text == other.text and one.reward == other.reward
                assert one.token_ids.tolist() == other.token_ids.tolist()
                assert one.logprobs.tolist() == other.logprobs.tolist()

    def test_a_file_torn_after_opening_is_named_among_several(self, log):
        opened = RolloutLog(log)
        file = log / "rollouts" / "step-000002.parquet"
        file.write_bytes(file.read_bytes()[:200])
        with pytest.raises(DataError, match=r"step-000002\.parquet: torn or not a Parquet file"):
            opened.groups("A", [(1, "p1"), (2, "p3")])

    def test_a_faulty_row_is_named_and_other_groups_stay_readable(self, log, edit_file):
        cut = pl.col("logprobs").list.head(2)
        torn = pl.when((pl.col("prompt_id") == "p1") & (pl.col("response_index") == 3)).then(cut)
        edit_file(log / "rollouts" / "step-000003.parquet", torn.otherwise("logprobs").alias("logprobs"))
        opened = RolloutLog(log)
        with pytest.raises(DataError, match=r"step-000003.parquet, row 4: .* 5 token ids but 2 log-prob"):
            opened.groups("A", [(3, "p1")])
        assert opened.groups("A", [(3, "p2")])[3, "p2"].size == 4

    def test_columns_of_the_user_are_ignored_whichever_file_has_them(self, log, edit_file):
        for step in (1, 3):
            edit_file(log / "rollouts" / f"step-00000{step}.parquet", pl.lit("easy").alias("difficulty"))
        assert RolloutLog(log).group_index("A").height == 6
        edit_file(log / "rollouts" / "step-000002.parquet", pl.lit(1).alias("other"))
        assert RolloutLog(log).groups("A", [(2, "p3")])[2, "p3"].size == 4


class TestRefusals:
    def test_missing_path(self, tmp_path):
        with pytest.raises(DataError, match="nowhere: no such file or folder"):
            RolloutLog(tmp_path / "nowhere")

    def test_folder_without_parquet_files(self, tmp_path):
        (tmp_path / "rollouts").mkdir()
        with pytest.raises(DataError, match="rollouts: no Parquet file; a log is a run folder"):
            RolloutLog(tmp_path)

    def test_log_without_rows(self, write_log):
        with pytest.raises(DataError, match="the log is empty"):
            RolloutLog(write_log("run", {1: {"A": {}}}))

    def test_a_step_without_groups_is_no_fault(self, write_log):
        assert RolloutLog(write_log("run", {1: {"A": {}}, 2: {"A": {"p": (1, 0)}}})).steps("A") == [2]

    @pytest.mark.parametrize("kept", [0, 3, 100, -1])
    def test_torn_file_is_named(self, log, kept):
        file = log / "rollouts" / "step-000002.parquet"
        file.write_bytes(file.read_bytes()[:kept])
        with pytest.raises(DataError, match=r"step-000002\.parquet: torn or not a Parquet file"):
            RolloutLog(log)

    def test_half_written_temporary_files_are_no_part_of_a_log(self, log):
        (log / "rollouts" / ".step-000004.parquet.tmp").write_bytes(b"PAR1")
        assert RolloutLog(log).steps("A") == [1, 2, 3]

    def test_unknown_schema_version(self, log, edit_file):
        edit_file(log / "rollouts" / "step-000002.parquet", metadata='{"schema_version": 7}')
        with pytest.raises(DataError, match=r"step-000002\.parquet: has schema version 7, but .* reads 1"):
            RolloutLog(log)

    @pytest.mark.parametrize(("metadata", "fault"), [(None, "is missing"), ("{", "not readable"), ("[]", "not read")])
    def test_file_without_usable_metadata(self, log, edit_file, metadata, fault):
        edit_file(log / "rollouts" / "step-000001.parquet", metadata=metadata)
        with pytest.raises(DataError, match=rf"step-000001\.parquet: .*{fault}"):
            RolloutLog(log)

    def test_missing_column_and_wrong_type_are_named(self, log, edit_file, tmp_path):
        file = log / "rollouts" / "step-000001.parquet"
        edit_file(file, pl.col("step").cast(pl.String))
        with pytest.raises(DataError, match="column 'step' is of type String, not Int32"):
            RolloutLog(file)
        pl.read_parquet(file).drop("reward").write_parquet(file, metadata={"graftrl": '{"schema_version": 1}'})
        with pytest.raises(DataError, match="column 'reward' missing"):
            RolloutLog(file)

    def test_group_index_without_rewards_is_refused(self, log, edit_file):
        edit_file(log / "rollouts" / "step-000001.parquet", pl.lit(None, pl.Float64).alias("reward"))
        with pytest.raises(DataError, match="'A' has responses without a reward"):
            RolloutLog(log).group_index("A")


def test_corrupt_pages_are_named(log):
    file = log / "rollouts" / "step-000001.parquet"
    content = bytearray(file.read_bytes())
    content[4:100] = bytes(96)  # footer whole, pages blank
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"step-000001\.parquet: torn"):
        RolloutLog(Path(log)).groups("A", [(1, "p1")])

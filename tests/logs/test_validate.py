from __future__ import annotations

import polars as pl
import pytest

from graftrl.errors import DataError
from graftrl.logs import validate
from graftrl.logs.validate import validate_log


@pytest.fixture
def file(log):
    return log / "rollouts" / "step-000001.parquet"


def problems(path) -> list[str]:
    return [str(problem).removeprefix(f"{path}/rollouts/") for problem in validate_log(path)]


def at(row: int, column: str, value: pl.Expr | object) -> pl.Expr:
    """The column with a new value in one row, counted from 1."""
    new = value if isinstance(value, pl.Expr) else pl.lit(value)
    return pl.when(pl.int_range(pl.len()) == row - 1).then(new).otherwise(column).alias(column)


def test_what_a_run_writes_has_no_problem(log):
    assert problems(log) == []


class TestFiles:
    def test_torn_file_is_named_and_the_others_are_still_checked(self, log, file, edit_file):
        edit_file(log / "rollouts" / "step-000003.parquet", at(2, "reward", None))
        file.write_bytes(file.read_bytes()[:-20])
        first, second = problems(log)
        assert first.startswith("step-000001.parquet: torn or not a Parquet file (")
        assert second == "step-000003.parquet, row 2: has no reward"

    def test_pages_that_cannot_be_decoded(self, log, file):
        content = bytearray(file.read_bytes())
        content[4:100] = bytes(96)
        file.write_bytes(content)
        (problem,) = problems(log)
        assert problem.startswith("step-000001.parquet, rows 1-16: cannot be decoded (")

    def test_missing_columns_wrong_types_and_version_are_all_listed(self, log, file):
        frame = pl.read_parquet(file).drop("reward", "text").with_columns(pl.col("step").cast(pl.Int64))
        frame.write_parquet(file, metadata={"graftrl": '{"schema_version": 2}'})
        assert problems(log) == [
            "step-000001.parquet: has schema version 2, but this version of graftrl reads 1",
            "step-000001.parquet: no rollout log: column 'text', 'reward' missing",
            "step-000001.parquet: column 'step' is of type Int64, not Int32",
        ]

    def test_log_without_responses(self, write_log):
        log = write_log("run", {1: {"A": {}}})
        assert [str(problem) for problem in validate_log(log)] == [f"{log}: holds no response"]

    def test_no_log_at_all_is_an_error(self, tmp_path):
        with pytest.raises(DataError, match="no Parquet file"):
            list(validate_log(tmp_path))


class TestRows:
    @pytest.mark.parametrize(
        ("column", "value", "message"),
        [
            ("prompt_id", None, "has no prompt_id"),
            ("reward", None, "has no reward"),
            ("reward", float("nan"), "has reward NaN, not a number in [0, 1]"),
            ("reward", -1.0, "has reward -1.0, not a number in [0, 1]"),
            ("finish_reason", "eos", "has finish_reason 'eos', not stop or length"),
            ("finish_reason", None, "has no finish_reason"),
            ("logprobs", pl.col("logprobs").list.head(3), "has 5 token ids but 3 log-probabilities"),
            (
                "logprobs",
                pl.col("logprobs").list.eval(pl.element() * float("nan")),
                "has 5 log-probabilities that are not finite",
            ),
            ("logprobs", pl.col("logprobs").list.eval(pl.element() * -0.5), "has a log-probability above 0 (0.5)"),
            ("logprobs", pl.lit(None, pl.List(pl.Float32)), "has no log-probabilities; `graftrl logs score` adds them"),
            ("token_ids", pl.lit(None, pl.List(pl.Int32)), "has log-probabilities but no token ids"),
            ("response_index", -3, "has response_index -3"),
            ("temperature", None, "does not say how it was sampled (temperature, top_p, top_k)"),
            ("messages", pl.col("messages").list.head(0), "has a prompt without messages"),
        ],
    )
    def test_a_fault_is_named_with_its_row(self, log, file, edit_file, column, value, message):
        edit_file(file, at(7, column, value))
        assert f"step-000001.parquet, row 7: {message}" in problems(log)

    def test_stopped_without_a_token(self, log, file, edit_file):
        edit_file(file, *(at(3, column, pl.col(column).list.head(0)) for column in ("token_ids", "logprobs")))
        assert problems(log) == ["step-000001.parquet, row 3: has finish_reason 'stop' but no token, not even the EOS"]

    def test_rounding_above_0_is_no_problem(self, log, file, edit_file):
        edit_file(file, at(3, "logprobs", pl.col("logprobs").list.eval(pl.element() * -1e-7)))
        assert problems(log) == []

    def test_consecutive_rows_with_one_fault_are_one_problem_across_slices(self, log, file, edit_file, monkeypatch):
        monkeypatch.setattr(validate, "SLICE_ROWS", 3)
        rows = pl.int_range(pl.len()) + 1
        edit_file(file, pl.when(rows.is_between(2, 9) | (rows == 12)).then(None).otherwise("reward").alias("reward"))
        assert problems(log) == [
            "step-000001.parquet, rows 2-9: has no reward",
            "step-000001.parquet, row 12: has no reward",
        ]


class TestGroups:
    def test_duplicate_within_a_file_names_both_rows(self, log, file, edit_file):
        edit_file(file, at(2, "response_index", 0))
        assert problems(log) == [
            f"step-000001.parquet, row 2: response_index 0 of 'A', step 1, prompt 'p1' occurs again; first in {file}, "
            "row 1",
            "step-000001.parquet, row 1: the group of 'A', step 1, prompt 'p1' has 3 responses, most groups of 'A' "
            "have 4; lacks response_index 1",
        ]

    def test_duplicates_in_another_file_name_it(self, log, file):
        copy = file.with_name("step-000009.parquet")
        pl.read_parquet(file).head(2).write_parquet(copy, metadata={"graftrl": '{"schema_version": 1}'})
        found = problems(log)
        assert len(found) == 2
        assert found[0].startswith("step-000009.parquet, row 1: response_index 0 of 'A', step 1, prompt 'p1' occurs")
        assert found[0].endswith(f"first in {file}, row 1")

    def test_the_same_prompt_in_another_step_is_no_duplicate(self, write_log):
        assert problems(write_log("run", {1: {"A": {"p": (1, 0)}}, 2: {"A": {"p": (1, 0)}}})) == []

    def test_uneven_group(self, write_log):
        log = write_log("run", {1: {"A": {"p": (1, 0), "q": (1, 0, 0), "r": (0, 0)}}})
        assert problems(log) == [
            "step-000001.parquet, row 3: the group of 'A', step 1, prompt 'q' has 3 responses, most groups of 'A' "
            "have 2"
        ]

    def test_models_may_have_groups_of_different_sizes(self, write_log):
        assert problems(write_log("run", {1: {"A": {"p": (1, 0)}, "B": {"p": (1, 0, 0)}}})) == []

    def test_a_group_over_two_files_is_whole(self, log, file):
        frame = pl.read_parquet(file)
        for name, part in (("a", frame.head(2)), ("b", frame.tail(-2))):
            part.write_parquet(file.with_name(f"{name}.parquet"), metadata={"graftrl": '{"schema_version": 1}'})
        file.unlink()
        assert problems(log) == []

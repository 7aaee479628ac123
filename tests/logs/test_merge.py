from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from graftrl.errors import ConfigError, DataError
from graftrl.logs.merge import Source, merge_logs, parse_sources
from graftrl.logs.reader import RolloutLog
from graftrl.logs.rollouts import write_frame
from graftrl.logs.validate import validate_log


@pytest.fixture
def two(write_log) -> list[Path]:
    return [
        write_log("one", {1: {"A": {"p": (1, 0)}}, 2: {"A": {"q": (0, 0)}}}),
        write_log("two", {2: {"B": {"q": (1, 1)}}, 3: {"B": {"p": (0, 1)}}}),
    ]


def merged(out: Path, *sources: Source | Path, **options) -> RolloutLog:
    merge_logs([s if isinstance(s, Source) else Source(s) for s in sources], out, **options)
    return RolloutLog(out)


def edit(log: Path, step: int, *expressions: pl.Expr) -> Path:
    file = log / "rollouts" / f"step-{step:06d}.parquet"
    write_frame(file, pl.read_parquet(file).with_columns(*expressions))
    return file


class TestWhole:
    def test_one_file_a_step_with_all_models(self, two, tmp_path):
        log = merged(tmp_path / "out", *two)
        assert [file.name for file in log.files] == [f"step-00000{step}.parquet" for step in (1, 2, 3)]
        assert set(pl.read_parquet(log.files[1])["model"]) == {"A", "B"}
        assert log.group_index("A").rows() == [(1, "p", 2, 1), (2, "q", 2, 0)]
        assert log.group_index("B").rows() == [(2, "q", 2, 2), (3, "p", 2, 1)]
        assert list(validate_log(tmp_path / "out")) == []

    def test_rows_are_those_of_the_sources(self, two, tmp_path):
        merged(tmp_path / "out", *two)
        before = pl.concat(pl.read_parquet(log / "rollouts" / "*.parquet") for log in two)
        key = ["model", "step", "prompt_id", "response_index"]
        assert pl.read_parquet(tmp_path / "out" / "*.parquet").sort(key).equals(before.sort(key))

    def test_identical_responses_are_kept_once(self, two, tmp_path):
        report = merge_logs([Source(two[0]), Source(two[1]), Source(two[0])], tmp_path / "out")
        assert (report.responses, report.identical) == (8, 4)

    def test_the_name_of_the_run_is_no_difference(self, two, tmp_path):
        copy = tmp_path / "copy.parquet"
        write_frame(copy, pl.read_parquet(edit(two[0], 1)).with_columns(run=pl.lit("copy")))
        report = merge_logs([Source(two[0]), Source(copy)], tmp_path / "out")
        assert report.identical == 2

    def test_nan_equals_nan(self, two, tmp_path):
        edit(two[0], 1, pl.col("logprobs").list.eval(pl.element() * float("nan")))
        assert merge_logs([Source(two[0]), Source(two[0])], tmp_path / "out").identical == 4


class TestConflicts:
    def test_both_places_and_the_columns_are_named_and_nothing_is_written(self, two, tmp_path):
        other = tmp_path / "other.parquet"
        frame = pl.read_parquet(edit(two[0], 1))
        changed = pl.when(pl.col("response_index") == 1).then(pl.lit("else")).otherwise("text").alias("text")
        write_frame(other, frame.with_columns(changed))
        with pytest.raises(DataError) as caught:
            merge_logs([Source(two[0]), Source(other)], tmp_path / "out")
        assert str(caught.value) == (
            "response 1 of 'A', step 1, prompt 'p' differs in text: "
            f"{two[0]}/rollouts/step-000001.parquet, row 2, and {other}, row 2; "
            "--rename gives one of the models another name, --step-offset moves its steps"
        )
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))

    def test_renaming_one_of_the_models_settles_it(self, write_log, tmp_path):
        logs = [write_log(name, {1: {"A": {"p": rewards}}}) for name, rewards in (("x", (1, 0)), ("y", (0, 0)))]
        log = merged(tmp_path / "out", logs[0], Source(logs[1], rename={"A": "A2"}))
        assert log.models == ("A", "A2")
        assert [log.group_index(model)["k"].to_list() for model in log.models] == [[1], [0]]

    def test_so_does_moving_the_steps(self, write_log, tmp_path):
        logs = [write_log(name, {1: {"A": {"p": rewards}}}) for name, rewards in (("x", (1, 0)), ("y", (0, 0)))]
        log = merged(tmp_path / "out", logs[0], Source(logs[1], step_offset=10))
        assert log.group_index("A").rows() == [(1, "p", 2, 1), (11, "p", 2, 0)]
        assert log.files[1].name == "step-000011.parquet"

    def test_unknown_model_negative_step_existing_out(self, two, tmp_path):
        with pytest.raises(DataError, match="no log has a model 'C' to rename"):
            merge_logs([Source(log, rename={"C": "D"}) for log in two], tmp_path / "out")
        with pytest.raises(DataError, match="step 1 would become -1"):
            merge_logs([Source(two[0], step_offset=-2)], tmp_path / "out")
        with pytest.raises(DataError, match="exists already"):
            merge_logs([Source(two[0])], two[1])


class TestFaulty:
    def test_torn_file_stops_the_merge_unless_it_is_to_be_left_out(self, two, tmp_path):
        file = two[0] / "rollouts" / "step-000001.parquet"
        file.write_bytes(file.read_bytes()[:-30])
        with pytest.raises(DataError, match=r"step-000001\.parquet: torn"):
            merge_logs([Source(log) for log in two], tmp_path / "out")
        report = merge_logs([Source(log) for log in two], tmp_path / "out", drop_faulty=True)
        assert len(report.torn) == 1 and report.responses == 6

    def test_a_faulty_response_takes_its_group_along_and_no_other(self, write_log, tmp_path):
        source = write_log("run", {1: {"A": {"p": (1, 0), "q": (1, 0)}, "B": {"p": (1, 0)}}})
        bad = (pl.col("model") == "A") & (pl.col("prompt_id") == "p") & (pl.col("response_index") == 1)
        edit(source, 1, pl.when(bad).then(None).otherwise("reward").alias("reward"))
        report = merge_logs([Source(source)], tmp_path / "out", drop_faulty=True)
        assert (report.faulty, report.companions, report.responses) == (1, 1, 4)
        assert list(validate_log(tmp_path / "out")) == []
        assert RolloutLog(tmp_path / "out").group_index("A").rows() == [(1, "q", 2, 1)]

    def test_a_good_copy_of_a_faulty_group_is_kept(self, two, tmp_path):
        good = tmp_path / "good.parquet"
        good.write_bytes((two[0] / "rollouts" / "step-000001.parquet").read_bytes())
        edit(two[0], 1, pl.lit(None, pl.Float64).alias("reward"))
        report = merge_logs([Source(two[0]), Source(good)], tmp_path / "out", drop_faulty=True)
        assert RolloutLog(tmp_path / "out").group_index("A").rows() == [(1, "p", 2, 1), (2, "q", 2, 0)]
        assert (report.faulty, report.companions) == (2, 0)

    def test_a_response_without_its_place_is_refused(self, two, tmp_path):
        file = edit(two[0], 1, pl.lit(None, pl.String).alias("prompt_id"))
        with pytest.raises(DataError, match=r"row 1: lacks a model, step, prompt_id or response_index; --drop-faulty"):
            merge_logs([Source(file)], tmp_path / "out")

    def test_nothing_left(self, two, tmp_path):
        file = edit(two[0], 1, pl.lit(None, pl.Float64).alias("reward"))
        with pytest.raises(DataError, match="no response to merge"):
            merge_logs([Source(file)], tmp_path / "out", drop_faulty=True)


class TestOptions:
    paths = (Path("x"), Path("y"))

    def test_for_one_log_or_for_all(self):
        assert parse_sources(self.paths, ["A=B", "2:C=D"], ["1:-5"]) == [
            Source(Path("x"), {"A": "B"}, -5),
            Source(Path("y"), {"A": "B", "C": "D"}, 0),
        ]

    def test_names_may_hold_colons(self):
        assert parse_sources(self.paths, ["org:m=n"], [])[0].rename == {"org:m": "n"}

    @pytest.mark.parametrize(
        ("renames", "offsets", "fault"),
        [
            (["A"], [], "--rename A: write"),
            (["A="], [], "--rename A=: write"),
            (["3:A=B"], [], "--rename 3:A=B: there is no log number '3'; there are 2"),
            ([], ["5"], "--step-offset 5: write"),
            ([], ["0:5"], "--step-offset 0:5: there is no log number '0'"),
        ],
    )
    def test_malformed(self, renames, offsets, fault):
        with pytest.raises(ConfigError) as caught:
            parse_sources(self.paths, renames, offsets)
        assert str(caught.value).startswith(fault)

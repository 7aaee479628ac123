from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from fake_runs import finish, laboratory

from graftrl.lab.pages import Page
from graftrl.lab.pairs import PAIRS
from graftrl.lab.plan import cell_of
from graftrl.lab.programs_written import programs_written, told_families
from graftrl.lab.results import read_result
from graftrl.lab.studies import STUDIES
from graftrl.logs.rollouts import step_file_name
from graftrl.report.data import Run, read_runs


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """10 steps. Model A writes to family a GB, then BC; to family b always HI. Model B is right from the start."""
    lab = laboratory(tmp_path)
    (key,) = cell_of(PAIRS["A-B"], "scion", 0).runs
    finish(lab, key)
    folder = lab.folder(key)
    (folder / "rollouts").mkdir()
    for step in range(1, 11):
        texts = {
            ("A", "a3,1>"): ["G:1,2;B:3,4", "no list"]
            if step <= 5
            else ["B:1,2 - C:3,4", "B:1,2;C:3,4", "B:1,2", "A:9"],
            ("A", "b3,1>"): ["H:1,1;I:2,2"],
            ("B", "a3,1>"): ["D:1,2;E:3,4;F:5,6"],
        }
        rows = [
            {"step": step, "model": model, "messages": [{"role": "user", "content": prompt}], "text": text,
             "reward": float(text.endswith("C:3,4") or model == "B")}
            for (model, prompt), of in texts.items()
            for text in of
        ]  # fmt: skip
        pl.DataFrame(rows, schema_overrides={"step": pl.Int32}).write_parquet(
            folder / "rollouts" / step_file_name(step)
        )
    return read_runs([folder])[0]


def test_programs_by_window_with_their_share_and_how_often_they_are_right(run: Run) -> None:
    assert programs_written(run, "A", "a", windows=2).rows() == [
        (1, 5, "", 0.5, 0.0),
        (1, 5, "GB", 0.5, 0.0),
        (6, 10, "BC", 0.5, 1.0),
        (6, 10, "A", 0.25, 0.0),
        (6, 10, "B", 0.25, 0.0),
    ]
    assert programs_written(run, "A", "b", windows=1).rows() == [(1, 10, "HI", 1.0, 0.0)]
    assert programs_written(run, "B", "a", windows=3).rows() == [
        (1, 4, "DE", 1.0, 1.0),
        (5, 8, "DE", 1.0, 1.0),
        (9, 10, "DE", 1.0, 1.0),
    ]


def test_shares_of_a_window_sum_to_one(run: Run) -> None:
    sums = programs_written(run, "A", "a", windows=4).group_by("first").agg(pl.col("share").sum())["share"]
    assert sums.to_list() == pytest.approx([1.0] * 4)


def test_a_page_tells_the_families_that_its_study_follows(tmp_path: Path, run: Run) -> None:
    followed = (("A-B", "a", "A", ("scion", "sgt")), ("A-C-mixed", "j", "A", ("scion",)))
    study = replace(STUDIES["scion"], followed=followed)
    result = read_result(laboratory(tmp_path), cell_of(PAIRS["A-B"], "scion", 0))
    assert result is not None
    page = Page(study, [PAIRS["A-B"]], [result])
    lines = told_families(page).splitlines()
    header = "| pair | family | model | method | seed | steps 1 to 3 | steps 4 to 6 | steps 7 to 9 | steps 10 to 10 |"
    assert lines[4] == header
    mixture = "none… 0.50; none 0.50, GB 0.50; right 0.00"
    assert lines[6].startswith(f"| A-B | a | A | `scion` | 0 | {mixture} |")
    assert lines[6].endswith("| B… 0.75; BC 0.50, A 0.25; right 0.50 |")
    assert len(lines) == 7  # no run of SGT, nor of the other pair

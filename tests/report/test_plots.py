from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from run_builder import make_run, write_evaluation

from graftrl.report import plots
from graftrl.report.data import read_runs

PNG = b"\x89PNG\r\n\x1a\n"


def test_drift_counts_every_response_once_and_gives_plain_quantiles() -> None:
    rng = np.random.default_rng(0)
    steps = np.repeat(np.arange(11, 111), 7)  # 100 steps, more than there are pieces
    scores = rng.uniform(0, 1.2, len(steps))
    table = pl.DataFrame({"step": steps, "score": np.append(scores[:-1], np.inf)})
    found = plots.drift_quantiles(table)
    width = 3  # 100 steps in at most 40 pieces
    assert len(found) == 34
    assert found["step"].to_list()[:2] == [12.0, 15.0]  # the middles of 11 to 13 and 14 to 16
    first = np.sort(scores[: width * 7])
    for percent in (10, 25, 50, 75, 90):
        nearest = first[round(percent / 100 * (len(first) - 1))]
        assert found[f"q{percent}"][0] == pytest.approx(nearest)
    few = plots.drift_quantiles(table.filter(pl.col("step") < 15))
    assert few["step"].to_list() == [11.0, 12.0, 13.0, 14.0]
    assert plots.drift_quantiles(table.clear()).is_empty()


def test_one_run_with_every_phase_leaves_its_bar_room_above_the_legend(tmp_path: Path) -> None:
    (run,) = read_runs([make_run(tmp_path / "run", "grpo", 0, {"A": 0.5, "B": 0.6})])
    names = ("sampling", "grading", "peers", "exchange", "scoring", "training", "evaluation", "checkpoint", "logging")
    for line in run.metrics:
        line["phase_s"] = dict.fromkeys(names, 1.0)
    assert "<svg" in plots.to_svg(plots.phases([run]), "phases")  # Matplotlib warns of a collapsed axis, an error here


def test_plots_become_a_png_and_an_svg_of_their_own(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"{method}{seed}", method, seed, {"A": 0.5, "B": 0.6}, before={"v1": 1}, grafts=grafts)
        for method, grafts in (("grpo", False), ("graft", True))
        for seed in (0, 1)
    ]
    figures = plots.drawn(read_runs(folders))
    assert set(figures) == {
        "learning", "clipped", "phases", "entropy", "complementarity", "score-by-cost", "exchange-graft",
        "scores-graft", "drift-graft",
    }  # fmt: skip
    written = plots.save({name: figures[name] for name in ("learning", "drift-graft")}, tmp_path / "plots")
    assert len(written) == 4
    assert sorted(file.name for file in (tmp_path / "plots").iterdir()) == sorted(file.name for file in written)
    assert {file.suffix for file in written} == {".png", ".svg"}
    for file in written:
        content = file.read_bytes()
        if file.suffix == ".png":
            assert content.startswith(PNG)
        else:
            assert content.startswith(b"<svg xmlns=")
            assert b"currentColor" not in content
    learning = (tmp_path / "plots" / "learning.svg").read_text()
    assert "validation pass@1" in learning


def test_selected_checkpoints_are_marked_with_the_run_s_own_score(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", "grpo", 0, {"A": 0.5, "B": 0.6}, before={"v1": 1}, steps=3)
    write_evaluation(folder, 2, {"A": {"v1": 1, "v2": 1}, "B": {"v1": 1, "v2": 0}})  # mean 0.75 beats 0.55
    (run,) = read_runs([folder])
    assert run.best_step == 2
    upper, lower, *_ = plots.learning_curves([run]).axes[0], plots.learning_curves([run]).axes[2]
    stars = [line for line in lower.lines if line.get_marker() == "*"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in stars] == [(2, 1.0)]
    assert not [line for line in upper.lines if line.get_marker() == "*"]


def test_without_validation_only_the_reward_is_drawn(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "r")])
    assert len(plots.learning_curves(runs).axes) == 2
    assert "score-by-cost" not in plots.drawn(runs)


def test_many_models_are_put_into_rows_of_three() -> None:
    figure, columns = plots.stacked(5, 2)
    assert len(columns) == 5
    assert all(len(column) == 2 for column in columns)
    assert len(figure.axes) == 12  # two blocks of two rows of three
    assert sum(axis.axison for axis in figure.axes) == 10


def test_labels_become_file_names() -> None:
    assert plots.file_name("graft (threshold=0.7, models=A+B)") == "graft-threshold-0.7-models-A-B"

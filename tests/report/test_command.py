from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from run_builder import make_run, metrics_line, recipe_content

from graftrl.config import parse_recipe
from graftrl.errors import DataError, RunError
from graftrl.report import plots
from graftrl.report.command import run_report
from graftrl.report.data import find_runs, join_seeds, methods_of, read_runs, score_cost_table
from graftrl.training.run_folder import RunFolder

FINALS = {"A": 0.5, "B": 0.6}


@pytest.fixture(autouse=True)
def one_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of a report's time; all plots are drawn in test_plots and test_html."""
    monkeypatch.setattr(plots, "drawn", lambda runs: {"phases": plots.phases(runs)} if runs[0].metrics else {})


def _alone(root: Path, model: str, seed: int = 0, lr: float = 1e-6) -> Path:
    content = {**recipe_content("grpo", seed), "models": {model: {"path": f"models/{model}", "optimizer": {"lr": lr}}}}
    run = RunFolder.create(root, parse_recipe(content, "test"))
    for step in (1, 2, 3):
        line = metrics_line(step, {})
        run.append_metrics({**line, "models": {model: line["models"][model]}})
    return root


def test_command_finds_runs_below_a_folder_and_writes_page_plots_and_tables(graftrl, tmp_path: Path) -> None:
    for name, method in (("deep/er/graft-seed0", "graft"), ("grpo-seed0", "grpo")):
        make_run(tmp_path / "runs" / name, method, 0, FINALS, before={"v1": 1}, grafts=method == "graft")
    (tmp_path / "runs" / "grpo-seed0" / "wandb").mkdir()
    (tmp_path / "runs" / "grpo-seed0" / "wandb" / "config.yaml").write_text("no: run")
    arguments = ["--plots", tmp_path / "p", "--tables", tmp_path / "t", "--title", "Two & two"]
    code, printed, error = graftrl("report", tmp_path / "runs", *arguments)
    assert (code, error) == (0, "")
    page = (tmp_path / "runs" / "report.html").read_text()
    assert "<title>Two &amp; two</title>" in page
    assert "2 runs: grpo, graft on models A, B, seed 0" in page
    files = [Path(line) for line in printed.split()]
    assert files[:3] == [
        tmp_path / "runs" / "report.html",
        tmp_path / "p" / "phases.svg",
        tmp_path / "p" / "phases.png",
    ]
    assert all(file.is_file() for file in files)
    assert {file.name for file in (tmp_path / "t").iterdir()} == {
        f"{name}.{suffix}" for name in ("results", "runs", "exchange", "clipped", "cost") for suffix in ("md", "tex")
    }


def test_tables_hold_what_the_runs_reached(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"{method}{seed}", method, seed, {"A": score, "B": 0.5}, before={"v1": 1, "v2": 0})
        for method, of_seed in (("grpo", (0.5, 0.7)), ("graft", (0.6, 0.9)))
        for seed, score in enumerate(of_seed)
    ]
    run_report(folders, out=tmp_path / "r.html", tables=tmp_path)
    results = (tmp_path / "results.md").read_text()
    before = "0.500 [0.000, 1.000]"
    # t(1) = 12.7062; the gains 0.1 and 0.2 have standard deviation 0.0707107
    assert f"| A | graft | 2 | {before} | 0.750 ± 1.906 | +0.150 ± 0.635 | 0.750 ± 1.906 | 3, 3 |" in results
    assert f"| A | grpo | 2 | {before} | 0.600 ± 1.271 |  | 0.600 ± 1.271 | 3, 3 |" in results
    cost = (tmp_path / "cost.md").read_text()
    assert "| grpo | A, B | 2 | 3 | 120 | 60 | 180 | 3.0 | 0.550 |" in cost
    latex = (tmp_path / "results.tex").read_text()
    assert r"A & graft & 2 & 0.500 [0.000, 1.000] & 0.750 $\pm$ 1.906 & +0.150 $\pm$ 0.635" in latex


def test_many_runs_are_counted_in_the_title_and_named_below_the_folder_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [make_run(tmp_path / "deep" / where, seed=seed) for seed, where in enumerate(("x/r", "x/s", "y/r"))]
    run_report(folders, out=tmp_path / "few.html", tables=tmp_path)
    assert "<title>graftrl: r, s</title>" in (tmp_path / "few.html").read_text()
    runs = (tmp_path / "runs.md").read_text()
    assert f"In {tmp_path / 'deep'}. Means over models" in runs
    assert all(f"| {Path(*where)} | grpo |" in runs for where in ("xr", "xs", "yr"))
    monkeypatch.chdir(tmp_path / "deep")  # relative beside absolute
    run_report([Path("x/r"), folders[2]], out=tmp_path / "few.html", tables=tmp_path)
    assert "| x/r | grpo |" in (tmp_path / "runs.md").read_text()
    more = [make_run(tmp_path / "deep" / f"z{seed}", seed=seed) for seed in range(3, 6)]
    run_report([*folders, *more], out=tmp_path / "many.html")
    assert "<title>graftrl: 6 runs</title>" in (tmp_path / "many.html").read_text()
    run_report(folders[:1], out=tmp_path / "one.html", tables=tmp_path)
    assert f"| {folders[0]} | grpo |" in (tmp_path / "runs.md").read_text()


def test_exchange_table_adds_up_a_run(tmp_path: Path) -> None:
    run_report([make_run(tmp_path / "r", "graft", grafts=True)], tables=tmp_path / "t")
    table = (tmp_path / "t" / "exchange.md").read_text()
    assert "| graft | B → A | 6 | 3 | 6 | 3 | 0 | 3 | 0 | 50.0% |" in table  # three steps of GRAFT_COUNTS


@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_that_is_still_training(tmp_path: Path, steps: int) -> None:
    folder = make_run(tmp_path / "r", "graft", steps=steps, planned_steps=9, before={"v1": 1}, grafts=True)
    (page,) = run_report([folder])
    text = page.read_text()
    assert f"<td>{steps} of 9</td>" in text
    if steps:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "mod')  # being written
        run_report([folder])


def test_what_cannot_be_read_is_named(graftrl, tmp_path: Path) -> None:
    code, _, error = graftrl("report", tmp_path / "nothing")
    assert (code, error) == (3, f"error: {tmp_path / 'nothing'}: no such folder\n")
    (tmp_path / "empty").mkdir()
    code, _, error = graftrl("report", tmp_path / "empty")
    assert code == 3
    assert "no run in it" in error
    torn = make_run(tmp_path / "torn", "graft", grafts=True)
    for file in (torn / "rollouts" / "step-000002.parquet", torn / "exchange" / "step-000002.parquet"):
        whole = file.read_bytes()
        file.write_bytes(whole[:-20])
        with pytest.raises(DataError, match=rf"{file.parent.name}/step-000002\.parquet: torn"):
            run_report([torn])
        file.write_bytes(whole)
    evaluation = torn / "evaluations" / "step-000003.json"
    evaluation.parent.mkdir()
    evaluation.write_text('{"step": 3, "resu')
    with pytest.raises(RunError, match=r"step-000003\.json: not the results of an evaluation"):
        run_report([torn])
    evaluation.unlink()
    (torn / "metrics.jsonl").write_text('{"st\n{"step": 2}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 1: torn"):
        run_report([torn])


def test_runs_of_one_model_each_are_one_run_of_a_method(tmp_path: Path) -> None:
    folders = [_alone(tmp_path / f"{model}{seed}", model, seed) for model in "AB" for seed in (0, 1)]
    runs = join_seeds(read_runs(folders))
    assert [(run.method, run.seed, run.models) for run in runs] == [("grpo", 0, ["A", "B"]), ("grpo", 1, ["A", "B"])]
    joint = make_run(tmp_path / "joint", "grpo", 2)
    read = read_runs([*folders, joint])
    assert methods_of(read) == ["grpo (models=A)", "grpo (models=B)", "grpo (models=A+B)"]


def test_settings_of_a_model_are_compared_between_the_runs_that_have_it(tmp_path: Path) -> None:
    a, b, other = (
        _alone(tmp_path / "a", "A"),
        _alone(tmp_path / "b", "B", lr=5e-5),
        _alone(tmp_path / "c", "A", lr=1e-3),
    )
    assert methods_of(read_runs([a, b])) == ["grpo"]
    assert methods_of(read_runs([a, b, other])) == [
        "grpo",
        "grpo (models.A.optimizer.lr=1e-06)",
        "grpo (models.A.optimizer.lr=0.001)",
    ]


def test_the_same_run_done_twice_does_not_hide_the_first(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, "grpo", 0, {"A": score, "B": 0.5}) for name, score in (("x", 0.1), ("y", 0.9))]
    assert methods_of(read_runs(folders)) == ["grpo", f"grpo [{tmp_path / 'y'}]"]


def test_cost_of_a_score_is_what_training_had_cost_by_then(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", "grpo", 0, {"A": 0.4, "B": 0.6}, before={"v1": 1, "v2": 0})
    (folder / "evaluations" / "step-000009.json").write_text(
        json.dumps({"step": 9, "results": {"A": {"pass_at_1": 1.0}, "B": {"pass_at_1": 1.0}}, "successes": {}})
    )  # of a step whose line is not written yet
    table = score_cost_table(read_runs([folder]))
    assert table.drop("method", "seed").rows() == [
        (0, 0.5, 0.0, 0.0, 0.0, False),
        (3, 0.5, 3.0, 120.0, 180.0, False),
    ]
    assert table.schema["best"] == pl.Boolean


def test_each_run_is_read_once(tmp_path: Path) -> None:
    first = make_run(tmp_path / "runs" / "a")
    assert find_runs([tmp_path / "runs", first]) == [first]

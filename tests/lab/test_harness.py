"""`graftrl lab` from plan to pages. Fake runs stand for training, but for one test that trains for real."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_runs import RECIPE, write_run
from rich.console import Console
from typer.testing import CliRunner

from graftrl.cli import app
from graftrl.config import load_recipe
from graftrl.errors import ConfigError, RunError
from graftrl.lab import harness, plan
from graftrl.lab.harness import Options, list_runs, planned_runs, run_lab
from graftrl.lab.jobs import Job, finished_steps
from graftrl.lab.pages import Page, clipping
from graftrl.lab.pairs import PAIRS, Regime
from graftrl.lab.plan import Laboratory, cells_of
from graftrl.lab.results import COLUMNS, read_result
from graftrl.lab.studies import STUDIES
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder


class FakeTraining:
    """Stands for `run_jobs`: finishes what has not finished, but for jobs whose name holds a word of `failing`."""

    def __init__(self, failing: str = "nothing fails") -> None:
        self.failing, self.trained = failing, []
        self.trained: list[str] = []

    def __call__(self, jobs: Sequence[Job], workers: int, console: Console) -> int:
        failed = []
        for job in jobs:
            recipe = load_recipe(job.recipe, job.overrides)
            if finished_steps(job.folder) >= (recipe.training.steps or 0):
                continue
            if self.failing in job.name:
                failed.append(job.name)
                continue
            self.trained.append(job.name)
            gain = 1 if recipe.method.name == "graft" else 0
            of_seed = {0: 1, 5: 1, 10: 4 + 2 * gain + recipe.seed % 2}
            write_run(job, dict.fromkeys(recipe.models, of_seed))
        if failed:
            raise RunError(f"{len(failed)} runs failed: {', '.join(failed)}")
        return len(self.trained)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    fake = FakeTraining()
    monkeypatch.setattr(harness, "run_jobs", fake)
    monkeypatch.setattr(Regime, "warm", lambda self, cache, models: {})
    for study in ("main", "position", "stability"):  # without plots, which take half a second each
        plain = replace(STUDIES[study], name=f"plain-{study}", parts=("verdicts", "scores"))
        monkeypatch.setitem(STUDIES, plain.name, plain)
    return fake


def _options(tmp_path: Path, **changed: Any) -> Options:
    given = {"recipe": RECIPE, "root": tmp_path / "runs" / "lab", "seeds": 2, "pairs": ("A-B",), "steps": 10}
    return Options(**{**given, **changed})


def _run(names: Sequence[str], options: Options, **changed: Any) -> tuple[list[Path], str]:
    console = Console(file=io.StringIO(), width=200)
    return run_lab(names, options, console, **changed), console.file.getvalue()  # type: ignore[attr-defined]


def test_a_study_is_trained_once_and_written_again(tmp_path: Path, training: FakeTraining) -> None:
    (page,), said = _run(["plain-main"], _options(tmp_path))
    assert page == tmp_path / "runs" / "lab" / "steps-10" / "results" / "plain-main.md"  # reduced: not a document
    assert "18 runs, 18 to be trained" in said
    assert len(training.trained) == 18
    text = page.read_text()
    assert (
        f"`graftrl lab plain-main --recipe {RECIPE} --seeds 2 --steps 10 --run {tmp_path}/runs/lab --pairs A-B`" in text
    )
    assert "Results of 12 of 12" in text
    assert "Missing" not in text
    (again,), _ = _run(["plain-main"], _options(tmp_path))
    assert len(training.trained) == 18
    assert again == page
    _run(["plain-stability"], _options(tmp_path))
    assert len(training.trained) == 18  # it shares every run


def test_tables_by_hand(tmp_path: Path, training: FakeTraining) -> None:
    """Selected at step 10. GRPO solves 4 and 5 of 8, so 2 and 3 of the 6 test prompts; GRAFT 6 and 7: 4 and 5 of 6.
    The difference is 2/6 with both seeds: its interval has width 0."""
    (page,), _ = _run(["plain-main"], _options(tmp_path))
    lines = page.read_text().splitlines()
    row = next(line for line in lines if line.startswith("| A | `graft` |"))
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "A", "`graft`", "2", "0.750 ± 1.059", "0.750 ± 1.059", "+0.333 ± 0.000", "< 0.001", "< 0.001", "", "", "",
    ]  # fmt: skip
    assert "- `graft`: higher on 2 of 2 (A in A-B +0.333, B in A-B +0.333)." in lines
    assert "- `sgt`: not distinguishable on 2 of 2 (A in A-B +0.000, B in A-B +0.000)." in lines
    assert "Against `grpo`, paired by seed, corrected for 10 comparisons (Holm), at 5 %:" in lines
    assert "Against `graft`, paired by seed, corrected for 8 comparisons (Holm), at 5 %:" in lines  # without GRPO again
    assert "- `grpo-n32`: lower on 2 of 2 (A in A-B -0.333, B in A-B -0.333)." in lines
    one = _run(["plain-main"], _options(tmp_path, seeds=1))[0][0].read_text()
    assert "Against `grpo`, paired by seed, untested:" in one
    assert "- `graft`: not tested (one seed) on 2 of 2 (A in A-B +0.333, B in A-B +0.333)." in one


def test_raw_numbers_hold_every_finished_result(tmp_path: Path, training: FakeTraining) -> None:
    _run(["plain-main"], _options(tmp_path))
    (page,), _ = _run(["plain-position"], _options(tmp_path, seeds=1))
    table = list(csv.DictReader((page.parent / "lab.csv").read_text().splitlines()))
    assert tuple(table[0]) == COLUMNS
    assert {row["method"] for row in table} == {
        "grpo", "grpo-n16", "grpo-n32", "hacpo", "sgt", "graft", "graft-peer-first", "graft-peer-uniform",
    }  # fmt: skip
    assert sum(row["method"] == "graft" for row in table) == 4  # both seeds, both models
    details = (page.parent / "lab-details.csv").read_text().splitlines()
    assert len(details) == len(table) + 1


@pytest.mark.parametrize("study", list(STUDIES))
def test_every_page_can_be_written(study: str, tmp_path: Path, training: FakeTraining) -> None:
    pairs = STUDIES[study].pairs[:2]
    (page,), _ = _run([study], _options(tmp_path, pairs=pairs))
    text = page.read_text()
    assert text.startswith(f"# {STUDIES[study].title}\n\n{STUDIES[study].question}\n")
    assert "nan" not in text
    pictures = [line.rpartition("(")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert pictures
    for name in pictures:
        assert ET.fromstring((page.parent / name).read_text()).tag == "{http://www.w3.org/2000/svg}svg"
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")


def test_a_failure_is_reported_after_the_rest_was_written(tmp_path: Path, training: FakeTraining) -> None:
    training.failing = "sgt seed 1"
    with pytest.raises(RunError, match="1 runs failed: A-B sgt seed 1"):
        _run(["plain-main"], _options(tmp_path))
    text = (tmp_path / "runs" / "lab" / "steps-10" / "results" / "plain-main.md").read_text()
    assert "**Missing: 1 of 12 results** (A-B sgt seed 1)" in text
    training.failing = "nothing fails"
    _run(["plain-main"], _options(tmp_path))
    assert training.trained[-1] == "A-B sgt seed 1"


def test_tables_alone_train_nothing_and_say_what_is_missing(tmp_path: Path, training: FakeTraining) -> None:
    _run(["plain-stability"], _options(tmp_path, seeds=1))
    trained = len(training.trained)
    (page,), said = _run(["plain-main"], _options(tmp_path, seeds=1), tables_only=True)
    assert len(training.trained) == trained
    assert "missing: A-B grpo-n32 seed 0" in said
    assert "**Missing: 2 of 6 results** (A-B grpo-n16 seed 0, A-B grpo-n32 seed 0)" in page.read_text()
    (empty,), _ = _run(["designs"], _options(tmp_path, seeds=1, steps=3), tables_only=True)
    assert "Results of 0 of 8" in empty.read_text()


def test_the_whole_study_goes_to_the_documents(
    tmp_path: Path, training: FakeTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "DOCS", tmp_path / "docs")
    whole = Options(recipe=RECIPE, root=tmp_path / "lab")
    assert _run(["delta"], whole, tables_only=True)[0] == [tmp_path / "docs" / "delta.md"]
    more = Options(recipe=RECIPE, root=tmp_path / "lab", seeds=6)
    assert _run(["delta"], more, tables_only=True)[0] == [tmp_path / "docs" / "delta.md"]
    fewer = Options(recipe=RECIPE, root=tmp_path / "lab", seeds=4)
    assert _run(["delta"], fewer, tables_only=True)[0] == [tmp_path / "lab" / "results" / "delta.md"]


def test_dry_run_lists_runs_with_state_and_time(tmp_path: Path, training: FakeTraining) -> None:
    _run(["plain-stability"], _options(tmp_path, seeds=1))
    console = Console(file=io.StringIO())
    list_runs(["main"], _options(tmp_path, seeds=1), console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    lines = {line.split("  ")[0].strip(): line for line in said.splitlines()}
    assert "finished" in lines["A-B graft seed 0"]
    assert "new" in lines["B grpo-n32 seed 0"] and "/base/B/grpo-n32-seed0" in lines["B grpo-n32 seed 0"]
    assert "to be warmed up: A, B, C in regime base" not in said
    assert "9 runs, 5 finished; about " in said
    assert "with 2 workers" in said


def test_the_plan_as_plain_values(tmp_path: Path, training: FakeTraining) -> None:
    _run(["plain-stability"], _options(tmp_path, seeds=1))
    plan_ = json.loads(json.dumps(planned_runs(["main"], _options(tmp_path, seeds=1))))
    states = {run["run"]: (run["state"], run["expected_s"] == 0) for run in plan_["runs"]}
    assert states["A-B graft seed 0"] == ("finished", True) and states["B grpo-n32 seed 0"] == ("new", False)
    assert plan_["finished"] == 5 and len(plan_["runs"]) == 9 and plan_["workers"] == 2


def test_clipping_is_told_in_words(tmp_path: Path, training: FakeTraining) -> None:
    """Fake runs clip one of ten grafted tokens in every second step, and a tenth of their own tokens in all."""
    _run(["plain-position"], _options(tmp_path, seeds=1))
    lab = Laboratory(RECIPE, tmp_path / "runs" / "lab", 10)
    cells = cells_of(STUDIES["position"], [PAIRS["A-B"]], 1)
    results = [result for cell in cells if (result := read_result(lab, cell)) is not None]
    said = clipping(Page(STUDIES["position"], [PAIRS["A-B"]], results))
    assert (
        "5.000 % of grafted tokens are clipped with the peer last and 5.000 % with it first, a factor of 1.0." in said
    )
    assert "| A-B | `graft, peer last` | B | 10.000 % | 5.000 % | 50.0 % |" in said


def test_the_command_line_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(harness, "list_runs", lambda *arguments: given.append(arguments))
    command = ["lab", "main", "cost", "--dry-run", "--pairs", "A-B,A-C", "--pairs", "B-C", "--seeds", "3", "--no-holm"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert given == [(["main", "cost"], Options(pairs=("A-B", "A-C", "B-C"), seeds=3, corrected=False))]
    assert CliRunner().invoke(app, ["lab", "main", "--seeds", "0"]).exit_code != 0
    assert CliRunner().invoke(app, ["lab"]).exit_code != 0


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown study 'mian'; there are main, stored"):
        _run(["mian"], _options(tmp_path))
    with pytest.raises(ConfigError, match="unknown laboratory pair 'A-Q'"):
        _run(["main"], _options(tmp_path, pairs=("A-Q",)))


def test_a_study_trains_for_real(tmp_path: Path, pair: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Untrained models and two short steps, in this process: recipes, logs of peers, evaluations, pages."""
    small = ("task.validation_size=24", "evaluation.prompts=24", "training.prompts_per_step=4", "training.group_size=2",
             "training.minibatch_prompts=2", "sampling.max_response_tokens=6")  # fmt: skip
    monkeypatch.setattr(plan, "_BASE", small)
    monkeypatch.setattr(Laboratory, "model_folder", lambda self, regime, model: Path(pair[model]))
    monkeypatch.setattr(Regime, "warm", lambda self, cache, models: {})

    def in_this_process(jobs: Sequence[Job], workers: int, console: Console) -> int:
        for job in jobs:
            recipe = load_recipe(job.recipe, job.overrides)
            train(RunFolder.create(job.folder, recipe), recipe, Silent())
        return len(jobs)

    monkeypatch.setattr(harness, "run_jobs", in_this_process)
    (page,), _ = _run(["stored"], _options(tmp_path, seeds=1, steps=2))
    text = page.read_text()
    assert "Results of 3 of 3" in text
    assert "| A | `graft-stored` | 1 |" in text
    assert "| A-B | `graft-stored` | B → A |" in text

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
from graftrl.lab import harness, pages, plan
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


def measure_as_evaluated(folders: Sequence[Path], workers: int, console: Console) -> None:
    """Stands for sampling: the last evaluation's score, and twice as much for pass@8."""
    for folder in folders:
        evaluation = json.loads(sorted((folder / "evaluations").glob("*.json"))[-1].read_text())
        models = {}
        for model, result in evaluation["results"].items():
            rate = result["pass_at_1"]
            models[model] = {"pass1": rate, "pass8": 2 * rate, "entropy": 3.0, "families": {"a": rate, "b": 0.25},
                             "start": {"a": 0.5, "b": 0.0}}  # fmt: skip
        (folder / "measures.json").write_text(json.dumps({"version": 1, "models": models}))


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    fake = FakeTraining()
    monkeypatch.setattr(harness, "run_jobs", fake)
    monkeypatch.setattr(Regime, "warm", lambda self, cache, models: {})
    monkeypatch.setattr(harness, "measure_missing", measure_as_evaluated)
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
    pairs = STUDIES[study].pairs[:2] or ("A-B",)
    (page,), _ = _run([study], _options(tmp_path, pairs=pairs, held_out=True))
    text = page.read_text()
    assert text.startswith(f"# {STUDIES[study].title}\n\n{STUDIES[study].question}\n")
    assert "nan" not in text
    pictures = [line.rpartition("(")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert pictures
    for name in pictures:
        assert ET.fromstring((page.parent / name).read_text()).tag == "{http://www.w3.org/2000/svg}svg"
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")


def test_a_measured_page_by_hand(tmp_path: Path, training: FakeTraining) -> None:
    """At the last step GRPO solves 4 and 5 of 8, GRAFT 6 and 7, the others as GRPO; measured on all prompts."""
    options = _options(tmp_path, pairs=("A-B", "A-B-style"))
    (page,), _ = _run(["scion-regimes"], options)
    lines = page.read_text().splitlines()
    assert "| A-B | 0.562 ± 0.794 | +0.250 ± 0.000\\* | +0.000 ± 0.000 | +0.000 ± 0.000 |" in lines
    assert "- `graft` − `grpo`: above 0 in 2 of 2 pairs; mean over pairs +0.250 ± 0.000." in lines
    assert "- `scion` − `sgt`: above 0 in 0 of 2 pairs; mean over pairs +0.000 ± 0.000." in lines
    row = next(line for line in lines if line.startswith("| A-B | A | `grpo` |"))
    assert [cell.strip() for cell in row.split("|")[4:11]] == [
        "2", "0.562 ± 0.794", "1.125 ± 1.588", "3.000 ± 0.000", "0.562 ± 0.794", "0.000 ± 0.000", "0.250 ± 0.000",
    ]  # fmt: skip
    assert "Strong families before training: A in A-B 0.500 (a); B in A-B 0.500 (a); " in page.read_text()
    # The one family of a fake run goes from .5 or .625 (GRPO) to .75 or .875 (GRAFT): less than the .3 that count.
    assert "| A-B | `graft` | 0.00 | 0.00 |  |" in lines
    table = list(csv.DictReader((page.parent / "scion-regimes.csv").read_text().splitlines()))
    assert tuple(table[0]) == ("regime", "pair", "model", "method", "seed", "pass1", "pass8", "wall_s")
    assert len(table) == 2 * 2 * 4 * 2 and {row["regime"] for row in table} == {"base", "style"}
    first = next(row for row in table if (row["pair"], row["method"], row["seed"]) == ("A-B-style", "graft", "1"))
    assert (float(first["pass1"]), float(first["pass8"]), float(first["wall_s"])) == (0.875, 1.75, 5.0)
    details = csv.DictReader((page.parent / "scion-regimes-details.csv").read_text().splitlines())
    assert {row["forgotten"] for row in details} <= {"0.0"}
    families = list(csv.DictReader((page.parent / "scion-regimes-families.csv").read_text().splitlines()))
    assert len(families) == 2 * len(table)  # two in a fake run
    a, b = (
        row
        for row in families
        if (row["pair"], row["model"], row["method"], row["seed"]) == ("A-B-style", "B", "graft", "1")
    )
    assert (a["family"], a["start"], a["pass1"]) == ("a", "0.5", "0.875")
    assert (b["family"], b["start"], b["pass1"]) == ("b", "0.0", "0.25")


def test_families_that_a_method_loses_are_named(
    tmp_path: Path, training: FakeTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Family a is .25 better with GRAFT, family b the same; a drop of .2 counts here."""
    monkeypatch.setattr(pages, "FALL", 0.2)
    study = replace(STUDIES["scion-regimes"], name="families", references=("grpo", "graft"), parts=("families",))
    monkeypatch.setitem(STUDIES, study.name, study)
    (page,), _ = _run(["families"], _options(tmp_path))
    lines = page.read_text().splitlines()
    assert "| A-B | `graft` | 0.00 | 1.00 |  |" in lines
    assert "| A-B | `sgt` | 1.00 | 0.00 | A a, B a |" in lines


def test_the_best_setting_of_a_pair_is_what_the_reference_is_compared_with(
    tmp_path: Path, training: FakeTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRAFT, .25 better than all others with both seeds, stands for a setting."""
    study = replace(STUDIES["scion-rivals"], name="best", methods=("grpo", "sgt", "graft", "scion"), parts=("tuned",))
    monkeypatch.setitem(STUDIES, study.name, replace(study, tuned=("sgt", "graft")))
    lines = _run(["best"], _options(tmp_path))[0][0].read_text().splitlines()
    assert "| A-B | 2 | 0.562 | **0.812** | -0.250 ± 0.000 |" in lines
    assert "`scion` − best setting: above 0 in 0 of 1 pairs; mean over pairs -0.250." in lines


def test_the_rivals_over_all_sections_by_hand(tmp_path: Path, training: FakeTraining) -> None:
    """All methods alike but GRAFT, which solves two questions of eight more with every seed: pass@1 by .25, and what
    stands for pass@8 by twice that."""
    (page,), _ = _run(["scion"], _options(tmp_path, pairs=("A-B", "A-B-style")))
    lines = page.read_text().splitlines()
    assert "| `sgt` | 2 | 0 | 0 | 0 | 0 | +0.000 ± 0.000 |  | 0 | +0.000 ± 0.000 |" in lines
    where = "A-B -0.250, A-B-style -0.250"
    assert f"| `graft` | 2 | 0 | 0 | 2 | 2 | -0.250 ± 0.000 | {where} | 0 | -0.500 ± 0.000 |" in lines
    best = "best of `sgt-0.03`, `sgt`, `sgt-0.3`, `sgt-1`"
    assert f"| {best} | 2 | 0 |  | 0 |  | +0.000 ± 0.000 |  | 0 | +0.000 ± 0.000 |" in lines


def test_a_study_that_includes_others_is_one_page_and_one_table(tmp_path: Path, training: FakeTraining) -> None:
    options = _options(tmp_path, seeds=1)
    (page,), _ = _run(["scion"], options)
    headings = [line for line in page.read_text().splitlines() if line.startswith("#")]
    overview = "## `scion` against its rivals"
    assert headings[:4] == ["# SCION", overview, "## SCION in every regime", "### What came out"]
    *opened, held_out = STUDIES["scion"].includes
    assert [h for h in headings if h.startswith("## ")] == [overview, *(f"## {STUDIES[name].title}" for name in opened)]
    assert held_out == "scion-held-out"  # which waits to be opened
    assert "Missing" not in page.read_text()
    regimes = training.trained[:5]
    assert regimes == ["A grpo seed 0", "B grpo seed 0", "A-B graft seed 0", "A-B sgt seed 0", "A-B scion seed 0"]
    table = list(csv.DictReader((page.parent / "scion.csv").read_text().splitlines()))
    assert len(table) == 2 * len({m for name in opened for m in STUDIES[name].methods})
    trained = len(training.trained)
    _run(["scion-ablation", "regimes"], options)
    assert len(training.trained) == trained  # A-B of both is there already


def test_pages_of_a_part_of_the_runs_say_what_is_missing(tmp_path: Path, training: FakeTraining) -> None:
    training.failing = "scion"
    with pytest.raises(RunError):
        _run(["scion-regimes"], _options(tmp_path, seeds=1))
    (page,), _ = _run(["scion"], _options(tmp_path, seeds=1), tables_only=True)
    text = page.read_text()
    assert "**Missing: " in text and "A-B scion seed 0" in text and "No result yet." not in text
    assert "`sgt` − `grpo`" in text and "`scion` − `grpo`" not in text


def test_what_is_kept_for_the_end_is_listed_and_not_trained(tmp_path: Path, training: FakeTraining) -> None:
    options = _options(tmp_path, seeds=1, pairs=())
    with pytest.raises(ConfigError, match="A-C-mixed is kept for the end: nothing but grpo"):
        _run(["scion-held-out"], options)
    with pytest.raises(ConfigError, match="B-C-one-sided is kept for the end"):
        _run(["main"], replace(options, pairs=("B-C-one-sided",)))
    console = Console(file=io.StringIO())
    list_runs(["scion-ablation"], options, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "kept for the end, opened by --held-out: A-C-mixed, B-C-one-sided" in said
    assert not any("mixed" in run["run"] for run in planned_runs(["all"], options)["runs"])
    assert not any("mixed" in run["run"] for run in planned_runs(["scion"], options)["runs"])
    assert any("mixed" in run["run"] for run in planned_runs(["scion"], replace(options, held_out=True))["runs"])
    _run(["scion-held-out"], replace(options, held_out=True))
    assert "A-C mixed scion seed 0" in training.trained


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
    assert CliRunner().invoke(app, ["lab", "scion", "--dry-run", "--held-out"]).exit_code == 0
    assert given[1] == (["scion"], Options(held_out=True))
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

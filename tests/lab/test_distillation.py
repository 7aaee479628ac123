"""The study of transfers: the fit of lambda, costs, verdicts and the page, from numbers that are known."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from fake_runs import RECIPE, laboratory, write_run
from rich.console import Console

from graftrl.evaluation.significance import PairedTest, paired_t_test
from graftrl.lab import distillation, figures, harness
from graftrl.lab.distillation import cost_to_reach, course, difference, of, verdict
from graftrl.lab.harness import Options, run_lab
from graftrl.lab.optimum import fit_optimum
from graftrl.lab.pages import Page, render
from graftrl.lab.pairs import TRANSFERS
from graftrl.lab.plan import Laboratory, RunKey, cells_of, pairs_of, runs_of
from graftrl.lab.results import TRANSFER_COLUMNS, read_result, to_csv, transfer_rows
from graftrl.lab.studies import CALIBRATIONS, STUDIES
from graftrl.report.plots import COLORS

STUDY = STUDIES["distillation"]


# The fit --------------------------------------------------------------------------------------------------------------


def _parabola(top: float, height: float = 0.7, curvature: float = 0.2) -> dict[float, float]:
    return {value: height - curvature * np.log(value / top) ** 2 for value in CALIBRATIONS}


@pytest.mark.parametrize("top", [0.6, 1.0, 1.7])
def test_the_top_of_a_parabola_in_log_lambda_is_found(top: float) -> None:
    optimum = fit_optimum({value: {0: y, 1: y + 0.01} for value, y in _parabola(top).items()})
    assert optimum.value == pytest.approx(top)
    assert (optimum.low, optimum.high) == pytest.approx((top, top))  # the seeds differ by a constant
    assert optimum.inside == 1.0
    assert optimum.at(top) == pytest.approx(0.705)


def test_the_interval_reaches_over_the_tops_of_the_seeds() -> None:
    first, second = _parabola(0.8), _parabola(1.25)
    optimum = fit_optimum({value: {0: first[value], 1: second[value]} for value in CALIBRATIONS})
    assert optimum.value == pytest.approx(1.0)
    assert (optimum.low, optimum.high) == pytest.approx((0.8, 1.25))


@pytest.mark.parametrize(("slope", "end"), [(0.1, 2.0), (-0.1, 0.5)])
def test_without_a_top_inside_the_better_end_is_told(slope: float, end: float) -> None:
    rising = {value: {0: slope * np.log(value), 1: 0.1 + slope * np.log(value)} for value in CALIBRATIONS}
    optimum = fit_optimum(rising)
    assert optimum.value == pytest.approx(end)
    assert optimum.inside == 0.0
    valley = fit_optimum({value: {0: -y} for value, y in _parabola(1.1).items()})  # a parabola that opens upwards
    assert valley.value == pytest.approx(0.5)


def test_seeds_that_a_lambda_lacks_are_left_out_and_too_little_is_refused() -> None:
    table = {value: {0: y, 1: 1.0} for value, y in _parabola(1.3).items()}
    del table[0.5][1]
    assert fit_optimum(table).value == pytest.approx(1.3)
    with pytest.raises(ValueError, match="three values of lambda"):
        fit_optimum({1.0: {0: 0.5}, 2.0: {0: 0.4}})


# Claims and costs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "half", "direction", "expected"),
    [
        (0.10, 0.05, 1, "holds"),
        (0.10, 0.05, -1, "does not hold"),
        (0.10, 0.05, 0, "does not hold"),
        (0.04, 0.05, 1, "undecided"),
        (0.04, 0.05, 0, "holds"),
        (-0.10, 0.05, 1, "does not hold"),
        (-0.10, 0.05, -1, "holds"),
        (0.10, None, 1, "one seed: not tested"),
    ],
)
def test_a_claim_about_a_sign_is_held_against_the_interval(
    mean: float, half: float | None, direction: int, expected: str
) -> None:
    assert verdict(PairedTest(mean, half, None, 3), direction) == expected


def test_differences_are_paired_by_the_seeds_that_both_have() -> None:
    assert difference({0: 0.5, 1: 0.7, 2: 0.9}, {1: 0.6, 2: 0.6}) == paired_t_test([0.7, 0.9], [0.6, 0.6])
    assert difference({0: 0.5}, {1: 0.5}) is None
    assert verdict(None, 1) == "not measured"


@pytest.mark.parametrize(("level", "cost"), [(0.1, 0.0), (0.3, 5.0), (0.5, 12.5), (0.7, None)])
def test_the_cost_of_a_level_is_read_between_evaluations(level: float, cost: float | None) -> None:
    assert cost_to_reach([(0.0, 0.2), (10.0, 0.4), (15.0, 0.6), (20.0, 0.5)], level) == pytest.approx(cost)


# The page -------------------------------------------------------------------------------------------------------------


def _right(key: RunKey) -> int:
    """How many of the eight prompts a run solves at its end; its first two select, six test."""
    ours = {"grpo": 5, "opd": 6, "p_opd": 7, "p_opd-spans": 7, "opd-spans": 6}.get(key.method, 6)
    if key.models != ("A",) and key.source is None:
        ours = 4
    return ours + (key.method == "p_opd" and key.seed == 1)


def _train(lab: Laboratory, keys: list[RunKey]) -> None:
    for key in keys:
        steps = lab.steps_of(key)
        course = {0: 5 + key.seed % 2 if key.start else 1, 5: 1, 10: _right(key)}
        assert steps == 10
        write_run(lab.job(key, 1.0), dict.fromkeys(key.models, course))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    """All runs of three seeds, of ten steps."""
    lab = laboratory(tmp_path_factory.mktemp("distillation"))
    _train(lab, runs_of(cells_of(STUDY, pairs_of(STUDY), 3)))
    return lab


@pytest.fixture(scope="module")
def page(lab: Laboratory) -> Page:
    pairs = pairs_of(STUDY)
    results = [result for cell in cells_of(STUDY, pairs, 3) if (result := read_result(lab, cell)) is not None]
    return Page(STUDY, pairs, results)


def test_scores_of_a_transfer_by_hand(page: Page) -> None:
    """Eight prompts: P-OPD solves 7, and 8 with seed 1, so 5 and 6 of the six that test."""
    assert of(page, "M-A", "p_opd") == {0: pytest.approx(5 / 6), 1: 1.0, 2: pytest.approx(5 / 6)}
    assert of(page, "M-A", "before") == dict.fromkeys(range(3), 0.0)
    assert of(page, "M-A_trained", "before") == {0: 0.5, 1: pytest.approx(4 / 6), 2: 0.5}
    assert of(page, "M-B", "p_opd") == dict.fromkeys(range(3), pytest.approx(5 / 6))  # by spans


def test_the_page_says_what_came_out_beside_the_papers_claims(page: Page) -> None:
    text = render(STUDY, [page], "- how it was made")
    assert text.startswith("# Distillation from a proxy\n")
    first = text.index("## What came out")
    assert all(text.index(heading) > first for heading in ("## Scores", "## Lambda", "## Cost to reach a score"))
    row = next(line for line in text.splitlines() if line.startswith("| P-OPD against OPD, M → A:"))
    said = paired_t_test([5 / 6, 1, 5 / 6], [4 / 6, 4 / 6, 4 / 6])
    assert f"P-OPD 0.889, OPD 0.667: {said.mean:+.3f} ± {said.half_width:.3f} (3 seeds)" in row
    assert "4B → 8B: P-OPD 47.5, OPD 43.6 (+3.9)" in row
    assert row.endswith("| undecided |")  # the interval reaches below 0
    pulled = next(line for line in text.splitlines() if line.startswith("| OPD against the target's start, M → A (tr"))
    assert "0.556 to 0.667: +0.111 ± 0.239 (3 seeds)" in pulled and pulled.endswith("| undecided |")
    assert "Before training: A 0.556." in text
    weaker = next(
        line for line in text.splitlines() if line.startswith("| What reinforcement learning gave the proxy M")
    )
    assert "0.000 to 0.333: +0.333 ± 0.000 (3 seeds)" in weaker and weaker.endswith("| holds |")
    assert "nan" not in text
    assert set(page.plots) == {f"distillation-{name}-M-A.svg" for name in ("lambda", "budget", "cost", "curves")}
    for name in page.plots:
        assert f"]({name})" in text


def test_the_proxys_own_cost_is_added(page: Page) -> None:
    """A step costs half a second and 100 tokens; ten steps of the proxy before the target's ten."""
    result = page.of(TRANSFERS["M-A"], "p_opd")[0]
    assert course(result, "training, s") == [(0.0, 0.125), (2.5, 0.125), (5.0, 0.875)]
    text = distillation.reaching(page)
    row = next(line for line in text.splitlines() if line.startswith("| 0.5 |"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    seconds, tokens = cells[3:5], cells[7:9]
    at = [2.5 + 2.5 * 0.375 / 0.75, 2.5 + 2.5 * 0.375 / 0.875, 2.5 + 2.5 * 0.375 / 0.75]
    assert seconds == [f"{np.mean(at):.0f}", f"{np.mean(at) + 5:.0f}"]
    assert tokens == [f"{200 * np.mean(at):.0f}", f"{200 * np.mean(at) + 1000:,.0f}"]


def test_a_line_keeps_its_colour_where_a_panel_lacks_another() -> None:
    points = [(0.0, 0.2, None), (1.0, 0.4, 0.1)]
    svg = figures.lines_with_intervals({"all": {"a": points, "b": points}, "few": {"b": points}}, ["x", "x"], "y")
    assert svg.count(COLORS[1]) > svg.count(COLORS[0]) > 0


def test_parts_without_their_runs_are_left_out(page: Page) -> None:
    few = Page(STUDY, page.pairs, [r for r in page.results if r.cell.method in ("grpo", "opd") and r.cell.seed == 0])
    text = render(STUDY, [few], "- made")
    assert "## Lambda" not in text and "not measured" in text and "one seed: not tested" in text


def test_raw_numbers_have_the_promised_columns(page: Page) -> None:
    assert TRANSFER_COLUMNS == ("target", "proxy", "method", "lambda", "seed", "score", "wall_s")
    table = list(csv.DictReader(to_csv(transfer_rows(page.results), TRANSFER_COLUMNS).splitlines()))
    assert tuple(table[0]) == TRANSFER_COLUMNS
    assert len({tuple(row[c] for c in TRANSFER_COLUMNS[:5]) for row in table}) == len(table)
    rows = {(row["target"], row["proxy"], row["method"], row["seed"]): row for row in table}
    assert rows["A", "M", "p_opd", "1"] | {"score": "", "wall_s": ""} == {
        "target": "A", "proxy": "M", "method": "p_opd", "lambda": "1.0", "seed": "1", "score": "", "wall_s": "",
    }  # fmt: skip
    assert rows["A", "M", "p_opd-lambda-0.5", "0"]["lambda"] == "0.5"
    assert rows["A", "M", "opd", "0"]["lambda"] == ""
    assert rows["A", "", "grpo", "0"]["wall_s"] == "5.0"  # once, though several transfers compare with it
    assert rows["A", "", "before", "0"]["score"] == "0.0"
    assert {"A_trained", "B", "S", "M", "P"} <= {row["target"] for row in table}


def test_a_page_says_how_many_steps_the_methods_have(tmp_path: Path) -> None:
    options = Options(RECIPE, tmp_path / "lab", tmp_path)
    (written,) = run_lab(["distillation"], options, Console(file=io.StringIO()), tables_only=True)
    assert "Runs: 30 steps, 40 of `grpo` and `rstg`, of 32 prompts × 8 responses" in written.read_text()


def test_the_command_writes_the_page_and_its_own_table_alone(
    lab: Laboratory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "run_jobs", lambda *arguments: pytest.fail("nothing is trained"))
    options = Options(RECIPE, lab.root, tmp_path, seeds=3, pairs=("M-A", "M"), steps=10)
    (written,) = run_lab(["distillation"], options, Console(file=io.StringIO()), tables_only=True)
    assert written == tmp_path / "distillation.md"
    assert "Runs: 10 steps of 32 prompts" in written.read_text()
    assert (tmp_path / "distillation.csv").exists() and not (tmp_path / "lab.csv").exists()

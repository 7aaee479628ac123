"""Selection, scores, costs, comparisons and raw numbers, by hand."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_runs import laboratory, write_run
from scipy import stats

from graftrl.errors import DataError
from graftrl.evaluation.significance import paired_t_test
from graftrl.lab.pairs import PAIRS
from graftrl.lab.plan import Laboratory, RunKey, cell_of
from graftrl.lab.results import (
    BOTH,
    COLUMNS,
    DETAILS,
    Cost,
    Result,
    compare,
    read_outcome,
    read_result,
    rows,
    scores,
    to_csv,
)

PAIR = PAIRS["A-B"]


def _train(lab: Laboratory, method: str, seed: int, right: Mapping[str, Mapping[int, int]]) -> Result | None:
    cell = cell_of(PAIR, method, seed)
    for key in cell.runs:
        write_run(lab.job(key, 1.0), {model: right[model] for model in key.models})
    return read_result(lab, cell)


def test_the_first_best_step_on_the_selection_prompts_is_tested_on_the_others(tmp_path: Path) -> None:
    """Of eight prompts the first two select: one right is .5, two or more are 1. The last six test."""
    lab = laboratory(tmp_path)
    result = _train(lab, "graft", 0, {"A": {0: 2, 4: 1, 6: 5, 10: 3}, "B": {0: 0, 4: 1, 6: 0, 10: 0}})
    assert result is not None
    a, b = result.outcomes["A"], result.outcomes["B"]
    assert (a.selected_step, a.validation, a.score, a.last_score) == (6, 1.0, 0.5, pytest.approx(1 / 6))
    assert (b.selected_step, b.validation, b.score, b.last_score) == (4, 0.5, 0.0, 0.0)
    assert a.curve == {0: 1.0, 4: 0.5, 6: 1.0, 10: 1.0}  # the start does not count, though it is as good
    assert a.before == 0.0
    assert result.score(BOTH) == pytest.approx(0.25)
    assert result.score("A", last=True) == pytest.approx(1 / 6)


def test_costs_of_joint_and_of_separate_runs(tmp_path: Path) -> None:
    """A is selected at step 6, B at step 4. A step costs half a second, 100 generated and 90 trained tokens."""
    lab = laboratory(tmp_path)
    right = {"A": {0: 0, 4: 1, 6: 5, 10: 3}, "B": {0: 0, 4: 1, 6: 0, 10: 0}}
    joint, separate = _train(lab, "graft", 0, right), _train(lab, "grpo", 0, right)
    assert joint is not None and separate is not None
    assert joint.selected == Cost(3.0, 600, 540)  # up to the later of both
    assert joint.full == Cost(5.0, 1000, 900)
    assert separate.selected == Cost(5.0, 1000, 900)  # 6 steps of A's run and 4 of B's
    assert separate.full == Cost(10.0, 2000, 1800)
    assert separate.run.models == ["A", "B"]
    assert separate.run.metrics[-1]["cost"]["sampled_tokens"] == 2000


def test_unfinished_cells_have_no_result(tmp_path: Path) -> None:
    lab = laboratory(tmp_path)
    write_run(lab.job(RunKey("base", ("A",), "grpo", 0), 1.0), {"A": {0: 1, 10: 2}})
    assert read_result(lab, cell_of(PAIR, "grpo", 0)) is None  # B is missing


def test_a_run_without_its_last_evaluation_is_named(tmp_path: Path) -> None:
    lab = laboratory(tmp_path)
    key = RunKey("base", ("A",), "grpo", 0)
    write_run(lab.job(key, 1.0), {"A": {0: 1, 4: 2}})
    with pytest.raises(DataError, match="grpo-seed0: was not evaluated"):
        read_outcome(lab.read(key), "A")


@pytest.fixture
def trained(tmp_path: Path) -> list[Result]:
    """Test scores of A in sixths, by seed: GRPO 1, 2, 3; GRAFT 2, 4, 6. B has 3 with both."""
    lab = laboratory(tmp_path)
    found = []
    for seed in range(3):
        for method, of_a in (("grpo", 1 + seed), ("graft", 2 * (1 + seed))):
            right = {"A": {0: 1, 5: 1, 10: 2 + of_a}, "B": {0: 1, 5: 1, 10: 5}}
            found.append(_train(lab, method, seed, right))
    return [result for result in found if result is not None]


def test_comparisons_are_paired_by_seed_and_corrected_over_the_models(trained: list[Result]) -> None:
    assert scores(trained, PAIR, "graft", "A") == {0: pytest.approx(2 / 6), 1: pytest.approx(4 / 6), 2: 1.0}
    a, b, both = compare(trained, [PAIR], ["grpo", "graft"], "grpo")
    assert (a.model, b.model, both.model) == ("A", "B", BOTH)
    expected = stats.ttest_rel([2 / 6, 4 / 6, 6 / 6], [1 / 6, 2 / 6, 3 / 6])
    assert a.test.mean == pytest.approx(2 / 6)
    assert a.test.p == pytest.approx(expected.pvalue)
    low, high = expected.confidence_interval(0.95)
    assert a.test.half_width == pytest.approx((high - low) / 2)
    assert both.test.mean == pytest.approx(1 / 6)
    assert a.p_holm == pytest.approx(2 * expected.pvalue)  # two models were tested
    assert (b.test.p, b.p_holm, both.p_holm) == (1.0, 1.0, None)


def test_seeds_that_one_method_lacks_are_left_out(trained: list[Result]) -> None:
    fewer = [r for r in trained if (r.cell.method, r.cell.seed) != ("graft", 1)]
    a, *_ = compare(fewer, [PAIR], ["graft"], "grpo")
    assert a.test.n == 2
    assert a.test.mean == pytest.approx((1 / 6 + 3 / 6) / 2)
    one, *_ = compare(fewer[:2], [PAIR], ["graft"], "grpo")
    assert one.verdict(corrected=True) == "not tested"


@pytest.mark.parametrize(
    ("ours", "corrected", "verdict"),
    [
        ([0.5, 0.52, 0.54], True, "higher"),
        ([0.1, 0.12, 0.14], True, "lower"),
        ([0.1, 0.5, 0.5], True, "not distinguishable"),
    ],
)
def test_verdicts_follow_sign_and_significance(
    ours: list[float], corrected: bool, verdict: str, trained: list[Result]
) -> None:
    c = compare(trained, [PAIR], ["graft"], "grpo")[0]
    test = paired_t_test(ours, [0.3, 0.31, 0.32])
    assert replace(c, test=test, p_holm=test.p).verdict(corrected) == verdict


def test_the_correction_can_turn_a_verdict(trained: list[Result]) -> None:
    a = compare(trained, [PAIR], ["graft"], "grpo")[0]
    assert a.test.p == pytest.approx(0.0742, abs=1e-4)
    assert a.verdict(corrected=False) == "not distinguishable"
    strong = replace(a, test=replace(a.test, p=0.03), p_holm=0.06)
    assert strong.verdict(corrected=False) == "higher"
    assert strong.verdict(corrected=True) == "not distinguishable"


def test_raw_numbers_have_the_promised_columns_and_one_row_per_model(trained: list[Result]) -> None:
    assert COLUMNS == ("pair", "model", "method", "seed", "score", "wall_s", "generated_tokens", "trained_tokens")
    table = list(csv.DictReader(to_csv(rows(trained), COLUMNS).splitlines()))
    assert tuple(table[0]) == COLUMNS
    assert len(table) == 3 * 2 * 2
    first = next(row for row in table if (row["model"], row["method"], row["seed"]) == ("A", "graft", "1"))
    assert first == {
        "pair": "A-B", "model": "A", "method": "graft", "seed": "1", "score": "0.666667", "wall_s": "5.0",
        "generated_tokens": "1000", "trained_tokens": "900",
    }  # fmt: skip
    details = list(csv.DictReader(to_csv(rows(trained), DETAILS).splitlines()))
    assert {row["selected_step"] for row in details} == {"10"}
    assert np.mean([float(row["before"]) for row in details]) == 0.0

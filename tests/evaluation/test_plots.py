"""The picture of pass@k shows the numbers of the result."""

from __future__ import annotations

import numpy as np
import pytest

from graftrl.evaluation.passk import pass_at_k
from graftrl.evaluation.plots import pass_at_k_curves
from graftrl.evaluation.report import BenchmarkInfo, EvaluationReport
from graftrl.evaluation.scores import Answers, score_model


def test_every_model_has_its_curve_with_the_unbiased_values_in_each_panel() -> None:
    rng = np.random.default_rng(0)
    right = {model: {name: rng.integers(0, 5, (2, n)) for name, n in (("x", 6), ("y", 9))} for model in ("A", "B")}
    zeros = {name: np.zeros((2, n), dtype=np.int64) for name, n in (("x", 6), ("y", 9))}
    scores = {
        model: score_model(
            {
                name: Answers(tuple(map(str, range(r.shape[1]))), 4, r, zeros[name], zeros[name])
                for name, r in of.items()
            },
            [1, 2, 8],
        )
        for model, of in right.items()
    }
    info = {name: BenchmarkInfo("math", name, n, n, []) for name, n in (("x", 6), ("y", 9))}
    figure = pass_at_k_curves(EvaluationReport({}, info, {}, scores, [], []))
    assert [axis.get_title() for axis in figure.axes] == ["x, 6 problems", "y, 9 problems"]
    for axis, name in zip(figure.axes, ("x", "y"), strict=True):
        assert axis.get_ylim()[0] == 0 and axis.get_xscale() == "log"
        for line, band, model in zip(axis.lines, axis.collections, ("A", "B"), strict=True):
            expected = [np.mean([pass_at_k(8, int(c), k) for c in right[model][name].sum(axis=0)]) for k in (1, 2, 8)]
            assert (line.get_label(), line.get_xdata().tolist()) == (model, [1, 2, 8])
            assert line.get_ydata() == pytest.approx(expected)
            curve = scores[model].benchmarks[name].pass_at
            corners = {(float(x), float(y)) for x, y in band.get_paths()[0].vertices}
            assert {(float(k), e.low) for k, e in curve.items()} | {
                (float(k), e.high) for k, e in curve.items()
            } <= corners

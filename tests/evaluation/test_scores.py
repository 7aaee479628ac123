"""Numbers from counts: by hand, and against a second implementation from single responses."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from graftrl.errors import DataError
from graftrl.evaluation.scores import SCORE, Answers, compare_models, read_answers, score_model
from graftrl.logs.rollouts import write_rollouts
from graftrl.policies.config import SamplingSettings
from graftrl.rollout import Group, Prompt, Response


def answers(right: list[list[int]], samples: int) -> Answers:
    counts = np.array(right)
    ids = tuple(f"p{i}" for i in range(counts.shape[1]))
    return Answers(ids, samples, counts, 10 * np.ones_like(counts), counts % 2, Counter({"wrong answer": 1}))


def test_pass_at_1_by_hand():
    """Two runs of two samples on two problems: run 1 has 2 + 0 right, run 2 has 1 + 1."""
    result = score_model({"m": answers([[2, 0], [1, 1]], 2)}, [1, 2, 4])
    of = result.benchmarks["m"]
    assert of.pass_at_1.mean == 0.5 and of.pass_at_1.runs == [0.5, 0.5] and of.pass_at_1.deviation == 0.0
    # of four responses 3 and 1 are right: pass@2 = 1 and 1 - C(3, 2) / C(4, 2) = 1/2
    assert (of.pass_at[1].value, of.pass_at[2].value, of.pass_at[4].value) == (0.5, 0.75, 1.0)
    assert (of.tokens_mean, of.truncated) == (5.0, 2 / 8)
    assert result.score == of.pass_at_1 and result.score_pass_at == of.pass_at


def test_the_score_is_the_unweighted_mean_over_benchmarks_of_each_run():
    small = answers([[4], [2]], 4)
    large = answers([[0, 0, 0, 4], [0, 0, 0, 0]], 4)
    score = score_model({"small": small, "large": large}, [1]).score
    assert score.runs == [(1.0 + 0.25) / 2, (0.5 + 0.0) / 2]
    assert score.mean == pytest.approx((0.75 + 0.125) / 2)
    assert score.deviation == pytest.approx((0.625 - 0.25) / 2**0.5)
    assert score_model({"small": answers([[4]], 4)}, [1]).score.deviation is None


def test_pass_at_k_equals_enumeration_over_single_responses():
    rng = np.random.default_rng(0)
    responses = rng.random((3, 2, 5)) < 0.3  # runs, samples, problems
    ks = [1, 2, 3, 6]
    result = score_model({"m": answers(responses.sum(axis=1).tolist(), 2)}, ks)
    pooled = responses.reshape(6, 5)
    for k in ks:
        solved = [
            np.mean([any(draw) for draw in itertools.combinations(pooled[:, problem].tolist(), k)])
            for problem in range(5)
        ]
        assert result.benchmarks["m"].pass_at[k].value == pytest.approx(np.mean(solved))
        estimate = result.benchmarks["m"].pass_at[k]
        assert estimate.low <= estimate.value <= estimate.high


def test_models_are_compared_with_the_first_problem_by_problem():
    first = {"m": answers([[4, 0, 2, 1]], 4), "n": answers([[0, 0]], 4)}
    other = {"m": answers([[4, 2, 4, 0]], 4), "n": answers([[1, 1]], 4)}
    on_m, on_n, score = compare_models({"first": first, "other": other})
    assert (on_m.model, on_m.baseline, on_m.on) == ("other", "first", "m")
    assert on_m.difference.value == pytest.approx((0 + 0.5 + 0.5 - 0.25) / 4)
    assert (on_m.better, on_m.worse, on_m.p_holm) == (2, 1, None)
    assert on_m.p == 4 / 8  # +-2 +-2 +-1: as large as 3 for four of eight sign patterns
    assert on_n.difference.value == on_n.difference.low == on_n.difference.high == 0.25
    assert score.on == SCORE and score.difference.value == pytest.approx((0.1875 + 0.25) / 2)
    assert (score.better, score.worse) == (4, 1) and score.p_holm == score.p


def test_pairing_narrows_the_interval_of_models_that_solve_the_same_problems():
    rng = np.random.default_rng(2)
    easy = rng.integers(0, 9, size=60)
    first, other = answers([easy.tolist()], 8), answers([np.minimum(easy + 1, 8).tolist()], 8)
    alone = score_model({"m": first}, [1]).score
    (comparison,) = compare_models({"first": {"m": first}, "other": {"m": other}})
    assert comparison.difference.high - comparison.difference.low < (alone.high - alone.low) / 5
    assert comparison.difference.low > 0 and comparison.p < 0.001


def test_the_scores_of_several_models_are_corrected_together():
    names = {name: {"m": answers([row], 8)} for name, row in {"a": [4] * 6, "b": [5] * 6, "c": [4] * 5 + [5]}.items()}
    b, c = compare_models(names)
    assert (b.p, c.p) == (2 / 64, 1.0)
    assert (b.p_holm, c.p_holm) == (4 / 64, 1.0)


def write(path, prompts, n, model="A", step=1):
    groups = [
        Group(
            model,
            Prompt(prompt, ({"role": "user", "content": "?"},), "1", "m"),
            [
                Response(
                    "x", np.arange(3), np.zeros(3, np.float32), "length" if i else "stop", float(i == 0), f"reason {i}"
                )
                for i in range(n)
            ],
        )
        for prompt in prompts
    ]
    write_rollouts(
        path, run="r", step=step, groups={model: groups}, sampling=SamplingSettings(), fingerprints={model: "t"}
    )


def test_answers_are_counted_by_run_and_problem_in_the_benchmarks_order(tmp_path):
    write(tmp_path / "run-01-chunk-0001.parquet", ["b", "a"], 2)
    write(tmp_path / "run-01-chunk-0002.parquet", ["c"], 2)
    write(tmp_path / "run-02-chunk-0001.parquet", ["b", "a"], 2, step=2)
    write(tmp_path / "run-02-chunk-0002.parquet", ["c"], 2, step=2)
    files = sorted(tmp_path.glob("*.parquet"))
    found = read_answers(files, ["b", "a"], runs=2, samples=2)
    assert found.problems == ("b", "a")
    assert found.right.tolist() == [[1, 1], [1, 1]] and found.tokens.tolist() == [[6, 6], [6, 6]]
    assert found.cut.tolist() == [[1, 1], [1, 1]] and found.reasons == {"reason 0": 4, "reason 1": 4}
    with pytest.raises(DataError, match="run 1 has 2 responses to problem 'b', not 3"):
        read_answers(files, ["b", "a"], runs=2, samples=3)
    with pytest.raises(DataError, match="run 1 has 0 responses to problem 'd'"):
        read_answers(files, ["d"], runs=2, samples=2)

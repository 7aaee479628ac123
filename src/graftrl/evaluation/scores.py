"""From graded responses to numbers: pass@1 over runs, pass@k, intervals over problems, paired comparisons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from graftrl.errors import DataError
from graftrl.evaluation.intervals import Estimate, bootstrap_interval, stratified_bootstrap_interval
from graftrl.evaluation.passk import pass_at_k
from graftrl.evaluation.significance import holm, sign_flip_test
from graftrl.logs.reader import check_file, scan_many


@dataclass(frozen=True)
class Answers:
    """What one model answered to one benchmark.

    problems: ids. samples: responses to each problem in each run.
    right, tokens, cut: int64 [runs, problems]: right responses, tokens of all responses, responses cut at the limit.
    reasons: the verifier's reasons, with how many responses each was given for.
    """

    problems: tuple[str, ...]
    samples: int
    right: NDArray[np.int64]
    tokens: NDArray[np.int64]
    cut: NDArray[np.int64]
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def runs(self) -> int:
        return len(self.right)

    @property
    def responses(self) -> int:
        """Per problem, over all runs."""
        return self.samples * self.runs

    @property
    def rates(self) -> NDArray[np.float64]:
        """Share of right responses to each problem over all runs, float64 [problems]."""
        return self.right.sum(axis=0) / self.responses


@dataclass(frozen=True)
class PassAtOne:
    """mean: over responses, then problems (of a score: then benchmarks). runs: the same of each run; deviation: their
    standard deviation (n - 1), None for one run. low, high: 95 % bootstrap interval over problems."""

    mean: float
    deviation: float | None
    low: float
    high: float
    runs: list[float]


@dataclass(frozen=True)
class BenchmarkScore:
    """samples: per problem and run. pass_at: `{k: estimate}`, unbiased, from the responses of all runs.

    tokens_mean: of a response. truncated: share of responses cut at the limit.
    """

    problems: int
    samples: int
    pass_at_1: PassAtOne
    pass_at: dict[int, Estimate]
    tokens_mean: float
    truncated: float
    reasons: dict[str, int]


@dataclass(frozen=True)
class ModelScore:
    """score, score_pass_at: the unweighted means over benchmarks."""

    benchmarks: dict[str, BenchmarkScore]
    score: PassAtOne
    score_pass_at: dict[int, Estimate]


@dataclass(frozen=True)
class Comparison:
    """A model minus the baseline, paired by problem, on one benchmark or ("score") on their unweighted mean.

    difference: of pass@1, with its 95 % paired bootstrap interval over problems. p: of no difference, by sign flips.
    p_holm: corrected for the number of models compared with the baseline; of scores only.
    better, worse: problems that the model solves more often or less often.
    """

    model: str
    baseline: str
    on: str
    difference: Estimate
    p: float
    p_holm: float | None
    better: int
    worse: int


SCORE = "score"


def read_answers(files: Sequence[Path], problems: Sequence[str], runs: int, samples: int) -> Answers:
    """The answers in the files of one model and benchmark; problems beyond `problems` are not counted.

    Raises:
        DataError: a file that cannot be read; a problem without its `samples` responses in one of the runs.
    """
    for file in files:
        check_file(file)
    index = {problem: i for i, problem in enumerate(problems)}
    right, tokens, cut, count = (np.zeros((runs, len(problems)), dtype=np.int64) for _ in range(4))
    reasons: Counter[str] = Counter()

    def per_problem(frame: pl.LazyFrame) -> pl.LazyFrame:
        return frame.group_by("step", "prompt_id", "grade_reason").agg(
            (pl.col("reward") == 1.0).sum().alias("right"),
            pl.col("token_ids").list.len().sum().cast(pl.Int64).alias("tokens"),
            (pl.col("finish_reason") == "length").sum().alias("cut"),
            pl.len().alias("count"),
        )

    for part in scan_many(files, per_problem):
        for run, problem, reason, *values in part.iter_rows():
            if problem in index:
                at = (run - 1, index[problem])
                for array, value in zip((right, tokens, cut, count), values, strict=True):
                    array[at] += value
                reasons[reason] += values[-1]
    wrong = np.argwhere(count != samples)
    if len(wrong):
        run, problem = wrong[0]
        raise DataError(
            f"{files[0].parent}: run {run + 1} has {count[run, problem]} responses to problem {problems[problem]!r}, "
            f"not {samples}; remove the file that holds it and evaluate again"
        )
    return Answers(tuple(problems), samples, right, tokens, cut, reasons)


# One model ------------------------------------------------------------------------------------------------------------


def score_model(answers: Mapping[str, Answers], ks: Sequence[int]) -> ModelScore:
    """Args:
    answers: by benchmark, all with as many runs and responses.
    ks: of pass@k, each at most the number of responses to a problem over all runs.
    """
    per_k = {name: {k: _pass_at(of, k) for k in ks} for name, of in answers.items()}
    benchmarks = {
        name: BenchmarkScore(
            problems=len(of.problems),
            samples=of.samples,
            pass_at_1=_pass_at_1({name: of}),
            pass_at={k: Estimate(*bootstrap_interval(values)) for k, values in per_k[name].items()},
            tokens_mean=float(of.tokens.sum() / (of.responses * len(of.problems))),
            truncated=float(of.cut.sum() / (of.responses * len(of.problems))),
            reasons=dict(of.reasons.most_common()),
        )
        for name, of in answers.items()
    }
    of_score = {k: Estimate(*stratified_bootstrap_interval([per_k[name][k] for name in answers])) for k in ks}
    return ModelScore(benchmarks, _pass_at_1(answers), of_score)


def _pass_at(answers: Answers, k: int) -> list[float]:
    """The estimate of every problem."""
    n = answers.responses
    of_count = [pass_at_k(n, c, k) for c in range(n + 1)]
    return [of_count[c] for c in answers.right.sum(axis=0)]


def _pass_at_1(answers: Mapping[str, Answers]) -> PassAtOne:
    mean, low, high = stratified_bootstrap_interval([of.rates.tolist() for of in answers.values()])
    runs = np.mean([of.right.mean(axis=1) / of.samples for of in answers.values()], axis=0)
    deviation = float(runs.std(ddof=1)) if len(runs) > 1 else None
    return PassAtOne(mean, deviation, low, high, runs.tolist())


# Two models -----------------------------------------------------------------------------------------------------------


def compare_models(answers: Mapping[str, Mapping[str, Answers]]) -> list[Comparison]:
    """Every model with the first, on each benchmark and, of several, on the score.

    Args:
        answers: by model and benchmark; the same problems for all models.
    """
    baseline, *others = answers
    found: list[Comparison] = []
    for model in others:
        differences = {
            name: (answers[model][name].rates - answers[baseline][name].rates).tolist() for name in answers[baseline]
        }
        for name, values in differences.items():
            found.append(_compare(model, baseline, name, [values]))
        if len(differences) > 1:
            found.append(_compare(model, baseline, SCORE, list(differences.values())))
    overall = [c for c in found if c.on == SCORE] or found
    corrected = dict(zip(map(id, overall), holm([c.p for c in overall]), strict=True))
    return [
        Comparison(c.model, c.baseline, c.on, c.difference, c.p, corrected.get(id(c)), c.better, c.worse) for c in found
    ]


def _compare(model: str, baseline: str, on: str, strata: Sequence[Sequence[float]]) -> Comparison:
    differences = np.concatenate(strata)
    return Comparison(
        model=model,
        baseline=baseline,
        on=on,
        difference=Estimate(*stratified_bootstrap_interval(strata)),
        p=sign_flip_test(strata),
        p_holm=None,
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
    )

"""What finished runs of the laboratory say: selected checkpoints, scores, costs, paired comparisons."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from graftrl.errors import DataError
from graftrl.evaluation.significance import PairedTest, holm, paired_t_test
from graftrl.lab.measure import Measures, read_measures
from graftrl.lab.pairs import Pair, Transfer
from graftrl.lab.plan import SELECTION_PROMPTS, VALIDATION_PROMPTS, Cell, Laboratory
from graftrl.report.data import Run, join_runs

BOTH = "both"  # stands for the mean of a pair's two models


@dataclass(frozen=True)
class Cost:
    """Of both models of a pair. wall_s: seconds of training steps, without evaluation and checkpoints."""

    wall_s: float
    generated_tokens: int
    trained_tokens: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.wall_s + other.wall_s,
            self.generated_tokens + other.generated_tokens,
            self.trained_tokens + other.trained_tokens,
        )


@dataclass(frozen=True)
class Outcome:
    """One model of one cell. Scores are pass@1.

    selected_step: the evaluated step with the highest score on the selection prompts, the first of several; the step 0
        before training does not count. validation: that score.
    score, last_score: on the test prompts, at the selected and at the last step. before: before training.
    curve, tests: scores on the selection and on the test prompts by evaluated step.
    measures: after the last step, from several responses; None where the run was not measured.
    """

    selected_step: int
    validation: float
    score: float
    last_score: float
    before: float
    curve: Mapping[int, float]
    tests: Mapping[int, float]
    measures: Measures | None = None


@dataclass(frozen=True)
class Result:
    """A finished cell. run: both models' runs as one. full, selected: cost of the whole run, and up to the selected
    checkpoints: the later one of a joint run; the sum of both where each model has a run of its own."""

    cell: Cell
    run: Run
    outcomes: Mapping[str, Outcome]
    full: Cost
    selected: Cost

    def score(self, model: str, last: bool = False) -> float:
        """pass@1 on the test prompts; of `BOTH`, the mean of the two models."""
        if model == BOTH:
            return sum(self.score(each, last) for each in self.outcomes) / len(self.outcomes)
        outcome = self.outcomes[model]
        return outcome.last_score if last else outcome.score


def read_result(lab: Laboratory, cell: Cell) -> Result | None:
    """None while a run of the cell has not finished."""
    if not all(lab.is_finished(key) for key in cell.runs):
        return None
    runs = [lab.read(key) for key in cell.runs]
    outcomes = {}
    for run in runs:
        measures = read_measures(run.folder) or {}
        for model in run.models:
            outcomes[model] = replace(read_outcome(run, model), measures=measures.get(model))
    full, selected = Cost(0.0, 0, 0), Cost(0.0, 0, 0)
    for run in runs:
        full += _cost(run, run.last_step)
        selected += _cost(run, max(outcomes[model].selected_step for model in run.models))
    return Result(cell, join_runs(runs), {m: outcomes[m] for m in cell.pair.models}, full, selected)


def as_measured(result: Result) -> Result | None:
    """The result with the measured pass@1 as its scores; None where a model was not measured."""
    outcomes = {}
    for model, outcome in result.outcomes.items():
        if outcome.measures is None:
            return None
        outcomes[model] = replace(outcome, score=outcome.measures.pass1)
    return replace(result, outcomes=outcomes)


def read_outcome(run: Run, model: str, selection: int | None = None) -> Outcome:
    """Select the checkpoint on the first `selection` validation prompts and test it on the others.

    Args:
        selection: by default the same share of the prompts as of a full evaluation.

    Raises:
        DataError: the run was not evaluated at its last step.
    """
    curves: dict[int, float] = {}
    tests: dict[int, float] = {}
    for step, evaluation in sorted(run.evaluations.items()):
        samples = int(evaluation["results"][model]["samples"])
        shares = [successes / samples for successes in evaluation["successes"][model].values()]
        cut = selection or len(shares) * SELECTION_PROMPTS // VALIDATION_PROMPTS
        curves[step], tests[step] = _mean(shares[:cut]), _mean(shares[cut:])
    trained = [step for step in curves if step > 0]
    if run.last_step not in trained or 0 not in curves:
        raise DataError(
            f"{run.folder}: was not evaluated before training and at its last step; remove it to run it again"
        )
    best = max(trained, key=lambda step: (curves[step], -step))
    return Outcome(best, curves[best], tests[best], tests[run.last_step], tests[0], curves, tests)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _cost(run: Run, step: int) -> Cost:
    line = next(line for line in run.metrics if line["step"] == step)
    cost = line["cost"]
    return Cost(float(line["wall_s"]), int(cost["sampled_tokens"]), int(cost["trained_tokens"]))


# Comparisons ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """method - reference on one model of one pair, paired by seed. p_holm: over all comparisons made together."""

    pair: Pair | Transfer
    model: str
    method: str
    reference: str
    test: PairedTest
    p_holm: float | None = None

    def verdict(self, corrected: bool, level: float = 0.05) -> str:
        """ "higher", "lower", "not distinguishable" or, with one seed, "not tested"."""
        p = self.p_holm if corrected else self.test.p
        if p is None:
            return "not tested"
        if p >= level:
            return "not distinguishable"
        return "higher" if self.test.mean > 0 else "lower"


def models_and_mean(pair: Pair | Transfer) -> tuple[str, ...]:
    """What a table has rows of: the models, and the mean of two."""
    return (*pair.models, BOTH) if len(pair.models) > 1 else pair.models


Scores = Mapping[int, float]  # by seed


def scores(
    results: Iterable[Result], pair: Pair | Transfer, method: str, model: str, last: bool = False
) -> dict[int, float]:
    """By seed."""
    return {
        result.cell.seed: result.score(model, last)
        for result in results
        if (result.cell.pair, result.cell.method) == (pair, method)
    }


def compare(
    results: Sequence[Result], pairs: Sequence[Pair | Transfer], methods: Sequence[str], reference: str
) -> list[Comparison]:
    """Every method with the reference on every model, where they share a seed. Holm's correction is over the single
    models; the mean of both is no further question, and gets no corrected p."""
    found: list[Comparison] = []
    for pair in pairs:
        for model in models_and_mean(pair):
            base = scores(results, pair, reference, model)
            for method in methods:
                ours = scores(results, pair, method, model)
                shared = sorted(ours.keys() & base.keys())
                if method != reference and shared:
                    test = paired_t_test([ours[s] for s in shared], [base[s] for s in shared])
                    found.append(Comparison(pair, model, method, reference, test))
    tested = [i for i, c in enumerate(found) if c.test.p is not None and c.model != BOTH]
    adjusted = dict(zip(tested, holm([found[i].test.p or 0.0 for i in tested]), strict=True))
    return [Comparison(c.pair, c.model, c.method, c.reference, c.test, adjusted.get(i)) for i, c in enumerate(found)]


# Raw numbers ----------------------------------------------------------------------------------------------------------

COLUMNS = ("pair", "model", "method", "seed", "score", "wall_s", "generated_tokens", "trained_tokens")
DETAILS = (
    "pair", "model", "method", "seed", "steps", "selected_step", "before", "validation", "score", "last_score",
    "wall_s", "wall_s_selected", "generated_tokens", "generated_tokens_selected", "trained_tokens",
    "trained_tokens_selected",
)  # fmt: skip


def _of(result: Result, model: str) -> dict[str, object]:
    """What tells a row of these tables from the others."""
    cell = result.cell
    return {"pair": cell.pair.name, "model": model, "method": cell.method, "seed": cell.seed}


def rows(results: Iterable[Result]) -> list[dict[str, object]]:
    """One per model, with all `DETAILS`. Costs are those of both models, so they stand twice."""
    return [
        {
            **_of(result, model),
            "steps": result.run.last_step,
            "selected_step": outcome.selected_step,
            "before": round(outcome.before, 6),
            "validation": round(outcome.validation, 6),
            "score": round(outcome.score, 6),
            "last_score": round(outcome.last_score, 6),
            "wall_s": round(result.full.wall_s, 3),
            "wall_s_selected": round(result.selected.wall_s, 3),
            "generated_tokens": result.full.generated_tokens,
            "generated_tokens_selected": result.selected.generated_tokens,
            "trained_tokens": result.full.trained_tokens,
            "trained_tokens_selected": result.selected.trained_tokens,
        }
        for result in results
        for model, outcome in result.outcomes.items()
    ]


MEASURED_COLUMNS = ("regime", "pair", "model", "method", "seed", "pass1", "pass8", "wall_s")
MEASURED_DETAILS = (
    *MEASURED_COLUMNS, "entropy", "strong_before", "strong", "others", "forgotten", "generated_tokens",
    "trained_tokens", "steps",
)  # fmt: skip


def measured_rows(results: Iterable[Result]) -> list[dict[str, object]]:
    """One per model of a measured result, with all `MEASURED_DETAILS`; costs are those of all models of the pair."""
    table: list[dict[str, object]] = []
    for result in results:
        for model, outcome in result.outcomes.items():
            m = outcome.measures
            if m is None:
                continue
            numbers = {
                "pass1": m.pass1, "pass8": m.pass8, "entropy": m.entropy, "strong_before": m.strong_before,
                "strong": m.mean(strong=True), "others": m.mean(strong=False), "forgotten": m.forgotten,
            }  # fmt: skip
            table.append(
                {
                    "regime": result.cell.pair.regime,
                    **_of(result, model),
                    "wall_s": round(result.full.wall_s, 3),
                    "generated_tokens": result.full.generated_tokens,
                    "trained_tokens": result.full.trained_tokens,
                    "steps": result.run.last_step,
                    **{name: "" if value is None else round(value, 6) for name, value in numbers.items()},
                }
            )
    return table


FAMILY_COLUMNS = ("pair", "model", "method", "seed", "family", "start", "pass1")


def family_rows(results: Iterable[Result]) -> list[dict[str, object]]:
    """One per model and family of a measured result: pass@1 before training and after the last step."""
    return [
        {
            **_of(result, model),
            "family": family,
            "start": round(outcome.measures.start[family], 6) if family in outcome.measures.start else "",
            "pass1": round(rate, 6),
        }
        for result in results
        for model, outcome in result.outcomes.items()
        if outcome.measures is not None
        for family, rate in outcome.measures.families.items()
    ]


TRANSFER_COLUMNS = ("target", "proxy", "method", "lambda", "seed", "score", "wall_s")
BEFORE = "before"  # a target without any training


def transfer_rows(results: Iterable[Result]) -> list[dict[str, object]]:
    """One per run of a transfer, and one per target before training. A run that reads no proxy stands once, without
    one. wall_s leaves out what the proxy's run cost."""
    table: dict[tuple[object, ...], dict[str, object]] = {}
    for result in results:
        pair, method = result.cell.pair, result.cell.method
        assert isinstance(pair, Transfer)
        (outcome,) = result.outcomes.values()
        proxy = "-".join(pair.proxies) if result.cell.runs[0].source else ""
        for who, name, score, wall_s in (
            ("", BEFORE, outcome.before, 0.0),
            (proxy, method, outcome.score, result.full.wall_s),
        ):
            key = (pair.label, who, name, result.cell.seed)
            table.setdefault(
                key,
                {
                    "target": pair.label,
                    "proxy": who,
                    "method": name,
                    "lambda": "" if name == BEFORE else calibration_of(result.run),
                    "seed": result.cell.seed,
                    "score": round(score, 6),
                    "wall_s": round(wall_s, 3),
                },
            )
    return [table[key] for key in sorted(table, key=str)]


def calibration_of(run: Run) -> float | str:
    """lambda of a run whose method has one, else nothing."""
    method = run.config["method"]
    if method["name"] == "w2s_opd":
        return 1 / float(method["strength"])
    return float(method["calibration"]) if "calibration" in method else ""


def to_csv(table: Iterable[Mapping[str, object]], columns: Sequence[str]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return buffer.getvalue()

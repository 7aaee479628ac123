"""The result of an evaluation as a whole: as JSON, and as tables for a terminal, for Markdown and for LaTeX."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graftrl import __version__
from graftrl.evaluation.intervals import Estimate
from graftrl.evaluation.scores import SCORE, Comparison, ModelScore, PassAtOne
from graftrl.report.tables import TextTable, as_latex, as_markdown


@dataclass(frozen=True)
class BenchmarkInfo:
    """problems: evaluated; of: how many the benchmark has.

    unusable: evaluated problems whose reference cannot be graded against; they count as wrong.
    """

    kind: str
    origin: str
    problems: int
    of: int
    unusable: list[str]


@dataclass(frozen=True)
class EvaluationReport:
    """settings: seed, samples, runs, temperature, top_p, max_tokens. origins: of the models."""

    settings: dict[str, Any]
    benchmarks: dict[str, BenchmarkInfo]
    origins: dict[str, str]
    models: dict[str, ModelScore]
    comparisons: list[Comparison]
    notes: list[str]

    def to_json(self) -> str:
        """One object; the fields are listed in docs/how-to/evaluate.md."""
        content: dict[str, Any] = {"schema_version": 1, "graftrl": __version__, **asdict(self)}
        return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)


def tables(report: EvaluationReport) -> list[TextTable]:
    """pass@1, details, and comparisons if there is more than one model. Shares in percent."""
    found = [_overview(report), _details(report)]
    return [*found, _comparisons(report)] if report.comparisons else found


def print_report(report: EvaluationReport, console: Console) -> None:
    if not console.is_terminal:
        console.width = 160  # a pipe has no width; a table must not be cut to 80 columns
    for text in tables(report):
        table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
        for index, header in enumerate(text.header):
            table.add_column(escape(header), justify="left" if index < text.text_columns else "right", overflow="fold")
        for row in text.rows:
            table.add_row(*(escape(cell) for cell in row))
        console.print(text.title, style="bold", markup=False, highlight=False)
        console.print(table)
        console.print(text.caption, style="dim", markup=False, highlight=False)
        console.print()
    for note in report.notes:
        console.print(f"note: {note}", style="dim", markup=False, highlight=False, soft_wrap=True)


def to_markdown(report: EvaluationReport) -> str:
    parts = [as_markdown(table) for table in tables(report)]
    notes = [f"- {note}" for note in report.notes]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])]) + "\n"


def to_latex(report: EvaluationReport) -> str:
    """One tabular a table, each under a comment with its title; needs the package booktabs."""
    return "\n\n".join(as_latex(table) for table in tables(report)) + "\n"


# Tables ---------------------------------------------------------------------------------------------------------------


def _overview(report: EvaluationReport) -> TextTable:
    s = report.settings
    several = len(report.benchmarks) > 1
    rows = [
        [
            model,
            *(_plus_minus(result.benchmarks[name].pass_at_1) for name in report.benchmarks),
            *([_plus_minus(result.score)] if several else []),
        ]
        for model, result in report.models.items()
    ]
    over = f"mean ± standard deviation over {s['runs']} runs of" if s["runs"] > 1 else "mean of"
    return TextTable(
        title=f"pass@1 in %, {over} {s['samples']} responses a problem",
        header=["model", *report.benchmarks, *(["score"] if several else [])],
        rows=rows,
        text_columns=1,
        caption=f"temperature {s['temperature']:g}, top-p {s['top_p']:g}, at most {s['max_tokens']} tokens"
        + ("; score: unweighted mean over benchmarks" if several else ""),
    )


def _details(report: EvaluationReport) -> TextTable:
    ks = [k for k in next(iter(report.models.values())).score_pass_at if k > 1]
    rows = []
    for model, result in report.models.items():
        for name, of in result.benchmarks.items():
            rows.append(
                [
                    model,
                    name,
                    str(of.problems),
                    _interval(Estimate(of.pass_at_1.mean, of.pass_at_1.low, of.pass_at_1.high)),
                    *(_percent(of.pass_at[k].value) for k in ks),
                    f"{of.tokens_mean:.0f}",
                    _percent(of.truncated),
                ]
            )
        if len(result.benchmarks) > 1:
            score = Estimate(result.score.mean, result.score.low, result.score.high)
            rows.append(
                [model, SCORE, "", _interval(score), *(_percent(result.score_pass_at[k].value) for k in ks), "", ""]
            )
    return TextTable(
        title="pass@1 and pass@k in %",
        header=["model", "benchmark", "problems", "pass@1 [95 %]", *(f"pass@{k}" for k in ks), "tokens", "cut %"],
        rows=rows,
        text_columns=2,
        caption="[95 %]: bootstrap over problems; pass@k: unbiased, over the responses of all runs; cut: responses "
        "that reached the token limit",
    )


def _comparisons(report: EvaluationReport) -> TextTable:
    corrected = len(report.models) > 2
    rows = [
        [
            f"{c.model} − {c.baseline}",
            c.on,
            _interval(c.difference, signed=True),
            _p(c.p),
            *([_p(c.p_holm)] if corrected else []),
            f"{c.better} / {c.worse}",
        ]
        for c in report.comparisons
    ]
    return TextTable(
        title="Differences of pass@1 in points, paired by problem",
        header=["models", "on", "difference [95 %]", "p", *(["p (Holm)"] if corrected else []), "better / worse"],
        rows=rows,
        text_columns=2,
        caption="p: sign-flip test over problems"
        + ("; p (Holm): corrected for how many models are compared" if corrected else ""),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _plus_minus(score: PassAtOne) -> str:
    return _percent(score.mean) + ("" if score.deviation is None else f" ± {_percent(score.deviation)}")


def _interval(estimate: Estimate, *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    value, low, high = (f"{100 * x:{sign}.1f}" for x in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]"


def _p(p: float | None) -> str:
    if p is None:
        return ""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def listed(ids: Sequence[str], most: int = 5) -> str:
    """`a, b, c, ...`."""
    return ", ".join(ids[:most]) + (", ..." if len(ids) > most else "")

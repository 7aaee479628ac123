"""The probe's result as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graftrl.evaluation.intervals import Estimate
from graftrl.probe.report import ProbeReport
from graftrl.report.plots import arrow


def print_report(report: ProbeReport, console: Console) -> None:
    """Models, overlap, exchange, compatibility, verdict."""
    if not console.is_terminal:
        console.width = 120  # a pipe has no width; a table must not be cut to 80 columns
    console.print(_models(report))
    console.print(_overlap(report))
    console.print(_steps(report))
    if any(direction.compatibility is not None for direction in report.directions):
        console.print(_compatibility(report))
    console.print()
    for line in report.verdict.lines:
        console.print(line, style="bold", markup=False, highlight=False, soft_wrap=True)
    for warning in report.verdict.warnings:
        console.print(f"warning: {arrow(warning)}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(f"note: {note}", style="dim", markup=False, highlight=False, soft_wrap=True)


def interval(estimate: Estimate | None, digits: int = 3) -> str:
    """`0.391 [0.350, 0.433]`; empty for None."""
    if estimate is None:
        return ""
    return f"{estimate.value:.{digits}f} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"


def short_interval(estimate: Estimate | None) -> str:
    """`.39 [.35, .43]`, to keep tables narrow."""
    return interval(estimate, 2).replace("0.", ".")


def step_interval(estimate: Estimate) -> str:
    """`12.4 [6, 19]`: a mean, and counts of single steps."""
    return f"{estimate.value:.1f} [{estimate.low:.0f}, {estimate.high:.0f}]"


def _table(title: str, headers: Sequence[str], caption: str = "") -> Table:
    # Narrow enough for 80 columns without breaking a cell, as long as names are short.
    table = Table(title=escape(title), caption=escape(caption) or None, box=box.SIMPLE, padding=(0, 1, 0, 0),
                  show_edge=False, pad_edge=False)  # fmt: skip
    table.title_justify = table.caption_justify = "left"
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _models(report: ProbeReport) -> Table:
    n = report.group_size
    table = _table(
        f"Models: {report.prompts} prompts, {n} responses each",
        ["model", "pass@1", f"pass@{n}", "none / some / all right", "tokens", "cut"],
    )
    for name, model in report.models.items():
        table.add_row(
            escape(name),
            short_interval(model.pass_at[1]),
            short_interval(model.pass_at[n]),
            f"{model.all_fail:.0%} / {model.mixed:.0%} / {model.all_success:.0%}",
            f"{model.tokens_mean:.1f}",
            f"{model.truncated:.1%}",
        )
    return table


def _overlap(report: ProbeReport) -> Table:
    table = _table(
        "Prompts that the receiver fails entirely, and what the source has for them",
        ["source → receiver", "all fail", "solved by source", "every time", "candidates", "selected"],
        caption="candidates: solved in part, so that GRAFT can take them; selected: balanced",
    )
    for d in report.directions:
        numbers = [str(d.always_solved), str(d.candidates), str(d.selected)]
        table.add_row(escape(arrow(d.name)), str(d.all_fail), short_interval(d.solved_share), *numbers)
    return table


def _steps(report: ProbeReport) -> Table:
    sizes = [step.prompts for step in report.directions[0].per_step]
    table = _table(
        "Groups exchanged in a step: mean [middle 95 %]",
        ["source → receiver", *(f"{kind} of {size}" for size in sizes for kind in ("candidates", "selected"))],
    )
    for d in report.directions:
        numbers = [step_interval(value) for step in d.per_step for value in (step.candidates, step.selected)]
        table.add_row(escape(arrow(d.name)), *numbers)
    return table


def _compatibility(report: ProbeReport) -> Table:
    scored = {d.name: d.compatibility for d in report.directions if d.compatibility is not None}
    unusable = "; ".join(
        f"{arrow(name)}: {', '.join(f'{reason} {count}' for reason, count in c.unusable.items())}"
        for name, c in scored.items()
        if c.unusable
    )
    table = _table(
        "Compatibility s of the candidates' responses, and the share with s > δ",
        ["source → receiver", "reward", "count", "median s", *(f"δ {t:g}" for t in report.thresholds)],
        caption=f"not usable: {unusable}" if unusable else "",
    )
    for name, c in scored.items():
        for kind, count, quantiles, shares in (
            ("1", c.successes, c.success_quantiles, [a.success_share for a in c.admission]),
            ("< 1", c.failures, c.failure_quantiles, [a.failure_share for a in c.admission]),
        ):
            table.add_row(
                escape(arrow(name)) if kind == "1" else "",
                kind,
                str(count),
                f"{quantiles[1]:.2f}" if quantiles else "",
                *("" if share is None else f"{share:.0%}" for share in shares),
            )
    return table

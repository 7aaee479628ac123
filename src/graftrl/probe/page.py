"""The probe's result as one self-contained HTML page, in the frame and styles of the report."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from graftrl.probe.analysis import Admission, admit, joint_counts
from graftrl.probe.observe import Observed
from graftrl.probe.report import ProbeReport
from graftrl.probe.terminal import interval, step_interval
from graftrl.report.html import figure, page, section, table
from graftrl.report.plots import (
    COLORS,
    FAILURE,
    INK,
    MUTED,
    SUCCESS,
    arrow,
    panels,
    percent_axis,
    score_panel,
    tiles,
    to_svg,
)

_WIDTH = 9.2  # inches of a plot over the page's whole width
_TILE = 4.6  # of one of several panels
_CURVE = [i / 50 for i in range(61)]  # thresholds of the admission curves, 0 to 1.2


def render_page(report: ProbeReport, observed: Observed) -> str:
    """The page as a string. Raises ConfigError when matplotlib is missing."""
    origins = ", ".join(f"{name} ({origin})" for name, origin in report.origins.items())
    return page(
        f"Probe: {report.name}",
        f"{report.prompts} prompts of {report.task}, {report.group_size} responses each; {origins}",
        [
            _verdict(report),
            _models(report),
            _exchange(report, observed),
            _compatibility(report, observed),
            section("Notes", " ".join(f"{note}." for note in report.notes)) if report.notes else "",
        ],
    )


def _verdict(report: ProbeReport) -> str:
    v = report.verdict
    lines = "".join(_line(line) for line in v.lines)
    warnings = "".join(_line(f"Warning: {arrow(warning)}.", "bad") for warning in v.warnings)
    return section("Verdict", "", lines + warnings)


def _line(text: str, style: str = "") -> str:
    """A paragraph of text, escaped."""
    return f'<p class="{style}">{escape(text)}</p>'


def _models(report: ProbeReport) -> str:
    n = report.group_size
    headers = ["model", "pass@1", f"pass@{n}", "all fail", "mixed", "all right", "tokens", "p95", "cut"]
    rows = [
        [
            name, interval(m.pass_at[1]), interval(m.pass_at[n]), f"{m.all_fail:.1%}", f"{m.mixed:.1%}",
            f"{m.all_success:.1%}", f"{m.tokens_mean:.1f}", f"{m.tokens_p95:.0f}", f"{m.truncated:.1%}",
        ]
        for name, m in report.models.items()
    ]  # fmt: skip
    return section(
        "Models",
        "Means over prompts with 95 % bootstrap intervals. All fail, mixed, all right: prompts by how many of their "
        "responses are right. Tokens: response length in the model's own tokens; cut: at the token limit.",
        table(headers, rows) + figure(_pass_curves(report), "pass@k, with 95 % intervals over prompts."),
    )


def _exchange(report: ProbeReport, observed: Observed) -> str:
    overlap = [
        [
            arrow(d.name), str(d.all_fail), interval(d.solved_share), str(d.always_solved), str(d.candidates),
            str(d.selected),
        ]
        for d in report.directions
    ]  # fmt: skip
    sizes = [step.prompts for step in report.directions[0].per_step]
    steps = [
        [arrow(d.name), *(step_interval(value) for step in d.per_step for value in (step.candidates, step.selected))]
        for d in report.directions
    ]
    return section(
        "Exchange",
        "Of the prompts that the receiver fails entirely, the share that the source solves at least once (95 % Wilson "
        "interval) and the number that it solves every time. GRAFT can exchange the groups that the source solves in "
        "part (candidates), and keeps those after balancing the directions (selected).",
        table(["source → receiver", "all fail", "solved by source", "every time", "candidates", "selected"], overlap)
        + _line(
            "Groups exchanged in a training step of so many prompts: mean, and the middle 95 % of steps drawn from "
            "the probed prompts."
        )
        + table(
            ["source → receiver", *(f"{kind} of {size}" for size in sizes for kind in ("candidates", "selected"))],
            steps,
        )
        + figure(
            _joint_panels(report, observed),
            "Prompts by the successes of both models. An exchange could win what lies along the edges.",
        ),
    )


def _compatibility(report: ProbeReport, observed: Observed) -> str:
    scored = {d.name: d.compatibility for d in report.directions if d.compatibility is not None}
    if observed.scored is None:
        return section("Compatibility", "s is not known: it needs the models, or a log of exchanges.")
    if not scored:
        return section("Compatibility", "There is no group to exchange, so nothing to score.")
    headers = [
        "source → receiver", "responses", "count", "s: 10 %", "50 %", "90 %", *(f"δ = {t:g}" for t in report.thresholds)
    ]  # fmt: skip
    rows = []
    for name, c in scored.items():
        for kind, count, quantiles, shares in (
            ("successes", c.successes, c.success_quantiles, [a.success_share for a in c.admission]),
            ("failures", c.failures, c.failure_quantiles, [a.failure_share for a in c.admission]),
        ):
            values = ["", "", ""] if quantiles is None else [f"{q:.3f}" for q in quantiles]
            admitted = ["" if share is None else f"{share:.1%}" for share in shares]
            rows.append([arrow(name), kind, str(count), *values, *admitted])
    rejects = [[arrow(name), reason, str(count)] for name, c in scored.items() for reason, count in c.unusable.items()]
    rejected = table(["source → receiver", "not usable because", "responses"], rejects) if rejects else ""
    return section(
        "Compatibility",
        "s = exp(mean log-probability per token under the receiver − under the source) of every response of the "
        "candidate groups, and the share of responses that the gate admits (s > δ).",
        table(headers, rows)
        + rejected
        + figure(_score_panels(report, observed), "s of the candidate groups' responses; the line is the suggested δ.")
        + figure(_admission_panels(report, observed), "Share of responses admitted, by threshold."),
    )


# Plots ----------------------------------------------------------------------------------------------------------------


def _pass_curves(report: ProbeReport) -> str:
    drawing, (axis,) = panels(1, size=(_WIDTH, 2.8))
    for (name, model), color in zip(report.models.items(), itertools.cycle(COLORS), strict=False):
        ks = list(model.pass_at)
        estimates = list(model.pass_at.values())
        axis.plot(ks, [e.value for e in estimates], "o-", color=color, markersize=4, label=name)
        axis.fill_between(ks, [e.low for e in estimates], [e.high for e in estimates], color=color, alpha=0.18, lw=0)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ks, [str(k) for k in ks])
    axis.set(xlabel="k", ylabel="pass@k", ylim=(0, 1))
    axis.legend(loc="upper left")
    return to_svg(drawing, "pass")


def _joint_panels(report: ProbeReport, observed: Observed) -> str:
    n, successes = report.group_size, observed.successes
    pairs = list(itertools.combinations(report.models, 2))
    drawing, axes = tiles(len(pairs), (_TILE, 3.6))
    for axis, (first, second) in zip(axes, pairs, strict=True):
        counts = joint_counts(successes[first], successes[second], n)
        axis.grid(visible=False)
        axis.pcolormesh(
            np.arange(n + 1), np.arange(n + 1), np.ma.masked_equal(np.sqrt(counts), 0), cmap="Blues", vmin=0
        )
        axis.set_aspect("equal")
        darkest = np.sqrt(counts.max())
        for (row, column), count in np.ndenumerate(counts):
            if count:
                light = np.sqrt(count) > 0.6 * darkest
                axis.text(column, row, str(count), ha="center", va="center", fontsize=7,
                          color="#ffffff" if light else "#1d2430")  # fmt: skip
        ticks = range(0, n + 1, max(1, n // 8))
        axis.set_xticks(ticks)
        axis.set_yticks(ticks)
        axis.set(xlabel=f"successes of {second}", ylabel=f"successes of {first}")
    return to_svg(drawing, "joint")


def _scored(report: ProbeReport) -> list[tuple[str, str]]:
    return [(d.source, d.receiver) for d in report.directions if d.compatibility is not None]


def _score_panels(report: ProbeReport, observed: Observed) -> str:
    assert observed.scored is not None
    pairs = _scored(report)
    drawing, axes = tiles(len(pairs), (_TILE, 2.9))
    for axis, pair in zip(axes, pairs, strict=True):
        responses = observed.scored[pair]
        finite = np.isfinite(responses.scores)
        score_panel(
            axis, "->".join(pair), responses.scores[finite & responses.right],
            responses.scores[finite & ~responses.right], report.verdict.threshold,
        )  # fmt: skip
    axes[0].set_ylabel("responses")
    axes[0].legend(loc="upper left")
    return to_svg(drawing, "probe scores")


def _admission_panels(report: ProbeReport, observed: Observed) -> str:
    assert observed.scored is not None
    pairs = _scored(report)
    drawing, axes = tiles(len(pairs), (_TILE, 2.9))
    for axis, pair in zip(axes, pairs, strict=True):
        curve = [admit(observed.scored[pair], threshold) for threshold in _CURVE]
        for kind, color, label in (
            ("success_share", SUCCESS, "successes"),
            ("failure_share", FAILURE, "failures"),
        ):
            _draw(axis, curve, kind, color, label)
        for threshold in report.thresholds:
            axis.axvline(threshold, color=MUTED, linewidth=0.7, linestyle=":")
        if report.verdict.threshold is not None:
            axis.axvline(report.verdict.threshold, color=INK, linestyle="--", linewidth=1.2)
        axis.set(title=arrow("->".join(pair)), xlabel="threshold δ", ylim=(0, 1.03))
        axis.yaxis.set_major_formatter(percent_axis(decimals=0))
    axes[0].set_ylabel("admitted")
    axes[0].legend(loc="lower left")
    return to_svg(drawing, "admission")


def _draw(axis: Any, curve: list[Admission], kind: str, color: str, label: str) -> None:
    points: Mapping[float, float] = {
        admission.threshold: share for admission in curve if (share := getattr(admission, kind)) is not None
    }
    axis.plot(list(points), list(points.values()), color=color, linewidth=1.8, label=label)

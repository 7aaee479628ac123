"""Plots of the laboratory's pages that a run's report does not have, each an SVG element made from plain numbers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from graftrl.report.plots import COLORS, INK, MUTED, panels, require_matplotlib, to_svg

Point = tuple[float, float]


def selection_curves(curves: Mapping[str, Mapping[str, tuple[Sequence[Point], Point]]]) -> str:
    """Validation scores by step, `{model: {method: (points, star)}}`, a panel per model; a star marks the selected
    checkpoint."""
    figure, axes = panels(len(curves))
    for axis, (model, of_method) in zip(axes, curves.items(), strict=True):
        for (method, (points, star)), color in zip(of_method.items(), itertools.cycle(COLORS), strict=False):
            axis.plot(*zip(*points, strict=True), color=color, linewidth=1.6, label=method)
            axis.plot(*star, "*", color=color, markersize=12, markeredgecolor=INK, markeredgewidth=0.6)
        axis.set(title=f"model {model}", xlabel="step")
    axes[0].set_ylim(0, 1)
    axes[0].set_ylabel("validation pass@1")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.03))
    return to_svg(figure, "selection")


def score_against_cost(
    costs: Mapping[str, Mapping[str, tuple[float, float, float | None]]], line: Sequence[str], label: str
) -> str:
    """Score against costs, `{cost: {method: (cost, score, half_width)}}`, a panel per cost.

    Args:
        line: methods whose points are joined, in this order. label: of the score.
    """
    require_matplotlib()
    from matplotlib.ticker import EngFormatter

    figure, axes = panels(len(costs))
    for axis, (cost, points) in zip(axes, costs.items(), strict=True):
        joined = [points[method][:2] for method in line if method in points]
        if len(joined) > 1:
            axis.plot(*zip(*joined, strict=True), "--", color=MUTED, linewidth=1.2, zorder=1)
        for (method, (x, y, half)), color in zip(points.items(), itertools.cycle(COLORS), strict=False):
            axis.errorbar(x, y, yerr=half or 0.0, fmt="o", color=color, capsize=3, label=method)
        axis.set(xlabel=cost, xlim=(0, None))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k, 1.2M
    axes[0].set_ylabel(label)
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.03))
    return to_svg(figure, "cost")


def differences(found: Mapping[str, Mapping[str, tuple[float, float | None]]], label: str) -> str:
    """Differences with their intervals, `{method: {pair: (mean, half_width)}}`, a row per pair. label: of the axis."""
    pairs = list(dict.fromkeys(pair for of_method in found.values() for pair in of_method))
    figure, (axis,) = panels(1)
    figure.set_size_inches(7.0, 1.2 + 0.34 * len(pairs))
    for i, ((method, of_method), color) in enumerate(zip(found.items(), itertools.cycle(COLORS), strict=False)):
        shift = 0.6 * ((i + 0.5) / len(found) - 0.5)
        for j, (pair, (mean, half)) in enumerate(of_method.items()):
            axis.errorbar(
                mean, pairs.index(pair) + shift, xerr=half or 0.0, fmt="o", color=color, capsize=2, markersize=4,
                label=method if j == 0 else None,
            )  # fmt: skip
    axis.axvline(0, color=MUTED, linewidth=1, zorder=0)
    axis.set_yticks(range(len(pairs)), pairs)
    axis.set(xlabel=label, ylim=(len(pairs) - 0.4, -0.6))
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.03))
    return to_svg(figure, "differences")


Measured = tuple[float, float, float | None]  # x, mean, half-width


def lines_with_intervals(
    lines: Mapping[str, Mapping[str, Sequence[Measured]]],
    x_labels: Sequence[str],
    y_label: str,
    *,
    smooth: Mapping[str, Mapping[str, Sequence[Point]]] | None = None,
    ticks: Sequence[float] | None = None,
) -> str:
    """Means with intervals, `{panel: {line: points}}`.

    Args:
        smooth: curves of the same colour without points, for lines of that name; the others' points are joined.
        ticks: of x axes that are logarithmic; None: linear ones that begin at 0.
    """
    require_matplotlib()
    from matplotlib.ticker import EngFormatter

    figure, axes = panels(len(lines))
    names = dict.fromkeys(name for of_panel in lines.values() for name in of_panel)
    colors = dict(zip(names, itertools.cycle(COLORS), strict=False))  # a line keeps its colour in every panel
    shown: dict[str, Any] = {}
    for axis, x_label, (panel, of_panel) in zip(axes, x_labels, lines.items(), strict=True):
        for name, points in of_panel.items():
            color = colors[name]
            xs, ys, halves = zip(*points, strict=True)
            fitted = (smooth or {}).get(panel, {}).get(name)
            if fitted is not None:
                axis.plot(*zip(*fitted, strict=True), color=color, linewidth=1.4)
            errors = [half or 0.0 for half in halves]
            shown[name] = axis.errorbar(xs, ys, yerr=errors, fmt="o" if fitted else "o-", color=color, capsize=3,
                                        markersize=4, linewidth=1.4)  # fmt: skip
        axis.set(title=panel, xlabel=x_label)
        if ticks is None:
            axis.set_xlim(0, None)
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        else:
            axis.set_xscale("log")
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
    axes[0].set_ylabel(y_label)
    axes[-1].legend(list(shown.values()), list(shown), loc="upper left", bbox_to_anchor=(1.0, 1.03))
    return to_svg(figure, "lines")

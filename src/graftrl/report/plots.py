"""The report's plots, each a function from runs to an SVG element to be put into a page.

Lines are means over seeds of values smoothed over `SMOOTHING` steps; bands reach from the lowest to the highest seed.
Text and axes take the page's text colour, so that a plot reads on light and dark backgrounds.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from graftrl.errors import ConfigError
from graftrl.report.data import (
    EXCHANGE_COUNTS,
    Run,
    clipping_table,
    complementarity_table,
    exchange_table,
    learning_table,
    methods_of,
    models_of,
    phase_table,
    score_table,
    validation_table,
)

SMOOTHING = 5
COLORS = ("#4c86d6", "#e07b2d", "#2a9d72", "#a868c9", "#c9506b", "#8f8a2b", "#3a9fb5", "#8a7260", "#5b5fc7", "#d98cae")
SUCCESS, FAILURE, MUTED = "#2a9d8f", "#e0703f", "#8b94a3"
INK = "#010203"  # stands for the page's text colour; replaced when the SVG is written
_PANEL = (4.6, 2.9)  # inches


def require_matplotlib() -> None:
    """Raises ConfigError when matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("the report needs matplotlib: pip install 'graftrl[report]'") from error


# Plots ----------------------------------------------------------------------------------------------------------------


def learning_curves(runs: Sequence[Run]) -> str:
    """Mean reward of training rollouts (lines) and pass@1 on validation prompts (dots), a panel per model."""
    learning, validation = learning_table(runs), validation_table(runs)
    models = models_of(runs)
    figure, axes = panels(len(models))
    for axis, model in zip(axes, models, strict=True):
        for method, color in _colors(runs).items():
            mine = (pl.col("model") == model) & (pl.col("method") == method)
            _curve(axis, learning.filter(mine), "reward_mean", color, method)
            points = validation.filter(mine).group_by("step").agg(pl.col("pass_at_1").mean()).sort("step")
            axis.plot(points["step"], points["pass_at_1"], "o", color=color, markersize=5, markeredgecolor=INK,
                      markeredgewidth=0.6)  # fmt: skip
        axis.set(title=f"model {model}", xlabel="step", ylim=(0, 1))
    axes[0].set_ylabel("reward, pass@1")
    axes[-1].legend(loc="lower right")
    return to_svg(figure, "learning")


def exchange_counts(runs: Sequence[Run]) -> str:
    """Prompts (candidates, selected) above, admitted responses (successes, failures) below, a column per direction.

    Means over the given runs, which should share a method.
    """
    table = exchange_table(runs)
    directions = table["direction"].unique().sort().to_list()
    figure, grid = panel_grid(2, len(directions))
    for column, direction in enumerate(directions):
        means = table.filter(direction=direction).group_by("step").agg(pl.col(*EXCHANGE_COUNTS).mean()).sort("step")
        steps = means["step"].to_numpy()
        above, below = grid[0][column], grid[1][column]
        above.step(steps, means["candidates"], where="mid", color=MUTED, label="candidates")
        above.step(steps, means["selected"], where="mid", color=COLORS[1], label="selected")
        above.set(title=arrow(direction))
        successes, failures = (means[f"admitted_{kind}"].to_numpy() for kind in ("successes", "failures"))
        below.bar(steps, successes, width=1.0, color=SUCCESS, label="admitted successes")
        below.bar(steps, failures, width=1.0, bottom=successes, color=FAILURE, label="admitted failures")
        below.set(xlabel="step")
    for row in grid:
        row[0].set_ylim(bottom=0)  # after all is drawn: it ends autoscaling, also of the panels that share the axis
    grid[0][0].set_ylabel("prompts a step")
    grid[1][0].set_ylabel("responses a step")
    grid[0][-1].legend()
    grid[1][-1].legend()
    return to_svg(figure, "exchange")


def score_histogram(runs: Sequence[Run]) -> str:
    """Compatibility s of all transferred responses by reward, and the gate's threshold; a panel per direction."""
    table = score_table(runs)
    directions = table["direction"].unique().sort().to_list()
    figure, axes = panels(len(directions))
    threshold = next((run.threshold for run in runs if run.threshold is not None), None)
    for axis, direction in zip(axes, directions, strict=True):
        here = table.filter(direction=direction)
        successes, failures = (
            here.filter(kind)["score"].to_numpy() for kind in (pl.col("reward") == 1.0, pl.col("reward") != 1.0)
        )
        score_panel(axis, direction, successes, failures, threshold)
    axes[0].set_ylabel("responses")
    axes[0].legend(loc="upper left")
    return to_svg(figure, "scores")


def clipped_fractions(runs: Sequence[Run]) -> str:
    """Share of loss tokens whose surrogate is clipped, by kind of row, a panel per model."""
    table = clipping_table(runs)
    models = models_of(runs)
    kinds = sorted(table["kind"].unique().to_list(), key=lambda kind: (kind != "own", kind))
    styles = dict(zip(kinds, ("-", "--", ":", "-."), strict=False))
    figure, axes = panels(len(models))
    for axis, model in zip(axes, models, strict=True):
        for method, color in _colors(runs).items():
            for kind in kinds:
                here = table.filter(model=model, method=method, kind=kind)
                if len(here):
                    _curve(axis, here, ("clipped", "tokens"), color, f"{method}, {kind}", style=styles.get(kind, "-"))
        axis.set(title=f"model {model}", xlabel="step")
        axis.yaxis.set_major_formatter(percent_axis())
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("clipped tokens")
    axes[-1].legend(loc="upper right")
    return to_svg(figure, "clipped")


def complementarity(runs: Sequence[Run]) -> str:
    """Share of prompts on which all of a model's responses fail, and of those the share that a peer solves."""
    table = complementarity_table(runs)
    models = models_of(runs)
    figure, grid = panel_grid(2, len(models))
    for column, model in enumerate(models):
        for method, color in _colors(runs).items():
            here = table.filter(model=model, method=method)
            _curve(grid[0][column], here, ("all_fail", "prompts"), color, method)
            _curve(grid[1][column], here, ("solved_by_peer", "all_fail"), color, method)
        grid[0][column].set_title(f"model {model}")
        grid[1][column].set_xlabel("step")
        for row in grid:
            row[column].yaxis.set_major_formatter(percent_axis(decimals=0))
    grid[0][0].set_ylim(bottom=0)
    grid[1][0].set_ylim(0, 1.03)
    grid[0][0].set_ylabel("all-fail prompts")
    grid[1][0].set_ylabel("of these, solved by a peer")
    grid[0][-1].legend(loc="upper right")
    return to_svg(figure, "complementarity")


def phases(runs: Sequence[Run]) -> str:
    """Seconds a run spends in each phase, means over seeds."""
    table = phase_table(runs).group_by("method", "phase").agg(pl.col("seconds").mean())
    methods = methods_of(runs)
    order = table.group_by("phase").agg(pl.col("seconds").sum()).sort("seconds", descending=True)["phase"].to_list()
    figure, (axis,) = panels(1, size=(2 * _PANEL[0], 0.9 + 0.42 * len(methods)))
    left = np.zeros(len(methods))
    for phase, color in zip(order, (*COLORS, *COLORS), strict=False):
        of_phase = dict(table.filter(phase=phase).select("method", "seconds").iter_rows())
        seconds = np.array([of_phase.get(method, 0.0) for method in methods])
        axis.barh(methods, seconds, left=left, color=color, label=phase, height=0.6)
        left += seconds
    axis.invert_yaxis()
    axis.set(xlabel="seconds")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.03))
    return to_svg(figure, "phases")


def entropy(runs: Sequence[Run]) -> str:
    """Entropy along a model's own responses, a panel per model."""
    learning = learning_table(runs)
    models = models_of(runs)
    figure, axes = panels(len(models))
    for axis, model in zip(axes, models, strict=True):
        for method, color in _colors(runs).items():
            _curve(axis, learning.filter(model=model, method=method), "entropy", color, method)
        axis.set(title=f"model {model}", xlabel="step")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("entropy, nats per token")
    axes[-1].legend(loc="upper right")
    return to_svg(figure, "entropy")


# Pieces, also for pages other than the report -------------------------------------------------------------------------


def score_panel(
    axis: Any, direction: str, successes: NDArray[np.float64], failures: NDArray[np.float64], threshold: float | None
) -> None:
    """Stacked histogram of compatibility scores with the gate's threshold."""
    bins = np.linspace(0, 1.5, 31)
    values = [np.minimum(scores, bins[-1] - 1e-9) for scores in (successes, failures)]
    axis.hist(values, bins=bins, stacked=True, color=[SUCCESS, FAILURE], label=["successes", "failures"])
    if threshold is not None:
        axis.axvline(threshold, color=INK, linestyle="--", linewidth=1.2, label=f"δ = {threshold:g}")
    axis.set(title=arrow(direction), xlabel="compatibility s (the last bin holds all above)")


def _colors(runs: Sequence[Run]) -> dict[str, str]:
    return {method: COLORS[i % len(COLORS)] for i, method in enumerate(methods_of(runs))}


def _curve(
    axis: Any, table: pl.DataFrame, value: str | tuple[str, str], color: str, label: str, style: str = "-"
) -> None:
    """Mean and band over seeds; `value` is a column, or numerator and denominator of a ratio of windowed sums."""
    smooth: dict[str, Any] = {"window_size": SMOOTHING, "min_samples": 1, "center": True}
    if isinstance(value, str):
        smoothed = pl.col(value).rolling_mean(**smooth)
    else:
        above, below = (pl.col(name).rolling_sum(**smooth) for name in value)
        smoothed = pl.when(below > 0).then(above / below)
    curves = (
        table.sort("seed", "step")
        .with_columns(smoothed.over("seed").alias("y"))
        .filter(pl.col("y").is_not_null())
        .group_by("step")
        .agg(mean=pl.col("y").mean(), low=pl.col("y").min(), high=pl.col("y").max())
        .sort("step")
    )
    steps: NDArray[np.int64] = curves["step"].to_numpy()
    axis.plot(steps, curves["mean"], style, color=color, linewidth=1.8, label=label)
    if table["seed"].n_unique() > 1:
        axis.fill_between(steps, curves["low"], curves["high"], color=color, alpha=0.18, linewidth=0)


def panels(columns: int, size: tuple[float, float] | None = None) -> tuple[Any, list[Any]]:
    """A figure with a row of axes; size in inches."""
    figure, grid = panel_grid(1, columns, size)
    return figure, grid[0]


def panel_grid(rows: int, columns: int, size: tuple[float, float] | None = None) -> tuple[Any, list[list[Any]]]:
    """A figure with rows of axes in the page's style; rows share their y axis."""
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = max(columns, 1)
    with rc_context({"text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}):
        figure = Figure(figsize=size or (_PANEL[0] * max(columns, 2), _PANEL[1] * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharey="row")
    for axis in grid.flat:
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axis.spines[side].set_color(MUTED)
        axis.grid(color=MUTED, alpha=0.25, linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, [list(row) for row in grid]


def to_svg(figure: Any, name: str) -> str:
    """The figure as an `<svg>` element: no header, no metadata, no identifiers that could clash with another plot's."""
    from matplotlib import rc_context

    for axis in figure.axes:
        axis.title.set(color=INK, fontsize=11)
        legend = axis.get_legend()
        if legend is not None:
            legend.set_frame_on(False)
            for text in legend.get_texts():
                text.set(color=INK, fontsize=9)
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)  # an HTML parser knows them
    text = re.sub(r"font: ([^;\"]*?)'DejaVu Sans'[^;\"]*", r"font: \1system-ui, sans-serif", text)
    return text.replace(INK, "currentColor")


def arrow(direction: str) -> str:
    """`A->B` as a person reads it."""
    return direction.replace("->", " → ")


def percent_axis(decimals: int | None = None) -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, decimals)

"""The report's plots, each a function from runs to a matplotlib figure; `to_svg` makes it an element of a page, `save`
files of their own.

Lines are means over seeds of values smoothed over `SMOOTHING` steps; bands reach from the lowest to the highest seed.
In a page text and axes take its text colour, so that a plot reads on light and dark backgrounds.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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
    score_cost_table,
    score_table,
    validation_table,
)
from graftrl.training.run_folder import write_bytes

SMOOTHING = 5
DRIFT_BINS = 40  # at most so many points in a plot of the scores' drift
COLORS = ("#4c86d6", "#e07b2d", "#2a9d72", "#a868c9", "#c9506b", "#8f8a2b", "#3a9fb5", "#8a7260", "#5b5fc7", "#d98cae")
SUCCESS, FAILURE, MUTED = "#2a9d8f", "#e0703f", "#8b94a3"
INK = "#010203"  # stands for the page's text colour; replaced when the SVG is written
DARK = "#1d2430"  # text of a plot that is a file of its own, on white
_PANEL = (4.6, 2.9)  # inches
_ACROSS = 3  # panels side by side


def require_matplotlib() -> None:
    """Raises ConfigError when matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("the report needs matplotlib: pip install 'graftrl[report]'") from error


# Plots ----------------------------------------------------------------------------------------------------------------


def learning_curves(runs: Sequence[Run]) -> Any:
    """Mean reward of training rollouts above; below, where runs were validated, pass@1 with the selected checkpoints.

    A column per model. A star is one run's selected checkpoint.
    """
    learning, validation = learning_table(runs), validation_table(runs)
    models = models_of(runs)
    figure, columns = stacked(len(models), 1 if validation.is_empty() else 2)
    for column, model in zip(columns, models, strict=True):
        for method, color in _colors(runs).items():
            mine = (pl.col("model") == model) & (pl.col("method") == method)
            _curve(column[0], learning.filter(mine), "reward_mean", color, method)
            if len(column) > 1:
                _curve(column[1], validation.filter(mine), "pass_at_1", color, method, "o-", window=1)
                for step, score in _selected(runs, method, model):
                    column[1].plot(step, score, "*", color=color, markersize=12, markeredgecolor=INK,
                                   markeredgewidth=0.6, zorder=3)  # fmt: skip
        column[0].set(title=f"model {model}")
        _step_axis(*column)
    for axis in (axis for column in columns for axis in column):
        axis.set_ylim(0, 1.03)
    for axis, label in zip(columns[0], ("training reward", "validation pass@1"), strict=False):
        axis.set_ylabel(label)
    legend_below(figure, columns[0][0])
    return figure


def _selected(runs: Sequence[Run], method: str, model: str) -> list[tuple[int, float]]:
    of_method = [run for run in runs if run.method == method and model in run.selected]
    return [
        (run.selected[model], run.evaluations[run.selected[model]]["results"][model]["pass_at_1"])
        for run in of_method
        if run.selected[model] in run.evaluations
    ]


def exchange_counts(runs: Sequence[Run]) -> Any:
    """Prompts (candidates, selected) above, admitted responses (successes, failures) below, a column per direction.

    Means over the given runs, which should share a method.
    """
    table = exchange_table(runs)
    directions = table["direction"].unique().sort().to_list()
    figure, columns = stacked(len(directions), 2)
    for (above, below), direction in zip(columns, directions, strict=True):
        means = table.filter(direction=direction).group_by("step").agg(pl.col(*EXCHANGE_COUNTS).mean()).sort("step")
        steps = means["step"].to_numpy()
        above.step(steps, means["candidates"], where="mid", color=MUTED, label="candidates")
        above.step(steps, means["selected"], where="mid", color=COLORS[1], label="selected")
        above.set(title=arrow(direction))
        successes, failures = (means[f"admitted_{kind}"].to_numpy() for kind in ("successes", "failures"))
        below.bar(steps, successes, width=1.0, color=SUCCESS, label="admitted successes")
        below.bar(steps, failures, width=1.0, bottom=successes, color=FAILURE, label="admitted failures")
        _step_axis(above, below)
    for axis in (axis for column in columns for axis in column):
        axis.set_ylim(bottom=0)  # after all is drawn
    columns[0][0].set_ylabel("prompts a step")
    columns[0][1].set_ylabel("responses a step")
    legend_below(figure, *columns[0])
    return figure


def score_histogram(runs: Sequence[Run]) -> Any:
    """Compatibility s of all transferred responses by reward, and the gate's threshold; a panel per direction."""
    table = score_table(runs)
    directions = table["direction"].unique().sort().to_list()
    figure, axes = tiles(len(directions))
    threshold = _threshold(runs)
    for axis, direction in zip(axes, directions, strict=True):
        here = table.filter(direction=direction)
        successes, failures = (
            here.filter(kind)["score"].to_numpy() for kind in (pl.col("reward") == 1.0, pl.col("reward") != 1.0)
        )
        score_panel(axis, direction, successes, failures, threshold)
    axes[0].set_ylabel("responses")
    axes[0].legend(loc="upper left")
    return figure


def score_drift(runs: Sequence[Run]) -> Any:
    """Quantiles of s over training: median, middle half, middle four fifths; a panel per direction.

    Each response counts once: long trainings are cut into at most `DRIFT_BINS` pieces of equally many steps.
    """
    table = score_table(runs)
    directions = table["direction"].unique().sort().to_list()
    figure, axes = tiles(len(directions))
    threshold = _threshold(runs)
    for axis, direction in zip(axes, directions, strict=True):
        q = drift_quantiles(table.filter(direction=direction))
        steps = q["step"].to_numpy()
        for low, high, alpha, label in (("q10", "q90", 0.18, "10 to 90 %"), ("q25", "q75", 0.32, "25 to 75 %")):
            axis.fill_between(steps, q[low], q[high], color=COLORS[0], alpha=alpha, linewidth=0, label=label)
        axis.plot(steps, q["q50"], "-", color=COLORS[0], linewidth=1.8, label="median")
        if threshold is not None:
            axis.axhline(threshold, color=INK, linestyle="--", linewidth=1.2, label=f"δ = {threshold:g}")
        axis.set(title=arrow(direction))
        _step_axis(axis)
    axes[0].set_ylabel("compatibility s")
    legend_below(figure, axes[0])
    return figure


def drift_quantiles(scores: pl.DataFrame) -> pl.DataFrame:
    """Columns step (the middle of a piece of training) and q10, q25, q50, q75, q90 of `score`; infinite s left out."""
    steps = scores["step"].to_numpy()
    first = int(steps.min()) if len(steps) else 0
    width = max(1, math.ceil((int(steps.max(initial=first)) - first + 1) / DRIFT_BINS))
    quantiles = [pl.col("score").quantile(percent / 100).alias(f"q{percent}") for percent in (10, 25, 50, 75, 90)]
    return (
        scores.filter(pl.col("score").is_finite())
        .group_by((pl.col("step") - first) // width)
        .agg(quantiles)
        .sort("step")
        .with_columns(pl.col("step") * width + first + (width - 1) / 2)
    )


def clipped_fractions(runs: Sequence[Run]) -> Any:
    """Share of loss tokens whose surrogate is clipped, by kind of row, a panel per model."""
    table = clipping_table(runs)
    models = models_of(runs)
    kinds = sorted(table["kind"].unique().to_list(), key=lambda kind: (kind != "own", kind))
    styles = dict(zip(kinds, ("-", "--", ":", "-."), strict=False))
    figure, axes = tiles(len(models))
    for axis, model in zip(axes, models, strict=True):
        for method, color in _colors(runs).items():
            for kind in kinds:
                here = table.filter(model=model, method=method, kind=kind)
                if len(here):
                    _curve(axis, here, ("clipped", "tokens"), color, f"{method}, {kind}", style=styles.get(kind, "-"))
        axis.set(title=f"model {model}")
        _step_axis(axis)
        axis.yaxis.set_major_formatter(percent_axis())
    for axis in axes:
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("clipped tokens")
    legend_below(figure, *axes)
    return figure


def complementarity(runs: Sequence[Run]) -> Any:
    """Share of prompts on which all of a model's responses fail, and of those the share that a peer solves."""
    table = complementarity_table(runs)
    models = models_of(runs)
    figure, columns = stacked(len(models), 2)
    for (above, below), model in zip(columns, models, strict=True):
        for method, color in _colors(runs).items():
            here = table.filter(model=model, method=method)
            _curve(above, here, ("all_fail", "prompts"), color, method)
            _curve(below, here, ("solved_by_peer", "all_fail"), color, method)
        above.set_title(f"model {model}")
        _step_axis(above, below)
        for axis in (above, below):
            axis.yaxis.set_major_formatter(percent_axis(decimals=0))
    for above, below in columns:  # after all is drawn: it ends autoscaling, also of the panels that share the axis
        above.set_ylim(bottom=0)
        below.set_ylim(0, 1.03)
    columns[0][0].set_ylabel("all-fail prompts")
    columns[0][1].set_ylabel("of these, solved by a peer")
    legend_below(figure, columns[0][0])
    return figure


COSTS = {"training_s": "training, s", "sampled_tokens": "sampled tokens", "passed_tokens": "passed tokens"}


def score_by_cost(runs: Sequence[Run]) -> Any:
    """Validation pass@1, mean over models, against what training had cost by then; a panel per kind of cost.

    Lines are means over seeds, at the steps that all seeds were validated at; a star is one run's best step.
    """
    require_matplotlib()
    from matplotlib.ticker import EngFormatter

    table = score_cost_table(runs)
    figure, axes = tiles(len(COSTS))
    for axis, (cost, label) in zip(axes, COSTS.items(), strict=True):
        for method, color in _colors(runs).items():
            here = table.filter(method=method)
            seeds = here["seed"].n_unique()
            means = here.group_by("step").agg(pl.col(cost, "pass_at_1").mean(), pl.len()).filter(pl.col("len") == seeds)
            means = means.sort("step")
            axis.plot(means[cost], means["pass_at_1"], "o-", color=color, markersize=4, linewidth=1.8, label=method)
            best = here.filter("best")
            axis.plot(best[cost], best["pass_at_1"], "*", color=color, markersize=12, markeredgecolor=INK,
                      markeredgewidth=0.6, zorder=3)  # fmt: skip
        axis.set(xlabel=label, ylim=(0, 1.03))
        axis.set_xlim(left=0)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k, 1.2M
    axes[0].set_ylabel("validation pass@1")
    legend_below(figure, axes[0])
    return figure


def phases(runs: Sequence[Run]) -> Any:
    """Seconds a run spends in each phase, means over seeds."""
    table = phase_table(runs).group_by("method", "phase").agg(pl.col("seconds").mean())
    methods = methods_of(runs)
    order = table.group_by("phase").agg(pl.col("seconds").sum()).sort("seconds", descending=True)["phase"].to_list()
    figure, (axis,) = panels(1, size=(2 * _PANEL[0], 1.4 + 0.42 * len(methods)))
    left = np.zeros(len(methods))
    for phase, color in zip(order, itertools.cycle(COLORS), strict=False):
        of_phase = dict(table.filter(phase=phase).select("method", "seconds").iter_rows())
        seconds = np.array([of_phase.get(method, 0.0) for method in methods])
        axis.barh(methods, seconds, left=left, color=color, label=phase, height=0.6)
        left += seconds
    axis.invert_yaxis()
    axis.set(xlabel="seconds")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.03))
    return figure


def entropy(runs: Sequence[Run]) -> Any:
    """Entropy along a model's own responses, a panel per model."""
    learning = learning_table(runs)
    models = models_of(runs)
    figure, axes = tiles(len(models))
    for axis, model in zip(axes, models, strict=True):
        for method, color in _colors(runs).items():
            _curve(axis, learning.filter(model=model, method=method), "entropy", color, method)
        axis.set(title=f"model {model}")
        _step_axis(axis)
    for axis in axes:
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("entropy, nats per token")
    legend_below(figure, axes[0])
    return figure


def drawn(runs: Sequence[Run]) -> dict[str, Any]:
    """Every plot that these runs have something for: file name without suffix -> figure."""
    found: dict[str, Callable[[Sequence[Run]], Any]] = {}
    if any(run.metrics for run in runs):
        found |= {"learning": learning_curves, "clipped": clipped_fractions, "phases": phases, "entropy": entropy}
    if any(len(run.models) > 1 and run.rollouts is not None for run in runs):
        found["complementarity"] = complementarity
    if not score_cost_table(runs).is_empty():
        found["score-by-cost"] = score_by_cost
    figures = {name: draw(runs) for name, draw in found.items()}
    for method, of_method in by_method(runs).items():
        name = file_name(method)
        if not exchange_table(of_method).is_empty():
            figures[f"exchange-{name}"] = exchange_counts(of_method)
        if not score_table(of_method).is_empty():
            figures[f"scores-{name}"] = score_histogram(of_method)
            figures[f"drift-{name}"] = score_drift(of_method)
    return figures


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


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    return {method: [run for run in runs if run.method == method] for method in methods_of(runs)}


def file_name(label: str) -> str:
    """A method's label without what does not belong into a file's name: `graft-weighting-none`."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-")


def _threshold(runs: Sequence[Run]) -> float | None:
    return next((run.threshold for run in runs if run.threshold is not None), None)


def _colors(runs: Sequence[Run]) -> dict[str, str]:
    return {method: COLORS[i % len(COLORS)] for i, method in enumerate(methods_of(runs))}


def _curve(
    axis: Any,
    table: pl.DataFrame,
    value: str | tuple[str, str],
    color: str,
    label: str,
    style: str = "-",
    window: int = SMOOTHING,
) -> None:
    """Mean and band over seeds; `value` is a column, or numerator and denominator of a ratio of windowed sums."""
    smooth: dict[str, Any] = {"window_size": window, "min_samples": 1, "center": True}
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
    if curves.is_empty():
        return
    steps: NDArray[np.int64] = curves["step"].to_numpy()
    axis.plot(steps, curves["mean"], style, color=color, linewidth=1.8, markersize=4, label=label)
    if table["seed"].n_unique() > 1:
        axis.fill_between(steps, curves["low"], curves["high"], color=color, alpha=0.18, linewidth=0)


def legend_below(figure: Any, *axes: Any) -> None:
    """What the axes' lines mean, each label once, under the plot."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        letters = max(map(len, entries)) + 6
        columns = max(1, min(len(entries), int(14 * figure.get_figwidth() / letters)))
        figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=columns)


def _step_axis(*axes: Any) -> None:
    """Axes one above the other whose x are steps."""
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1].set_xlabel("step")


def stacked(count: int, rows: int, size: tuple[float, float] | None = None) -> tuple[Any, list[list[Any]]]:
    """A figure with `count` columns of `rows` axes, at most `_ACROSS` side by side and the others below.

    size: of a panel in inches.
    """
    across = 2 if count == 4 else max(1, min(count, _ACROSS))
    blocks = max(1, math.ceil(count / across))
    width, height = size or _PANEL
    figure, grid = panel_grid(rows * blocks, across, (width * max(across, 2), height * rows * blocks))
    columns = [
        [grid[block * rows + row][position] for row in range(rows)]
        for block in range(blocks)
        for position in range(across)
    ]
    for unused in columns[count:]:
        for axis in unused:
            axis.set_axis_off()
    return figure, columns[: max(count, 1)]


def tiles(count: int, size: tuple[float, float] | None = None) -> tuple[Any, list[Any]]:
    """So many panels, at most `_ACROSS` side by side; size of a panel in inches."""
    figure, columns = stacked(count, 1, size)
    return figure, [axis for (axis,) in columns]


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

    _finish(figure)
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


def _finish(figure: Any) -> None:
    """Titles and legends in the page's style."""
    for axis in figure.axes:
        axis.title.set(color=INK, fontsize=11)
    for legend in [*figure.legends, *(axis.get_legend() for axis in figure.axes)]:
        if legend is not None:
            legend.set_frame_on(False)
            for text in legend.get_texts():
                text.set(color=INK, fontsize=9)


def standalone(svg: str) -> str:
    """An `<svg>` element as a file of its own: dark text on white, whatever the page around it."""
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    text = svg.replace("currentColor", DARK)
    return text.replace("<svg", f'<svg {names} style="background:#fff"', 1) + "\n"


def save(figures: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write every figure as NAME.svg and NAME.png, dark on white; returns the files. Existing ones are replaced."""
    written = []
    for name, figure in figures.items():
        png = io.BytesIO()
        _finish(figure)
        figure.savefig(png, format="png", dpi=150, facecolor="white")
        contents = {"svg": standalone(to_svg(figure, name)).encode("utf-8"), "png": png.getvalue()}
        for suffix, content in contents.items():
            written.append(folder / f"{name}.{suffix}")
            write_bytes(written[-1], content)
    return written


def arrow(direction: str) -> str:
    """`A->B` as a person reads it."""
    return direction.replace("->", " → ")


def percent_axis(decimals: int | None = None) -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, decimals)

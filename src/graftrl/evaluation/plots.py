"""pass@k against k, a panel for each benchmark."""

from __future__ import annotations

from typing import Any

from graftrl.evaluation.report import EvaluationReport
from graftrl.report.plots import COLORS, legend_below, percent_axis, tiles


def pass_at_k_curves(report: EvaluationReport) -> Any:
    """Unbiased pass@k of every model, with the 95 % bootstrap interval over problems as a band; k on a log scale."""
    from matplotlib.ticker import StrMethodFormatter  # late: the package may be missing

    figure, axes = tiles(len(report.benchmarks))
    for axis, name in zip(axes, report.benchmarks, strict=True):
        for index, (model, result) in enumerate(report.models.items()):
            curve = result.benchmarks[name].pass_at
            color = COLORS[index % len(COLORS)]
            low, high = ([getattr(estimate, bound) for estimate in curve.values()] for bound in ("low", "high"))
            axis.fill_between(list(curve), low, high, color=color, alpha=0.15, linewidth=0)
            values = [estimate.value for estimate in curve.values()]
            axis.plot(list(curve), values, "o-", color=color, markersize=3.5, linewidth=1.8, label=model)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.yaxis.set_major_formatter(percent_axis())
        axis.set(title=f"{name}, {report.benchmarks[name].problems} problems", xlabel="k")
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("pass@k")
    legend_below(figure, axes[0])
    return figure

"""The report's tables, as plain cells: the page, Markdown and LaTeX show the same ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from graftrl.evaluation.intervals import t_interval
from graftrl.report.data import (
    BASELINE,
    EXCHANGE_COUNTS,
    Run,
    best_scores,
    clipping_table,
    cost_table,
    exchange_table,
    methods_of,
    models_of,
    scores,
)
from graftrl.report.tables import TextTable, as_latex, as_markdown, plus_minus
from graftrl.training.run_folder import write_text

_STEPS_SHOWN = 6
_GAIN = 5  # column of the gain over the baseline


def tables_of(runs: Sequence[Run]) -> dict[str, TextTable]:
    """Every table that these runs have something for: file name without suffix -> table."""
    found = {
        "results": results(runs),
        "runs": states(runs),
        "exchange": exchange(runs),
        "clipped": clipped(runs),
        "cost": cost(runs),
    }
    return {name: table for name, table in found.items() if table.rows}


def write_tables(tables: dict[str, TextTable], folder: Path) -> list[Path]:
    """NAME.md and NAME.tex for every table; returns the files. Existing ones are replaced."""
    written = []
    for name, table in tables.items():
        for suffix, text in (("md", as_markdown(table)), ("tex", as_latex(table))):
            written.append(folder / f"{name}.{suffix}")
            write_text(written[-1], text + "\n")
    return written


def results(runs: Sequence[Run]) -> TextTable:
    """Per model and method: pass@1 before and after training, the gain over the baseline, the selected checkpoint."""
    final, best = scores(runs), best_scores(runs)
    rows = []
    for model in models_of(runs):
        of_model = final.get(model)
        before = None if of_model is None else of_model.before
        for method in methods_of(runs):
            score = None if of_model is None else of_model.methods.get(method)
            selected = best.get(model, {}).get(method, [])
            if score is None and not selected:
                continue
            gain = None if score is None else score.gain
            values = [value for _, value in selected]
            rows.append(
                [
                    model,
                    method,
                    str(len(selected) if score is None else len(score.seeds)),
                    "" if before is None else "{:.3f} [{:.3f}, {:.3f}]".format(*before),
                    "" if score is None else plus_minus(score.mean, score.half_width),
                    "" if score is None or gain is None else plus_minus(gain, score.gain_half_width, "+"),
                    plus_minus(*t_interval(values)) if values else "",
                    _steps([step for step, _ in selected]),
                ]
            )
    header = ["model", "method", "seeds", "before", "after", f"− {BASELINE}", "selected", "at step"]
    paired = f"; − {BASELINE}: paired by seed"
    if not any(row[_GAIN] for row in rows):
        header.pop(_GAIN)
        rows, paired = [row[:_GAIN] + row[_GAIN + 1 :] for row in rows], ""
    return TextTable(
        title="pass@1 on the validation prompts",
        header=header,
        rows=rows,
        text_columns=2,
        caption="These prompts are never trained on. Before: with the 95 % bootstrap interval over prompts. After: at "
        f"the last step of finished runs, mean over seeds ± half-width of the 95 % t interval{paired}. Selected: at "
        "each run's best step, in the order of seeds; chosen by these very prompts, which flatters it.",
    )


def states(runs: Sequence[Run]) -> TextTable:
    """Per run folder: how far it is, and what it reached."""
    rows = []
    parts = [part for joined in runs for part in joined.parts]
    folders = [part.folder for part in parts]
    if any(folder.is_absolute() for folder in folders):
        folders = [folder.absolute() for folder in folders]
    shared = os.path.commonpath([folder.parent for folder in folders]) if len(folders) > 1 else ""
    for run, folder in zip(parts, folders, strict=True):
        last = max(run.validation, default=None)
        rows.append(
            [
                os.path.relpath(folder, shared) if shared else str(run.folder),
                run.method,
                ", ".join(run.models),
                str(run.seed),
                str(run.last_step) + ("" if run.planned_steps is None else f" of {run.planned_steps}"),
                "" if not run.metrics else f"{_reward(run):.3f}",
                "" if last is None else f"{run.validation[last]:.3f} at {last}",
                "" if run.best_step is None else f"{run.validation[run.best_step]:.3f} at {run.best_step}",
            ]
        )
    return TextTable(
        title="Runs",
        header=["run", "method", "models", "seed", "steps", "training reward", "last pass@1", "best pass@1"],
        rows=rows,
        text_columns=3,
        caption=(f"In {shared}. " if shared else "")
        + "Means over models. Training reward: of the last step. pass@1: on the validation prompts.",
    )


def exchange(runs: Sequence[Run]) -> TextTable:
    """Per method and direction: what a run exchanged, from its first step to its last."""
    names = (*EXCHANGE_COUNTS, "rejected")
    rows = []
    for method in methods_of(runs):
        counts = exchange_table([run for run in runs if run.method == method])
        totals = counts.group_by("direction", "seed").agg(pl.col(*names).sum())
        means = totals.group_by("direction").agg(pl.col(*names).mean()).sort("direction")
        for direction, *values in means.iter_rows():
            admitted = values[3] + values[4]
            share = f"{admitted / values[2]:.1%}" if values[2] else ""
            rows.append([method, direction.replace("->", " → "), *(f"{value:,.0f}" for value in values), share])
    return TextTable(
        title="What a run exchanged",
        header=[
            "method", "direction", "candidates", "selected", "responses", "admitted right", "admitted wrong", "gated",
            "rejected", "admitted",
        ],
        rows=rows,
        text_columns=2,
        caption="Over all steps, mean over runs. Candidates and selected are prompts, the others responses.",
    )  # fmt: skip


def clipped(runs: Sequence[Run]) -> TextTable:
    """Per method and model: share of clipped tokens by kind of row."""
    table = clipping_table(runs)
    counts = table.group_by("method", "model", "kind").agg(pl.col("tokens", "clipped").sum())
    kinds = sorted(table["kind"].unique().to_list(), key=lambda kind: (kind != "own", kind))
    rows = []
    for method in methods_of(runs):
        for model in models_of(runs):
            here = {kind: (t, c) for _, _, kind, t, c in counts.filter(method=method, model=model).iter_rows()}
            if here:
                cells = [f"{here[kind][1] / here[kind][0]:.3%}" if here.get(kind, (0,))[0] else "" for kind in kinds]
                rows.append([method, model, *cells])
    return TextTable(
        title="Clipped tokens",
        header=["method", "model", *kinds],
        rows=rows,
        text_columns=2,
        caption="Share of the loss tokens of each kind of row, over all steps and runs.",
    )


def cost(runs: Sequence[Run]) -> TextTable:
    """Per method: what a run cost, and what it reached."""
    frame = cost_table(runs)
    rows = []
    for method in methods_of(runs):
        of_method = [run for run in runs if run.method == method]
        reached = [run.validation[max(run.validation)] for run in of_method if run.validation]
        means = frame.filter(method=method).select(pl.exclude("method", "seed").mean()).row(0, named=True)
        rows.append(
            [
                method,
                ", ".join(models_of(of_method)),
                str(len(of_method)),
                *(f"{means[name]:,.0f}" for name in ("steps", "sampled_tokens", "trained_tokens", "passed_tokens")),
                f"{means['wall_s']:,.1f}",
                f"{sum(reached) / len(reached):.3f}" if reached else "",
            ]
        )
    return TextTable(
        title="What a run cost",
        header=[
            "method", "models", "runs", "steps", "sampled tokens", "trained tokens", "passed tokens", "training, s",
            "last pass@1",
        ],
        rows=rows,
        text_columns=2,
        caption="Means over runs, all models together; pass@1 is the mean over models at the last validation.",
    )  # fmt: skip


def _reward(run: Run) -> float:
    rewards = [values.get("reward_mean") for values in run.metrics[-1]["models"].values()]
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known else float("nan")


def _steps(steps: Sequence[int]) -> str:
    """`15, 20`; a range where there are many."""
    if len(steps) > _STEPS_SHOWN:
        return f"{min(steps)} to {max(steps)}"
    return ", ".join(map(str, steps))

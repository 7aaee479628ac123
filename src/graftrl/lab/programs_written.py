"""Which programs a model names in one family, and how that changes in training: what explanations of single families
rest on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import polars as pl

from graftrl.lab.pairs import PAIRS
from graftrl.lab.programs import LETTERS
from graftrl.report.data import Run
from graftrl.report.tables import markdown_table

if TYPE_CHECKING:
    from graftrl.lab.pages import Page

WINDOWS = 4  # equal parts of a run's steps
MOST = 2  # programs of a window that the page names


def programs_written(run: Run, model: str, family: str, windows: int = WINDOWS) -> pl.DataFrame:
    """Responses of `model` to training prompts of `family`, by window of steps and by the program that they name.

    Returns: first, last (steps of the window), program (the first two letters before a colon; shorter where a response
    names fewer), share (of the window's responses), right (of the window's responses with this program, the share with
    reward 1); by window, the most frequent first, in alphabetical order where equal. Empty without rollouts.
    """
    schema = {"first": pl.Int64, "last": pl.Int64, "program": pl.String, "share": pl.Float64, "right": pl.Float64}
    if run.rollouts is None:
        return pl.DataFrame(schema=schema)
    width = -(-run.last_step // windows)
    return (
        run.rollouts.filter(pl.col("model") == model)
        .with_columns(prompt=pl.col("messages").list.last().struct.field("content"))
        .filter(pl.col("prompt").str.starts_with(family))
        .with_columns(
            window=(pl.col("step").cast(pl.Int64) - 1) // width,
            program=pl.col("text").str.extract_all(f"[{LETTERS}]:").list.head(2).list.join("").str.replace_all(":", ""),
            right=(pl.col("reward") == 1.0).cast(pl.Float64),
        )
        .group_by("window", "program")
        .agg(responses=pl.len(), right=pl.col("right").mean())
        .with_columns(
            first=pl.col("window") * width + 1,
            last=pl.min_horizontal((pl.col("window") + 1) * width, pl.lit(run.last_step, pl.Int64)),
            share=pl.col("responses") / pl.col("responses").sum().over("window"),
        )
        .sort("first", "share", "program", descending=[False, True, False])
        .select(list(schema))
        .collect()
    )


def told_families(page: Page) -> str:
    """Per family that the study follows: the programs that are named most, by quarter of training."""
    header: list[str] = []
    table = []
    for pair_name, family, model, methods in page.study.followed:
        for method in methods:
            for result in sorted(page.of(PAIRS[pair_name], method), key=lambda r: r.cell.seed):
                frame = programs_written(result.run, model, family)
                windows = frame.partition_by("first", maintain_order=True)
                if not windows:
                    continue
                header = header or [f"steps {w['first'][0]} to {w['last'][0]}" for w in windows]
                row = [pair_name, family, model, f"`{page.study.label(method)}`", str(result.cell.seed)]
                table.append(row + [_cell(window) for window in windows])
    if not table:
        return ""
    return (
        "## Programs in single families\n\nFamilies that [the explanations](README.md#scion) are about: what a model "
        "writes to training prompts of a family, in shares of its responses. The operation that most responses begin "
        f"with; the {MOST} most frequent programs; how many of all responses are right.\n\n"
        + markdown_table(["pair", "family", "model", "method", "seed", *header], table, text_columns=5 + len(header))
    )


def _cell(window: pl.DataFrame) -> str:
    first = pl.col("program").str.slice(0, 1)
    begun = window.group_by(first).agg(pl.col("share").sum()).sort("share", "program", descending=[True, False]).row(0)
    named = [
        f"{program or 'none'} {share:.2f}" for program, share in window.select("program", "share").head(MOST).rows()
    ]
    right = float((window["share"] * window["right"]).sum())
    return f"{begun[0] or 'none'}… {begun[1]:.2f}; {', '.join(named)}; right {right:.2f}"


PARTS: dict[str, Callable[[Page], str]] = {"followed": told_families}

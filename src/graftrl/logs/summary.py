"""What a rollout log holds: `graftrl logs inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from graftrl.logs.reader import RolloutLog, scan_many
from graftrl.logs.rollouts import SCHEMA_VERSION


def summarize(path: Path) -> dict[str, Any]:
    """Counts by model as plain values, ready for JSON. The log is streamed.

    Raises:
        DataError: see `RolloutLog`.
    """
    log = RolloutLog(path)
    keys = ["model", "run", "finish_reason"]
    counts = [
        pl.len().alias("responses"),
        pl.col("reward").sum(),
        pl.col("reward").is_null().sum().alias("ungraded"),
        pl.col("logprobs").is_not_null().sum().alias("scored"),
        pl.col("token_ids").is_not_null().sum().alias("tokenized"),
        pl.col("token_ids").list.len().sum().alias("tokens"),
    ]
    columns = [*keys, "reward", "logprobs", "token_ids"]
    parts = scan_many(log.files, lambda frame: frame.select(columns).group_by(keys).agg(counts))
    whole = pl.concat(parts)
    return {
        "path": str(path),
        "schema_version": SCHEMA_VERSION,
        "files": len(log.files),
        "bytes": sum(file.stat().st_size for file in log.files),
        "runs": sorted(run for run in whole["run"].unique() if run is not None),
        "responses": int(whole["responses"].sum()),
        "models": {model: _of_model(log, model, whole.filter(pl.col("model") == model)) for model in log.models},
    }


def _of_model(log: RolloutLog, model: str, counts: pl.DataFrame) -> dict[str, Any]:
    responses, ungraded = int(counts["responses"].sum()), int(counts["ungraded"].sum())
    tokenized = int(counts["tokenized"].sum())
    steps = log.steps(model)
    groups = None if ungraded else log.group_index(model)
    finish_reasons = counts.group_by("finish_reason").agg(pl.col("responses").sum()).sort("finish_reason")
    return {
        "responses": responses,
        "steps": {"count": len(steps), "first": steps[0], "last": steps[-1]},
        "groups": None if groups is None else groups.height,
        "prompts": None if groups is None else groups["prompt_id"].n_unique(),
        "successes": None if groups is None else _histogram(groups),
        "reward_mean": None if ungraded == responses else float(counts["reward"].sum()) / (responses - ungraded),
        "responses_without_reward": ungraded,
        "response_tokens_mean": None if not tokenized else float(counts["tokens"].sum()) / tokenized,
        "share_with_logprobs": float(counts["scored"].sum()) / responses,
        "finish_reasons": {str(reason): count for reason, count in finish_reasons.iter_rows()},
        "sampling": [
            {"temperature": temperature, "top_p": top_p, "top_k": top_k}
            for temperature, top_p, top_k in sorted(log.sampling(model), key=str)
        ],
        "tokenizer_fingerprints": sorted(log.fingerprints(model), key=str),
    }


def _histogram(groups: pl.DataFrame) -> dict[str, dict[str, int]]:
    """{n: {k: groups}} as strings, since JSON knows no other keys."""
    histogram: dict[str, dict[str, int]] = {}
    for n, k, count in groups.group_by("n", "k").len().sort("n", "k").iter_rows():
        histogram.setdefault(str(n), {})[str(k)] = count
    return histogram


def tables(summary: Mapping[str, Any]) -> list[Any]:
    """The summary as tables for a terminal: one of the models, one of successes per group."""
    from rich.table import Table
    from rich.text import Text  # names come from data and must not be read as markup

    models: Mapping[str, Mapping[str, Any]] = summary["models"]
    overview = Table(show_header=True, box=None, pad_edge=False)
    overview.add_column("")
    for model in models:
        overview.add_column(Text(model), justify="right")
    for title, show in _LINES.items():
        overview.add_row(title, *(Text(show(of_model)) for of_model in models.values()))
    successes = Table(box=None, pad_edge=False)
    for title in ("groups by successes", "n", "k = 0", "0 < k < n", "k = n", "by k, from 0"):
        successes.add_column(title, justify="left" if title.startswith(("groups", "by")) else "right")
    for model, of_model in models.items():
        for n, by_k in (of_model["successes"] or {}).items():
            counts = [by_k.get(str(k), 0) for k in range(int(n) + 1)]
            inner = sum(counts[1:-1])
            successes.add_row(Text(model), n, *map(_count, (counts[0], inner, counts[-1])), " ".join(map(str, counts)))
    return [overview, successes]


def headline(summary: Mapping[str, Any]) -> str:
    runs = ", ".join(summary["runs"]) or "not named"
    return (
        f"{summary['path']}: {summary['responses']:,} responses in {summary['files']:,} files, "
        f"{_bytes(summary['bytes'])}, schema version {summary['schema_version']}, run {runs}"
    )


def _count(value: int) -> str:
    return f"{value:,}"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} GB"


def _optional(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)


def _sampling(of_model: Mapping[str, Any]) -> str:
    return "; ".join(
        ", ".join(_optional(each[name], "g") for name in ("temperature", "top_p", "top_k"))
        for each in of_model["sampling"]
    )


_LINES: dict[str, Any] = {
    "responses": lambda m: _count(m["responses"]),
    "steps": lambda m: f"{m['steps']['count']:,} ({m['steps']['first']} to {m['steps']['last']})",
    "groups": lambda m: _optional(m["groups"], ","),
    "different prompts": lambda m: _optional(m["prompts"], ","),
    "mean reward": lambda m: _optional(m["reward_mean"], ".3f"),
    "without reward": lambda m: _count(m["responses_without_reward"]),
    "mean tokens": lambda m: _optional(m["response_tokens_mean"], ".1f"),
    "with log-probabilities": lambda m: f"{m['share_with_logprobs']:.1%}",
    "finish reasons": lambda m: ", ".join(
        f"{'unknown' if reason == 'None' else reason} {count:,}" for reason, count in m["finish_reasons"].items()
    ),
    "temperature, top-p, top-k": _sampling,
    "tokenizer": lambda m: ", ".join(_optional(each, "") for each in m["tokenizer_fingerprints"]),
}

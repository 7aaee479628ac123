"""What a log holds, group by group, without its texts and tokens: what the page's lists and filters are made from.

The index takes about 0.25 kB a group, however long responses are. Texts are only read for a search, streamed, and for
the one prompt that is looked at, from the files of its step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from graftrl.errors import DataError
from graftrl.logs.reader import Schema, check_file, collect, log_files, scan_many
from graftrl.logs.rollouts import ROLLOUT_SCHEMA, TRANSFER_SCHEMA

Usable = Callable[[int, int, int, int], bool]  # own k and n, the peer's k and n -> whether the method could take it

PROMPT = ["step", "prompt_id"]
EXCHANGES = ("", "taken", "refused", "passed", "none")
REWARDS = ("", "fail", "behind", "mixed", "success")
_SEARCHES_KEPT = 8


@dataclass(frozen=True)
class Query:
    """Which prompts to list; a prompt is listed if the group of `model` (of any model, where it is "") fits.

    first, last: steps. reward: "fail", "mixed" or "success", by successes in the group; "behind": none, where another
    model's group on the prompt has some. low, high: of the mean reward.
    exchange: "taken": a peer's response was admitted; "refused": some were transferred, but none was admitted;
    "passed": a peer's group could have been used, but none was transferred; "none": nothing was transferred.
    text: that a response of the model, the prompt or the reference contains, whatever its case (of ASCII letters).
    """

    first: int | None = None
    last: int | None = None
    model: str = ""
    reward: str = ""
    low: float | None = None
    high: float | None = None
    exchange: str = ""
    text: str = ""


class LogIndex:
    """The groups of a log and what was transferred to them. `current` takes in what a running run has added."""

    def __init__(self, path: Path, exchange: Path | None = None, pattern: str = "") -> None:
        """path: as `log_files` takes it, or with `pattern` the folder below which files match it. exchange: the folder
        of transfers, if there may be one."""
        self.path, self.exchange, self.pattern = path, exchange, pattern
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._lock = threading.Lock()
        groups, moved = _count_groups([]), _count_moved([])
        self._last = Snapshot(path, [], groups.cast({"file": pl.Int64}), [], moved.cast({"file": pl.Int64}))

    def current(self) -> Snapshot:
        """Files that are new or were replaced are read, those that are gone forgotten.

        Raises:
            DataError: there is no log, or a file of it is torn; the file is named.
        """
        with self._lock:
            files = sorted(self.path.glob(self.pattern)) if self.pattern else log_files(self.path)
            moved_files = sorted(self.exchange.glob("step-*.parquet")) if self.exchange is not None else []
            stamps = {file: _stamp(file) for file in [*files, *moved_files]}
            if stamps != self._stamps:
                last = self._last
                groups = self._merge(files, stamps, last.files, last.groups, ROLLOUT_SCHEMA, _count_groups)
                moved = self._merge(moved_files, stamps, last.moved_files, last.moved, TRANSFER_SCHEMA, _count_moved)
                self._last, self._stamps = Snapshot(self.path, files, groups, moved_files, moved), stamps
            return self._last

    def _merge(
        self,
        files: Sequence[Path],
        stamps: Mapping[Path, tuple[int, int]],
        known: Sequence[Path],
        rows: pl.DataFrame,
        schema: Schema,
        count: Callable[[Sequence[Path]], pl.DataFrame],
    ) -> pl.DataFrame:
        """The rows of files that have not changed, and those counted now, with the files' new positions."""
        position = {file: index for index, file in enumerate(files)}
        moved = {
            old: position[file]
            for old, file in enumerate(known)
            if file in position and stamps[file] == self._stamps.get(file)
        }
        fresh = [file for file in files if position[file] not in set(moved.values())]
        for file in fresh:
            check_file(file, schema)
        named = {str(file): position[file] for file in fresh}
        counted = count(fresh)
        kept = rows.filter(pl.col("file").is_in(list(moved)))
        parts = [
            frame.with_columns(pl.col("file").replace_strict(names, return_dtype=pl.Int64))
            for frame, names in ((kept, moved), (counted, named))
            if frame.height
        ]
        order = [*PROMPT, "model"]
        return pl.concat(parts).sort(order, maintain_order=True) if parts else rows.clear()


@dataclass(frozen=True)
class Snapshot:
    """A log as it was at one moment.

    Attributes:
        groups: one row per group, in the order of steps, prompt ids and models: file (its position in `files`), step,
            prompt_id, model, n (responses), k (of reward 1), reward (mean).
        moved: one row per receiver, source and prompt: file (in `moved_files`), step, prompt_id, model (the receiver),
            source, source_step, responses, admitted, gated, rejected, score (mean s).
    """

    path: Path
    files: Sequence[Path]
    groups: pl.DataFrame
    moved_files: Sequence[Path]
    moved: pl.DataFrame
    _found: dict[tuple[str, int | None, int | None], pl.DataFrame] = field(default_factory=dict)

    @property
    def models(self) -> list[str]:
        return sorted(self.groups["model"].unique().to_list())

    @property
    def steps(self) -> list[int]:
        return self.groups["step"].unique().sort().to_list()

    # Finding ---------------------------------------------------------------------------------------------------------

    def find(self, query: Query, usable: Usable | None = None) -> pl.DataFrame:
        """The prompts that fit, `step` and `prompt_id`, in this order.

        Args:
            usable: the method's rule; without it no prompt is "passed".
        """
        steps = _between(query.first, query.last)
        groups, moved = self.groups.filter(*steps), self.moved.filter(*steps)
        if query.model:
            groups, moved = groups.filter(model=query.model), moved.filter(model=query.model)
        if query.reward:
            groups = groups.filter(_of_reward(query.reward))
            if query.reward == "behind":
                solved = self.groups.filter(*steps, pl.col("k") > 0)
                groups = groups.join(solved, on=PROMPT, how="semi")
        if query.low is not None:
            groups = groups.filter(pl.col("reward") >= query.low)
        if query.high is not None:
            groups = groups.filter(pl.col("reward") <= query.high)
        if query.exchange:
            groups = self._of_exchange(query, groups, moved, usable)
        if query.text:
            found = self.search(query.text, query.first, query.last)
            groups = groups.join(found, on=[*PROMPT, "model"], how="semi")
        return groups.select(PROMPT).unique().sort(PROMPT)

    def _of_exchange(
        self, query: Query, groups: pl.DataFrame, moved: pl.DataFrame, usable: Usable | None
    ) -> pl.DataFrame:
        key = [*PROMPT, "model"]
        if query.exchange in ("taken", "refused"):
            admitted = moved.group_by(key).agg(pl.col("admitted").sum())
            some = pl.col("admitted") > 0
            return groups.join(admitted.filter(some if query.exchange == "taken" else ~some), on=key, how="semi")
        untouched = groups.join(moved, on=key, how="anti")
        if query.exchange == "none":
            return untouched
        return untouched.join(self.passed(_between(query.first, query.last), usable), on=key, how="semi")

    def passed(self, steps: Sequence[pl.Expr], usable: Usable | None) -> pl.DataFrame:
        """Groups beside which a peer's group lay that the method could use: step, prompt_id, model."""
        groups = self.groups.filter(*steps).select(*PROMPT, "model", "k", "n")
        if usable is None:
            return groups.clear()
        pairs = groups.join(groups, on=PROMPT, suffix="_peer").filter(pl.col("model") != pl.col("model_peer"))
        counts = ["k", "n", "k_peer", "n_peer"]
        kinds = pairs.select(counts).unique()
        fitting = kinds.filter(pl.Series([usable(*row) for row in kinds.iter_rows()], dtype=pl.Boolean))
        return pairs.join(fitting, on=counts, how="semi").select(*PROMPT, "model").unique()

    def search(self, text: str, first: int | None, last: int | None) -> pl.DataFrame:
        """Groups of which a response, the prompt or the reference contains the text: step, prompt_id, model."""
        key = (text, first, last)
        found = self._found.get(key)
        if found is None:
            found = self._search(text, first, last)
            while len(self._found) >= _SEARCHES_KEPT:
                self._found.pop(next(iter(self._found)), None)
            self._found[key] = found
        return found

    def _search(self, text: str, first: int | None, last: int | None) -> pl.DataFrame:
        steps = _between(first, last)
        prompt = pl.col("messages").list.eval(pl.element().struct.field("content")).list.join("\n")
        asked = pl.concat_str(prompt, pl.col("reference").fill_null(""), separator="\n")
        contains = _contains(pl.col("text"), text) | (
            (pl.col("response_index") == 0) & _contains(asked, text)  # the same in all responses of a group
        )
        files = [self.files[index] for index in self.groups.filter(*steps)["file"].unique().sort()]
        columns = [*PROMPT, "model", "response_index", "text", "messages", "reference"]
        parts = scan_many(
            files, lambda frame: frame.select(columns).filter(*steps, contains).select(*PROMPT, "model").unique()
        )
        empty = self.groups.select(*PROMPT, "model").clear()
        return pl.concat([empty, *parts]).unique()

    # One prompt ------------------------------------------------------------------------------------------------------

    def responses(self, step: int, prompt_id: str) -> pl.DataFrame:
        """All responses to a prompt in a step, all columns of a rollout log, by model and response_index.

        Raises:
            DataError: the prompt is not in the log, or its file cannot be read.
        """
        return self._rows(self.files, self.groups, ROLLOUT_SCHEMA, step, prompt_id, ["model", "response_index"])

    def transfers(self, step: int, prompt_id: str) -> pl.DataFrame:
        """What became of peers' responses to a prompt in a step; no row if none was transferred."""
        if not self.moved.filter(step=step, prompt_id=prompt_id).height:
            return pl.DataFrame(schema=TRANSFER_SCHEMA)
        order = ["receiver", "source", "response_index"]
        return self._rows(self.moved_files, self.moved, TRANSFER_SCHEMA, step, prompt_id, order)

    def _rows(
        self,
        files: Sequence[Path],
        index: pl.DataFrame,
        schema: Schema,
        step: int,
        prompt_id: str,
        order: Sequence[str],
    ) -> pl.DataFrame:
        found = index.filter(step=step)
        if not found.filter(prompt_id=prompt_id).height:
            raise DataError(f"{self.path}: no prompt {prompt_id!r} in step {step}")
        here = (pl.col("step") == step) & (pl.col("prompt_id") == prompt_id)
        parts = [
            collect(files[number], pl.scan_parquet(files[number]).filter(here).select(*schema))
            for number in found["file"].unique().sort()
        ]
        return pl.concat(parts).sort(order)


def _count_groups(files: Sequence[Path]) -> pl.DataFrame:
    key = ["file", *PROMPT, "model"]
    counts = [
        pl.len().cast(pl.Int32).alias("n"),
        (pl.col("reward") == 1.0).sum().cast(pl.Int32).alias("k"),
        pl.col("reward").mean(),
    ]
    parts = scan_many(files, lambda frame: frame.select(*key, "reward").drop_nulls(key).group_by(key).agg(counts))
    types: dict[str, Any] = {"n": pl.Int32, "k": pl.Int32, "reward": pl.Float64}
    return pl.concat([_empty(key, types), *parts])


def _count_moved(files: Sequence[Path]) -> pl.DataFrame:
    key = ["file", *PROMPT, "model", "source"]
    states = ("admitted", "gated", "rejected")
    counts = [
        pl.col("source_step").first(),
        pl.len().cast(pl.Int32).alias("responses"),
        *((pl.col("status") == state).sum().cast(pl.Int32).alias(state) for state in states),
        pl.col("score").mean(),
    ]
    columns = [*key, "source_step", "status", "score"]
    parts = scan_many(
        files,
        lambda frame: frame.rename({"receiver": "model"}).select(columns).group_by(key).agg(counts),
        TRANSFER_SCHEMA,
    )
    types: dict[str, Any] = {"source_step": pl.Int32, "responses": pl.Int32, **dict.fromkeys(states, pl.Int32)}
    return pl.concat([_empty(key, {**types, "score": pl.Float64}), *parts])


def _empty(key: Sequence[str], types: dict[str, Any]) -> pl.DataFrame:
    return pl.DataFrame(schema={**{name: pl.Int32 if name == "step" else pl.String for name in key}, **types})


def _stamp(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error
    return found.st_mtime_ns, found.st_size


def _between(first: int | None, last: int | None) -> list[pl.Expr]:
    step = pl.col("step")
    return [*([step >= first] if first is not None else []), *([step <= last] if last is not None else [])]


def _of_reward(kind: str) -> pl.Expr:
    k, n = pl.col("k"), pl.col("n")
    if kind in ("fail", "behind"):
        return k == 0
    return k == n if kind == "success" else (k > 0) & (k < n)


def _contains(column: pl.Expr, text: str) -> pl.Expr:
    return column.str.contains_any([text], ascii_case_insensitive=True).fill_null(value=False)

"""Everything that is wrong with a rollout log: `graftrl logs validate`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from graftrl.logs.checks import COLUMNS, broken_rules
from graftrl.logs.reader import log_files, schema_faults, version_fault

SLICE_ROWS = 16_384  # rows in memory at once
_GROUP = ["model", "step", "prompt_id"]
_KEY = [*_GROUP, "response_index"]

GroupKey = tuple[str, int, str]
Places = dict[GroupKey, dict[int, str]]  # group -> response_index -> where it stands


@dataclass(frozen=True)
class Problem:
    """first, last: rows of the file, from 1; None where the whole file is meant."""

    file: Path
    message: str
    first: int | None = None
    last: int | None = None

    def __str__(self) -> str:
        if self.first is None:
            return f"{self.file}: {self.message}"
        rows = f"row {self.first}" if self.first == self.last else f"rows {self.first}-{self.last}"
        return f"{self.file}, {rows}: {self.message}"


def validate_log(path: Path) -> Iterator[Problem]:
    """Yield every problem of a log: of files, of rows, then of groups. Consecutive rows with one fault are one problem.

    At most SLICE_ROWS responses are held at once, and four numbers a group.

    Raises:
        DataError: there is no log at the path.
    """
    files = log_files(path)
    parts: list[pl.DataFrame] = []
    for index, file in enumerate(files):
        yield from _check_file(index, file, parts)
    groups = pl.concat(parts) if parts else pl.DataFrame()
    if not groups.height:
        yield Problem(path, "holds no response")
        return
    yield from _check_groups(files, groups)


def _check_file(index: int, file: Path, parts: list[pl.DataFrame]) -> Iterator[Problem]:
    """Problems of a file and its rows; adds what is needed of its groups to `parts`."""
    try:
        metadata, schema = pl.read_parquet_metadata(file), pl.read_parquet_schema(file)
        height = pl.scan_parquet(file).select(pl.len()).collect().item()
    except (pl.exceptions.PolarsError, OSError) as error:
        yield Problem(file, f"torn or not a Parquet file ({_first_line(error)})")
        return
    version = version_fault(metadata.get("graftrl"))
    faults = ([] if version is None else [version]) + schema_faults(schema)
    if faults:
        yield from (Problem(file, fault) for fault in faults)
        return
    columns = list(dict.fromkeys((*COLUMNS, *_KEY)))
    running: dict[str, Problem] = {}
    for start in range(0, height, SLICE_ROWS):
        rows = pl.scan_parquet(file, row_index_name="row", row_index_offset=1).slice(start, SLICE_ROWS)
        try:
            whole = rows.collect()  # all columns, so that every page of the file has been read
        except (pl.exceptions.PolarsError, OSError) as error:
            last = min(start + SLICE_ROWS, height)
            yield Problem(file, f"cannot be decoded ({_first_line(error)})", start + 1, last)
            continue
        frame = whole.select("row", *columns)
        yield from _runs(file, broken_rules(frame), running)
        keyed = frame.drop_nulls(_KEY)
        parts.append(
            keyed.group_by(_GROUP, maintain_order=True)
            .agg(
                pl.len().alias("n"),
                pl.col("response_index").n_unique().alias("distinct"),
                pl.col("response_index").max().alias("highest"),
                pl.col("row").first(),
            )
            .with_columns(file=pl.lit(index))
        )
    yield from running.values()


def _runs(file: Path, faults: pl.DataFrame, running: dict[str, Problem]) -> Iterator[Problem]:
    """Consecutive rows with the same message as one problem; `running` holds those that may go on."""
    for row, message in faults.iter_rows():
        known = running.get(message)
        if known is not None and known.last == row - 1:
            running[message] = replace(known, last=row)
            continue
        if known is not None:
            yield known
        running[message] = Problem(file, message, row, row)


def _check_groups(files: list[Path], parts: pl.DataFrame) -> Iterator[Problem]:
    groups = parts.group_by(_GROUP, maintain_order=True).agg(
        pl.col("n", "distinct").sum(),
        pl.col("highest").max(),
        pl.col("row", "file").first(),
        pl.len().alias("parts"),
    )
    doubtful = (pl.col("distinct") < pl.col("n")) | (pl.col("parts") > 1) | (pl.col("highest") + 1 != pl.col("n"))
    places: Places = {}
    suspects = groups.filter(doubtful).select(_GROUP)
    if suspects.height:
        for index in parts.join(suspects, on=_GROUP, how="semi")["file"].unique().sort():
            yield from _duplicates(files[index], suspects, places)
    sizes = {key: len(indices) for key, indices in places.items()}
    usual = _usual_sizes(groups, sizes)
    for model, step, prompt_id, n, _, _, row, file, _ in groups.iter_rows():
        key = (model, step, prompt_id)
        size = sizes.get(key, n)
        gaps = sorted(set(range(max(places[key]) + 1)) - set(places[key])) if key in places else []
        faults = [f"has {size} responses, most groups of {model!r} have {usual[model]}"] if size != usual[model] else []
        if gaps:
            faults.append(f"lacks response_index {', '.join(map(str, gaps[:5]))}{', ...' if len(gaps) > 5 else ''}")
        if faults:
            yield Problem(files[file], f"the group of {_name(*key)} {'; '.join(faults)}", row, row)


def _duplicates(file: Path, suspects: pl.DataFrame, places: Places) -> Iterator[Problem]:
    """Responses of the suspect groups that occurred before; fills in where each index of a group stands."""
    query = pl.scan_parquet(file, row_index_name="row", row_index_offset=1).select("row", *_KEY).drop_nulls()
    rows = query.collect().join(suspects, on=_GROUP, how="semi", maintain_order="left")
    for row, model, step, prompt_id, response_index in rows.iter_rows():
        of_group = places.setdefault((model, step, prompt_id), {})
        if response_index in of_group:
            what = f"response_index {response_index} of {_name(model, step, prompt_id)}"
            yield Problem(file, f"{what} occurs again; first in {of_group[response_index]}", row, row)
        else:
            of_group[response_index] = f"{file}, row {row}"


def _usual_sizes(groups: pl.DataFrame, sizes: dict[GroupKey, int]) -> dict[str, int]:
    """The most frequent group size of each model; of two equally frequent the larger."""
    counts: dict[str, dict[int, int]] = {}
    for model, step, prompt_id, n in groups.select(*_GROUP, "n").iter_rows():
        size = sizes.get((model, step, prompt_id), n)
        of_model = counts.setdefault(model, {})
        of_model[size] = of_model.get(size, 0) + 1
    return {model: max(of_model, key=lambda size: (of_model[size], size)) for model, of_model in counts.items()}


def _name(model: str, step: int, prompt_id: str) -> str:
    return f"{model!r}, step {step}, prompt {prompt_id!r}"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]

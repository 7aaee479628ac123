"""Several rollout logs as one folder: `graftrl logs merge`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from graftrl.errors import ConfigError, DataError
from graftrl.logs.checks import broken_rules
from graftrl.logs.folders import new_folder, writing
from graftrl.logs.reader import check_file, collect, log_files
from graftrl.logs.rollouts import ROLLOUT_SCHEMA, step_file_name, write_frame

_GROUP = ["model", "step", "prompt_id"]
_KEY = [*_GROUP, "response_index"]
_CONTENT = [name for name in ROLLOUT_SCHEMA if name not in ("run", *_KEY)]


@dataclass(frozen=True)
class Source:
    """One log of a merge. rename: old model name -> new one. step_offset: added to its steps."""

    path: Path
    rename: Mapping[str, str] = field(default_factory=dict)
    step_offset: int = 0


@dataclass
class MergeReport:
    responses: int = 0
    steps: int = 0
    identical: int = 0  # responses left out because another log has the same
    faulty: int = 0  # responses with a fault that were left out
    companions: int = 0  # others of their groups
    torn: list[str] = field(default_factory=list)


def parse_sources(paths: Sequence[Path], renames: Sequence[str], offsets: Sequence[str]) -> list[Source]:
    """Sources from command-line options: renames `[N:]OLD=NEW`, offsets `N:K`, N counted from 1.

    Raises:
        ConfigError: an option that does not have this form or names a log that there is not.
    """
    rename: list[dict[str, str]] = [{} for _ in paths]
    offset = [0 for _ in paths]
    for option in renames:
        number, colon, pair = option.partition(":") if option.split(":")[0].isdigit() else ("", "", option)
        old, equals, new = pair.partition("=")
        if not (old and equals and new):
            raise ConfigError(f"--rename {option}: write [N:]OLD=NEW, for example 2:small=small-b")
        for mapping in [rename[_position("--rename", option, number, paths)]] if colon else rename:
            mapping[old] = new
    for option in offsets:
        number, _, steps = option.partition(":")
        if not steps.removeprefix("-").isdigit():
            raise ConfigError(f"--step-offset {option}: write N:K, for example 2:100")
        offset[_position("--step-offset", option, number, paths)] = int(steps)
    return [Source(*each) for each in zip(paths, rename, offset, strict=True)]


def _position(name: str, option: str, number: str, paths: Sequence[Path]) -> int:
    if not number.isdigit() or not 1 <= int(number) <= len(paths):
        raise ConfigError(f"{name} {option}: there is no log number {number!r}; there are {len(paths)}")
    return int(number) - 1


def merge_logs(sources: Sequence[Source], out: Path, *, drop_faulty: bool = False) -> MergeReport:
    """Write the responses of all sources into one new folder, a file a step. One step is in memory at a time.

    Responses with the same model, step, prompt and index must have the same content, apart from the run's name; then
    one of them is kept.

    Args:
        drop_faulty: leave out torn files, responses that cannot be used, and the rest of their groups (successes and
            advantages belong to whole groups).

    Raises:
        DataError: two responses of the same place with different content (both are named), a torn file without
            `drop_faulty`, a model to rename that does not occur, an `out` that exists. Nothing is then written.
    """
    report = MergeReport()
    places = _places(sources, report, drop_faulty)
    with new_folder(out) as folder:
        for step in sorted(places):
            frame = pl.concat([_read(file, source, step) for file, source in places[step]])
            frame = _without_faulty_groups(frame, report) if drop_faulty else _with_keys(frame)
            frame = _one_of_each(frame, report)
            if frame.height:
                with writing(out):
                    write_frame(folder / step_file_name(step), frame.select(*ROLLOUT_SCHEMA))
                report.steps += 1
                report.responses += frame.height
        if not report.responses:
            raise DataError(f"{', '.join(str(source.path) for source in sources)}: no response to merge")
    return report


def _places(sources: Sequence[Source], report: MergeReport, drop_faulty: bool) -> dict[int, list[tuple[Path, Source]]]:
    """Which files hold a step of the result."""
    places: dict[int, list[tuple[Path, Source]]] = {}
    renamed: set[str] = set()
    for source in sources:
        models: set[str] = set()
        for file in log_files(source.path):
            try:
                check_file(file)
                found = collect(file, pl.scan_parquet(file).select("model", "step").unique())
            except DataError as error:
                if not drop_faulty:
                    raise
                report.torn.append(str(error))
                continue
            models |= set(found["model"].drop_nulls())
            if found["step"].null_count() and not drop_faulty:
                raise DataError(f"{file}: rows without a step; 'graftrl logs validate {file}' lists them")
            for step in found["step"].drop_nulls().unique():
                if step + source.step_offset < 0:
                    raise DataError(f"{file}: step {step} would become {step + source.step_offset}")
                places.setdefault(step + source.step_offset, []).append((file, source))
        renamed |= models & set(source.rename)
    unknown = sorted({old for source in sources for old in source.rename} - renamed)
    if unknown:
        raise DataError(f"no log has a model {unknown[0]!r} to rename")
    return places


def _read(file: Path, source: Source, step: int) -> pl.DataFrame:
    """The rows of a step of the result, with `file` and `row` for messages."""
    query = (
        pl.scan_parquet(file, row_index_name="row", row_index_offset=1)
        .filter(pl.col("step") == step - source.step_offset)
        .select("row", *ROLLOUT_SCHEMA)
        .with_columns(
            pl.col("model").replace(dict(source.rename)),
            pl.lit(step, pl.Int32).alias("step"),
            pl.lit(str(file)).alias("file"),
        )
    )
    return collect(file, query)


def _with_keys(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame itself. Raises DataError where a response does not say which one it is."""
    nameless = frame.filter(pl.any_horizontal(pl.col(name).is_null() for name in _KEY))
    if nameless.height:
        file, row = nameless["file"][0], nameless["row"][0]
        raise DataError(
            f"{file}, row {row}: lacks a model, step, prompt_id or response_index; --drop-faulty leaves it out"
        )
    return frame


def _one_of_each(frame: pl.DataFrame, report: MergeReport) -> pl.DataFrame:
    """Without repeated responses. Raises DataError where repeated ones differ."""
    different = frame.unique([*_KEY, *_CONTENT], keep="first", maintain_order=True)
    clash = different.filter(pl.struct(_KEY).is_duplicated())
    if clash.height:
        first = clash.row(0, named=True)
        other = clash.filter(pl.struct(_KEY) == pl.lit({name: first[name] for name in _KEY})).row(1, named=True)
        columns = ", ".join(name for name in _CONTENT if first[name] != other[name])
        raise DataError(
            f"response {first['response_index']} of {first['model']!r}, step {first['step']}, prompt "
            f"{first['prompt_id']!r} differs in {columns}: {first['file']}, row {first['row']}, and {other['file']}, "
            f"row {other['row']}; --rename gives one of the models another name, --step-offset moves its steps"
        )
    report.identical += frame.height - different.height
    return different


def _without_faulty_groups(frame: pl.DataFrame, report: MergeReport) -> pl.DataFrame:
    """Without the responses that cannot be used and the others of their groups in the same file."""
    keys = ["file", *_GROUP]
    numbered = frame.rename({"row": "row_of_file"}).with_row_index("row")
    faulty = broken_rules(numbered, blocking_only=True)["row"].unique()
    groups = numbered.filter(pl.col("row").is_in(faulty.implode())).select(keys).unique()
    kept = numbered.join(groups, on=keys, how="anti", nulls_equal=True, maintain_order="left")
    report.faulty += len(faulty)
    report.companions += frame.height - kept.height - len(faulty)
    return kept.drop("row").rename({"row_of_file": "row"})

"""Rows of a data source as prompts: every fault is named with file, row and field."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from graftrl.errors import ConfigError, DataError
from graftrl.rollout import Prompt
from graftrl.tasks.config import DataSource, ProblemTemplate

Row = Mapping[str, Any]


def load_prompts(source: DataSource, template: ProblemTemplate, task: str) -> tuple[list[Prompt], list[str]]:
    """The prompts of a source and notes on rows left out because their reference is empty. Raises as `read_prompts`."""
    prompts = read_prompts(source, template, task)
    return drop(prompts, lambda prompt: bool(prompt.reference), source.name, "an empty reference answer")


def read_prompts(source: DataSource, template: ProblemTemplate, task: str) -> list[Prompt]:
    """All prompts of a source.

    Raises DataError for an unreadable file or row, a missing field, a duplicate id or an empty data set; ConfigError
    when reading needs a package that is not installed.
    """
    rows = chosen_rows(source)
    has_ids = any(source.id_field in row for _, row in rows)
    prompts = [_prompt(source, template, task, number, row, has_ids) for number, row in rows]
    if not prompts:
        raise DataError(f"{source.name}: the data set is empty")
    refuse_duplicates(prompts, source.name)
    return prompts


def drop(prompts: list[Prompt], keep: Any, where: str, fault: str) -> tuple[list[Prompt], list[str]]:
    """The prompts that `keep` accepts, and a note that counts the others. Raises DataError when none is left."""
    kept = [prompt for prompt in prompts if keep(prompt)]
    dropped = [prompt.id for prompt in prompts if not keep(prompt)]
    if not kept:
        raise DataError(f"{where}: all {len(prompts)} rows have {fault}")
    if not dropped:
        return kept, []
    named = ", ".join(dropped[:5]) + (", ..." if len(dropped) > 5 else "")
    return kept, [f"{where}: {len(dropped)} of {len(prompts)} rows left out for {fault}: {named}"]


def refuse_duplicates(prompts: Iterable[Prompt], where: str) -> None:
    """Raise DataError when two prompts share an id: groups are found by it."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise DataError(f"{where}: the id {prompt.id!r} occurs more than once")
        seen.add(prompt.id)


def _prompt(source: DataSource, template: ProblemTemplate, task: str, number: int, row: Row, has_ids: bool) -> Prompt:
    def field(name: str) -> Any:
        if row.get(name) is None:
            there = ", ".join(key for key, value in row.items() if value is not None) or "none"
            raise DataError(f"{source.name}, row {number}: no field {name!r}; the row has: {there}")
        return row[name]

    problem, answer = field(source.problem_field), field(source.answer_field)
    if isinstance(answer, list) and answer and all(isinstance(part, str | int | float) for part in answer):
        answer = ", ".join(str(part) for part in answer)  # as OlympiadBench writes several values
    if not isinstance(problem, str) or not problem.strip():
        raise DataError(f"{source.name}, row {number}: field {source.problem_field!r} is no text")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(f"{source.name}, row {number}: field {source.answer_field!r} is neither text nor a number")
    used = (source.id_field, source.problem_field, source.answer_field)
    return Prompt(
        id=str(field(source.id_field)) if has_ids else f"{source.stem}-{number}",
        messages=template.messages(problem),
        reference=str(answer).strip(),
        task=task,
        metadata={key: value for key, value in row.items() if key not in used},
    )


def chosen_rows(source: DataSource) -> list[tuple[int, Row]]:
    """Rows with their number, as many as the source's limit says. Raises as `read_prompts`."""
    rows = list(numbered_rows(source))
    if source.limit is not None and source.limit < len(rows):
        kept = sorted(random.Random(source.seed).sample(range(len(rows)), source.limit))
        rows = [rows[index] for index in kept]
    return rows


def numbered_rows(source: DataSource) -> Iterator[tuple[int, Row]]:
    """Rows with their number, from 1; in a JSONL file the line number."""
    if source.path is None:
        return enumerate(_hub_rows(source), start=1)
    if not source.path.is_file():
        raise DataError(f"{source.path}: no such file")
    if source.path.suffix == ".parquet":
        return enumerate(_parquet_rows(source.path), start=1)
    return read_jsonl(source.path)


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) for every line that is not blank, streaming. Raises DataError naming file and line."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise DataError(f"{path}, line {number}: not a JSON object but {type(row).__name__}")
                yield number, row
    except (ValueError, RecursionError, EOFError, zlib.error, gzip.BadGzipFile) as error:  # JSON and UTF-8: ValueError
        raise DataError(f"{path}, line {number}: not readable as JSON ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _parquet_rows(path: Path) -> Iterator[Row]:
    import polars

    try:
        frame = polars.read_parquet(path)
    except (polars.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path}: not readable as Parquet ({error})") from error
    return frame.iter_rows(named=True)


def _hub_rows(source: DataSource) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("hub data sets need the `datasets` package: pip install 'graftrl[hub]'") from error
    from graftrl.hub import hub_or_cache  # late, as the package above

    obstacle: str | None = None
    try:
        with hub_or_cache() as obstacle:
            return iter(datasets.load_dataset(source.hub, source.subset, split=source.split))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        why = str(error) if obstacle is None else f"not in the hub's local cache, and {obstacle}"
        raise DataError(f"{source.name}: {why}") from error

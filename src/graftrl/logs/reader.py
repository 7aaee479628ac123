"""Reading rollout logs by column and by step: what is held in memory is what was asked for, however long the log is."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from graftrl.errors import DataError
from graftrl.logs.checks import any_blocked, broken_rules
from graftrl.logs.rollouts import ROLLOUT_SCHEMA, SCHEMA_VERSION
from graftrl.rollout import Group, Prompt, Response

Schema = Mapping[str, pl.DataType]
SamplingKey = tuple[float | None, float | None, int | None]  # temperature, top_p, top_k; None where unknown

_FILES_AT_ONCE = 128
_CATALOG = ("model", "step", "temperature", "top_p", "top_k", "tokenizer_fingerprint")


class RolloutLog:
    """The rollouts of one or several logs. A log is a run folder, a folder of Parquet files, or one such file.

    Opening it reads the footer of every file and the few columns that say which models and steps it holds. Everything
    else is read when it is asked for, from the files that hold it.

    Attributes:
        files: in the order of the paths, and within a folder in the order of names.
        models: names, in order of appearance.

    Raises:
        DataError: a path without Parquet files, a torn file, a schema version that is not known, a missing column or
            one of the wrong type, or no response at all; file and reason are named.
    """

    def __init__(self, path: Path | Sequence[Path]) -> None:
        paths = [path] if isinstance(path, Path) else list(path)
        self.files: list[Path] = [file for each in paths for file in log_files(each)]
        self.name = ", ".join(str(each) for each in paths)
        for file in self.files:
            check_file(file)
        self._catalog = self._read_catalog()
        if not self._catalog.height:
            raise DataError(f"{self.name}: the log is empty: no file holds a response")
        self.models: tuple[str, ...] = tuple(self._catalog["model"].unique(maintain_order=True))
        self._group_index: dict[str, pl.DataFrame] = {}

    def steps(self, model: str) -> list[int]:
        """The steps in which the model has responses, ascending."""
        return self._of(model)["step"].unique().sort().to_list()

    def sampling(self, model: str) -> set[SamplingKey]:
        """Every (temperature, top_p, top_k) that occurs; None where the log does not say."""
        return set(self._of(model).select("temperature", "top_p", "top_k").unique().iter_rows())

    def fingerprints(self, model: str) -> set[str | None]:
        """Fingerprints of the tokenizers whose ids are in the log; None where it does not say."""
        return set(self._of(model)["tokenizer_fingerprint"].unique())

    def group_index(self, model: str) -> pl.DataFrame:
        """One row per group: step (int32), prompt_id (string), n (responses, uint32), k (of reward 1, uint32).

        In the order of steps and, within a step, of prompt ids. No text is read.

        Raises:
            DataError: a response without a reward.
        """
        if model not in self._group_index:
            self._group_index[model] = self._count(model)
        return self._group_index[model]

    def groups(self, model: str, keys: Sequence[tuple[int, str]]) -> dict[tuple[int, str], Group]:
        """The groups of these (step, prompt_id), in the order asked for; responses in the order of response_index.

        Only the files of these steps are opened.

        Raises:
            DataError: a group that is not in the log; a response that breaks a rule, such as one without
                log-probabilities; two responses of the same index.
        """
        if not keys:
            return {}
        wanted = pl.DataFrame(keys, schema={"step": pl.Int32, "prompt_id": pl.String}, orient="row").unique()
        files = self._files_of(self._of(model).filter(pl.col("step").is_in(wanted["step"].implode())))
        found = _groups(model, self._rows(files, model, wanted)) if files else {}
        missing = next((key for key in keys if key not in found), None)
        if missing is not None:
            raise DataError(f"{self.name}: no group of {model!r} on prompt {missing[1]!r} in step {missing[0]}")
        return {key: found[key] for key in keys}

    def _rows(self, files: list[Path], model: str, wanted: pl.DataFrame) -> pl.DataFrame:
        """The rows of the wanted groups, after checking that each can be used, and the column `file`.

        All files are read in one query where they have the same columns. What is wrong with a row is worked out only
        when something is.
        """
        try:
            rows = _wanted_rows(pl.scan_parquet(files, include_file_paths="file"), model, wanted)
        except (
            pl.exceptions.PolarsError,
            OSError,
        ):  # one by one: other columns do no harm, a torn file is named
            parts = []
            for file in files:
                with _named(file):
                    part = _wanted_rows(pl.scan_parquet(file).select(*ROLLOUT_SCHEMA), model, wanted)
                parts.append(part.with_columns(file=pl.lit(str(file))))
            rows = pl.concat(parts)
        if any_blocked(rows):
            for file in files:
                _raise_first_fault(file, model, wanted)
        return rows

    def _of(self, model: str) -> pl.DataFrame:
        rows = self._catalog.filter(pl.col("model") == model)
        if not rows.height:
            raise DataError(f"{self.name}: no responses of a model {model!r}; the log has: {', '.join(self.models)}")
        return rows

    def _files_of(self, catalog: pl.DataFrame) -> list[Path]:
        return [self.files[index] for index in catalog["file"].unique().sort()]

    def _read_catalog(self) -> pl.DataFrame:
        """Which models, steps, sampling settings and tokenizers occur in which file (its index in `files`)."""
        rows: list[tuple[Any, ...]] = []  # small frames cut out of large ones would keep those in memory
        for part in scan_many(self.files, lambda frame: frame.select("file", *_CATALOG).unique(maintain_order=True)):
            rows += part.rows()
        schema = {"file": pl.String(), **{name: ROLLOUT_SCHEMA[name] for name in _CATALOG}}
        found = pl.DataFrame(rows, schema=schema, orient="row")
        nameless = found.filter(pl.col("model").is_null() | pl.col("step").is_null())
        if nameless.height:
            file = nameless["file"][0]
            raise DataError(f"{file}: rows without a model or step; 'graftrl logs validate {file}' lists them")
        indices = {str(file): index for index, file in enumerate(self.files)}
        return found.with_columns(pl.col("file").replace_strict(indices, return_dtype=pl.Int64))

    def _count(self, model: str) -> pl.DataFrame:
        keys = ["step", "prompt_id"]
        counts = [pl.len().alias("n"), (pl.col("reward") == 1.0).sum().alias("k")]
        counts.append(pl.col("reward").is_null().sum().alias("ungraded"))

        def query(frame: pl.LazyFrame) -> pl.LazyFrame:
            of_model = frame.filter(pl.col("model") == model).select(*keys, "reward", "file")
            return of_model.group_by(keys).agg(*counts, pl.col("file").first())

        parts = []
        for part in scan_many(self._files_of(self._of(model)), query):
            bad = part.filter((pl.col("ungraded") > 0) | pl.col("prompt_id").is_null())
            if bad.height:
                file = bad["file"][0]
                raise DataError(
                    f"{file}: {model!r} has responses without a reward or prompt_id; "
                    f"'graftrl logs validate {file}' lists them"
                )
            parts.append(part.drop("ungraded", "file"))
        return pl.concat(parts).group_by(keys).agg(pl.col("n", "k").sum()).sort(keys)


def log_files(path: Path) -> list[Path]:
    """The Parquet files of a log. Raises DataError where there are none."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder")
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    files = sorted(file for file in folder.glob("*.parquet") if not file.name.startswith("."))
    if not files:
        raise DataError(
            f"{folder}: no Parquet file; a log is a run folder (with rollouts/), a folder of Parquet files, or one file"
        )
    return files


def check_file(file: Path, expected: Schema = ROLLOUT_SCHEMA) -> None:
    """Raises DataError unless the file is whole and a log of this schema and of a version that this program knows."""
    with _named(file):
        metadata, schema = pl.read_parquet_metadata(file), pl.read_parquet_schema(file)
    fault = version_fault(metadata.get("graftrl")) or next(iter(schema_faults(schema, expected)), None)
    if fault is not None:
        raise DataError(f"{file}: {fault}")


def version_fault(metadata: str | None) -> str | None:
    """What is wrong with a file's `graftrl` metadata, if anything."""
    if metadata is None:
        return "no rollout log (the metadata 'graftrl' is missing); `graftrl logs import` reads other formats"
    try:
        version = json.loads(metadata)["schema_version"]
    except (ValueError, TypeError, KeyError):
        return f"the metadata 'graftrl' is not readable: {metadata[:80]!r}"
    if version != SCHEMA_VERSION:
        return f"has schema version {version}, but this version of graftrl reads {SCHEMA_VERSION}"
    return None


def schema_faults(schema: Mapping[str, pl.DataType], expected: Schema = ROLLOUT_SCHEMA) -> list[str]:
    """Columns that are missing or of the wrong type; further columns are ignored."""
    faults = []
    missing = [name for name in expected if name not in schema]
    if missing:
        what = "no rollout log" if expected is ROLLOUT_SCHEMA else "no log of exchanges"
        faults.append(f"{what}: column {', '.join(map(repr, missing))} missing")
    faults += [
        f"column {name!r} is of type {schema[name]}, not {dtype}"
        for name, dtype in expected.items()
        if name in schema and schema[name] != dtype
    ]
    return faults


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    try:
        yield
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{file}: torn or not a Parquet file ({reason})") from error


def collect(file: Path, query: pl.LazyFrame) -> pl.DataFrame:
    """The result of a query on one file. Raises DataError naming the file where it cannot be decoded."""
    with _named(file):
        return query.collect()


def scan_many(
    files: Sequence[Path], query: Callable[[pl.LazyFrame], pl.LazyFrame], schema: Schema = ROLLOUT_SCHEMA
) -> Iterator[pl.DataFrame]:
    """The results of a query on batches of files, streamed: in memory are a few row groups and the result.

    Args:
        files: checked by `check_file`.
        query: reads the columns of the schema and `file`, the path of the row's file.

    Raises:
        DataError: naming the file that cannot be decoded.
    """
    for start in range(0, len(files), _FILES_AT_ONCE):
        batch = list(files[start : start + _FILES_AT_ONCE])
        try:
            yield _streamed(batch, query, schema)
        except (pl.exceptions.PolarsError, OSError):
            for file in batch:
                with _named(file):
                    _streamed([file], query, schema)
            raise


def _streamed(files: list[Path], query: Callable[[pl.LazyFrame], pl.LazyFrame], schema: Schema) -> pl.DataFrame:
    frame = pl.scan_parquet(files, schema=schema, extra_columns="ignore", include_file_paths="file")
    return query(frame).collect(engine="streaming")


def _wanted_rows(scan: pl.LazyFrame, model: str, wanted: pl.DataFrame) -> pl.DataFrame:
    """The model's rows of the wanted (step, prompt_id)."""
    keys = ["step", "prompt_id"]
    among = [pl.col(key).is_in(wanted[key].unique().implode()) for key in keys]
    return (
        scan.filter(pl.col("model") == model, *among).collect().join(wanted, on=keys, how="semi", maintain_order="left")
    )


def _raise_first_fault(file: Path, model: str, wanted: pl.DataFrame) -> None:
    rows = _wanted_rows(pl.scan_parquet(file, row_index_name="row", row_index_offset=1), model, wanted)
    faults = broken_rules(rows, blocking_only=True)
    if faults.height:
        more = f" (and {faults.height - 1} more)" if faults.height > 1 else ""
        raise DataError(f"{file}, row {faults['row'][0]}: the response {faults['message'][0]}{more}")


def _arrays(lists: pl.Series, dtype: type) -> list[NDArray[Any]]:
    """One array per list. The rules have made sure that no list is null or empty."""
    values: NDArray[Any] = lists.explode().to_numpy().astype(dtype)
    stops = lists.list.len().cum_sum().to_list()
    return [values[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def _groups(model: str, rows: pl.DataFrame) -> dict[tuple[int, str], Group]:
    """Column by column, for a step has hundreds of responses: a prompt is built once a group, not once a response."""
    rows = rows.sort("step", "prompt_id", "response_index")
    indices = rows["response_index"].to_list()
    columns = zip(
        rows["text"].to_list(),
        _arrays(rows["token_ids"], np.int64),
        _arrays(rows["logprobs"], np.float32),
        rows["finish_reason"].to_list(),
        rows["reward"].to_list(),
        rows["grade_reason"].fill_null("").to_list(),
        strict=True,
    )
    responses = [Response(*of_response) for of_response in columns]
    per_group = rows.group_by("step", "prompt_id", maintain_order=True)
    found: dict[tuple[int, str], Group] = {}
    start = 0
    for step, prompt_id, n, task, messages, reference in per_group.agg(
        pl.len(), pl.col("task").first(), pl.col("messages").first(), pl.col("reference").first().fill_null("")
    ).iter_rows():
        stop = start + n
        for one, other in itertools.pairwise(indices[start:stop]):
            if one == other:
                twice = rows.slice(start, n).filter(pl.col("response_index") == one)
                raise DataError(
                    f"{model!r}, step {step}, prompt {prompt_id!r}: response_index {one} occurs twice "
                    f"({_places(model, twice)})"
                )
        prompt = Prompt(prompt_id, tuple(messages), reference, task)
        found[step, prompt_id] = Group(model, prompt, responses[start:stop])
        start = stop
    return found


def _places(model: str, responses: pl.DataFrame) -> str:
    """Files and row numbers of two responses of one index."""
    keys = ("step", "prompt_id", "response_index")
    same = [pl.col(key) == responses[key][0] for key in keys]
    found = []
    for file in responses["file"].unique(maintain_order=True):
        scan = pl.scan_parquet(file, row_index_name="row", row_index_offset=1)
        numbers = scan.filter(pl.col("model") == model, *same).select("row").collect()["row"]
        found += [f"{file}, row {number}" for number in numbers]
    return "; ".join(found[:2])

"""Rollouts as other trainers write them, one response at a time.

verl (`trainer.rollout_data_dir`): one JSONL file a step, `<step>.jsonl`. A line has `input` (the prompt after the chat
template, decoded without special tokens), `output` (the response, likewise), `score`, `step`, in newer versions `gts`
(the reference), and whatever the reward function adds, such as `acc`. Lines of a prompt need not stand together.

TRL (`log_completions=True`): `completions/completions_<step>.parquet` with `step`, `prompt`, `completion`, one column
per reward function (named like it), and `advantage`. Prompts and completions are texts or lists of chat messages. Every
file holds the last generation batch, so that a batch is repeated where it serves several steps.

Neither records token ids, log-probabilities, sampling settings, or whether a response ended by itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from graftrl.errors import DataError
from graftrl.rollout import Message, Prompt
from graftrl.tasks.data import read_jsonl

_TRL_COLUMNS = ("step", "prompt", "completion", "advantage")


@dataclass(frozen=True, slots=True)
class Foreign:
    """One response.

    where: file and line or row, for people. reward: as logged; None if missing or NaN. plain: the prompt is a text,
    not chat messages; it then stands in one user message. rendered: that text went through a chat template and lost its
    special tokens.
    """

    where: str
    step: int
    messages: tuple[Message, ...]
    text: str
    reference: str | None
    reward: float | None
    plain: bool
    rendered: bool

    @property
    def asked(self) -> str:
        """The last message, without a given beginning of the answer."""
        return Prompt("", self.messages, "", "").question[-1]["content"]


def read_verl(path: Path, reward: str | None, notes: list[str]) -> Iterator[Foreign]:
    """The lines of one file or of all `*.jsonl` files of a folder.

    Args:
        reward: the field that holds the reward; None: `score`.
        notes: gets lines for people; here none.

    Raises:
        DataError: naming file, line and field.
    """
    field = reward or "score"
    for file in _files(path, ".jsonl"):
        for number, line in read_jsonl(file):
            where = f"{file}, line {number}"
            step = line.get("step", int(file.stem) if file.stem.isdigit() else None)
            yield Foreign(
                where=where,
                step=_step(where, step),
                messages=({"role": "user", "content": _text(where, "input", line.get("input"))},),
                text=_text(where, "output", line.get("output")),
                reference=reference_of(line.get("gts")),
                reward=_number(where, field, line),
                plain=True,
                rendered=True,
            )


def read_trl(path: Path, reward: str | None, notes: list[str]) -> Iterator[Foreign]:
    """The rows of one file or of all Parquet files of a folder; a file that repeats the one before is left out.

    Args:
        reward: the column that holds the reward; None: the only column of numbers besides step and advantage.
        notes: gets a line about files that were left out.

    Raises:
        DataError: naming file, row and column.
    """
    before: list[tuple[Any, Any]] = []
    repeated = 0
    for file in _files(path, ".parquet"):
        try:
            frame = pl.read_parquet(file)
        except (pl.exceptions.PolarsError, OSError) as error:
            raise DataError(f"{file}: not readable as Parquet ({str(error).splitlines()[0]})") from error
        missing = [name for name in _TRL_COLUMNS[:3] if name not in frame.columns]
        if missing:
            raise DataError(f"{file}: no column {missing[0]!r}; it has: {', '.join(frame.columns)}")
        column = reward or _only_reward(file, frame)
        rows = frame.to_dicts()
        contents = [(row["prompt"], row["completion"]) for row in rows]
        if contents == before:
            repeated += 1
            continue
        before = contents
        for number, row in enumerate(rows, start=1):
            where = f"{file}, row {number}"
            plain = isinstance(row["prompt"], str)
            yield Foreign(
                where=where,
                step=_step(where, row["step"]),
                messages=messages_of(where, row["prompt"]),
                text=_completion(where, row["completion"]),
                reference=None,
                reward=_number(where, column, row),
                plain=plain,
                rendered=False,
            )
    if repeated:
        notes.append(f"{repeated} files repeat the generation batch of the file before and were left out")


def _files(path: Path, suffix: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder")
    files = [file for file in path.glob(f"*{suffix}") if not file.name.startswith(".")]
    if not files:
        raise DataError(f"{path}: holds no {suffix} file")
    return sorted(files, key=lambda file: (int("".join(c for c in file.stem if c.isdigit()) or 0), file.name))


def _step(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise DataError(f"{where}: field 'step' is {value!r}, not a step number")
    return value


def _text(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: field {name!r} is {'missing' if value is None else 'no text'}")
    return value


def _number(where: str, name: str, row: dict[str, Any]) -> float | None:
    if name not in row:
        raise DataError(f"{where}: no field {name!r}; it has: {', '.join(row)}")
    value = row[name]
    if value is None:
        return None
    if not isinstance(value, bool | int | float):
        raise DataError(f"{where}: field {name!r} is {value!r}, not a number")
    return None if math.isnan(value) else float(value)


def reference_of(value: Any) -> str | None:
    """A logged reference as text; JSON where it is something else."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _only_reward(file: Path, frame: pl.DataFrame) -> str:
    numbers = [
        name
        for name, dtype in frame.schema.items()
        if name not in _TRL_COLUMNS and (dtype.is_numeric() or dtype == pl.Boolean)
    ]
    if len(numbers) != 1:
        found = ", ".join(numbers) or "none"
        raise DataError(f"{file}: which column is the reward? Choose it with --reward; columns of numbers: {found}")
    return numbers[0]


def messages_of(where: str, prompt: Any) -> tuple[Message, ...]:
    """A prompt of TRL as chat messages. Raises DataError, beginning with `where`, for one that is not plain text."""
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: the prompt is neither a text nor a list of messages")
    messages = tuple({"role": _text(where, "role", m.get("role")), "content": _content(where, m)} for m in prompt)
    if all(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: the prompt asks nothing: all its messages are the assistant's")
    return messages


def _completion(where: str, completion: Any) -> str:
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list) or len(completion) != 1 or completion[0].get("role") != "assistant":
        raise DataError(f"{where}: the completion is not one assistant message (tool calls cannot be imported)")
    return _content(where, completion[0])


def _content(where: str, message: dict[str, Any]) -> str:
    """The text of a message. What was parsed out of it (reasoning, tool calls) cannot be put back."""
    others = [name for name, value in message.items() if name not in ("role", "content") and value]
    if others:
        raise DataError(f"{where}: a message has {others[0]!r} besides its content; its text cannot be restored")
    content = message.get("content")
    if isinstance(content, list):
        return "".join(_block(where, block) for block in content)
    return _text(where, "content", content)


def _block(where: str, block: dict[str, Any]) -> str:
    if block.get("type") != "text":
        raise DataError(f"{where}: a message holds {block.get('type')!r}; only text can be imported")
    return _text(where, "text", block.get("text"))


READERS: dict[str, Callable[[Path, str | None, list[str]], Iterator[Foreign]]] = {"verl": read_verl, "trl": read_trl}

"""Rollouts of other trainers as a rollout log: `graftrl logs import`."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from graftrl.errors import DataError
from graftrl.exchange import Rejected, encode_response
from graftrl.logs.folders import new_folder, writing
from graftrl.logs.formats import Foreign
from graftrl.logs.matching import Match, TaskPrompts, text_id
from graftrl.logs.reader import SamplingKey
from graftrl.logs.rollouts import ROLLOUT_SCHEMA, step_file_name, write_frame
from graftrl.objective import group_advantages
from graftrl.policies.codec import Codec
from graftrl.rollout import Prompt

_SPILL_CHARACTERS = 64_000_000  # of text held before it goes to disk, sorted by step
_NEAR_LIMIT = 0.98
_PART_SCHEMA: dict[str, Any] = {
    "where": pl.String,
    "messages": ROLLOUT_SCHEMA["messages"],
    "asked": pl.String,
    "text": pl.String,
    "reference": pl.String,
    "reward": pl.Float64,
    "plain": pl.Boolean,
    "rendered": pl.Boolean,
}


@dataclass(frozen=True)
class ImportSettings:
    """What a foreign log does not say.

    model: the name that its responses get. sampling: temperature, top_p, top_k; None where unknown.
    success_above: rewards above it become 1, others 0; None keeps rewards, which must then lie in [0, 1].
    drop_unmatched: leave out prompts that the task does not have, instead of refusing the log.
    assume_finished: every response ended by itself.
    max_response_tokens: those that have this many tokens or more, without an EOS, count as cut, the others as finished;
        needs a codec. Without either, finish reasons stay unknown.
    """

    model: str
    run: str
    sampling: SamplingKey
    success_above: float | None = None
    drop_unmatched: bool = False
    assume_finished: bool = False
    max_response_tokens: int | None = None


@dataclass
class ImportReport:
    """What was written, and what a person should know about it."""

    responses: int = 0
    groups: int = 0
    steps: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def notes(self) -> list[str]:
        return [text.format(self.counts[name]) for name, text in _NOTES.items() if self.counts[name]] + [
            f"{count} responses have no token ids: {name.removeprefix('rejected ')}"
            for name, count in sorted(self.counts.items())
            if name.startswith("rejected ")
        ]


_NOTES = {
    "unmatched": "{} responses to prompts that the task does not have were left out",
    "repeated": "{} training prompts of the task repeat another one's text; the first one's id is used",
    "unlike": "{} responses answer prompts that the recipe words differently; their log-probabilities under the "
    "recipe's wording would not be those of the samples, so the logged text is kept as one user message",
    "rendered": "{} responses have as prompt the text after a chat template, without its special tokens; "
    "log-probabilities added to them are not exact (--task restores the messages)",
    "other rendering": "{} responses: the tokenizer's chat template does not give the logged prompt; their "
    "log-probabilities will not be those of the samples",
    "plain": "{} responses have a plain text as prompt; score them with --chat-template plain",
    "ungraded": "{} responses have no reward; validate lists them",
    "single": "{} groups hold one response only; they have no advantage",
    "unknown finish": "{} responses: whether they ended by themselves is unknown; they cannot be scored or used until "
    "the log is imported with --assume-finished, or with --tokenizer and --max-response-tokens",
    "near limit": "{} responses are up to 2 % shorter than the limit and count as finished; after encoding their text "
    "anew, some of them may have been cut",
}


def import_log(
    responses: Iterable[Foreign],
    out: Path,
    settings: ImportSettings,
    *,
    task: TaskPrompts | None = None,
    codec: Codec | None = None,
) -> ImportReport:
    """Write a foreign log as a folder of step files. The responses to one prompt in one step are a group.

    Held in memory are one step and at most _SPILL_CHARACTERS characters of text.

    Args:
        task: gives ids, references and messages to its prompts; without it ids are hashes of the prompt's text.
        codec: gives token ids (of the text, encoded anew) and the tokenizer's fingerprint.

    Raises:
        DataError: naming file and row of what cannot be imported; nothing is then written.
    """
    if settings.max_response_tokens is not None and codec is None:
        raise DataError("--max-response-tokens counts tokens and needs --tokenizer")
    report = ImportReport()
    with new_folder(out) as folder:
        parts = folder / ".parts"
        parts.mkdir()
        steps = _spill(responses, parts)
        if not steps:
            raise DataError(f"{settings.run}: holds no response")
        if task is not None:
            task.find(_prompt_texts([file for files in steps.values() for file in files]))
        for step in sorted(steps):
            rows = pl.concat([pl.read_parquet(file) for file in steps[step]])
            frame = _step_frame(step, rows, settings, task, codec, report)
            if frame.height:
                with writing(out):
                    write_frame(folder / step_file_name(step), frame)
                report.steps += 1
        shutil.rmtree(parts)
        if not report.responses:
            raise DataError(f"{settings.run}: no prompt of the log is one of the task's training prompts")
    if task is not None:
        report.counts["repeated"] = task.repeated
    return report


def _spill(responses: Iterable[Foreign], parts: Path) -> dict[int, list[Path]]:
    """Sort a stream of responses by step, through files."""
    files: dict[int, list[Path]] = {}
    held: dict[int, list[Foreign]] = {}
    characters = 0

    def flush() -> None:
        for step, rows in held.items():
            of_step = files.setdefault(step, [])
            of_step.append(parts / f"{step}-{len(of_step)}.parquet")
            columns: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in _PART_SCHEMA}
            columns["messages"] = [[dict(message) for message in row.messages] for row in rows]
            with writing(of_step[-1]):
                pl.DataFrame(columns, schema=_PART_SCHEMA).write_parquet(of_step[-1])
        held.clear()

    for response in responses:
        held.setdefault(response.step, []).append(response)
        characters += len(response.text) + sum(len(message["content"]) for message in response.messages)
        if characters >= _SPILL_CHARACTERS:
            flush()
            characters = 0
    flush()
    return files


def _prompt_texts(parts: Sequence[Path]) -> list[str]:
    """What is asked in any step. Looked up together, these texts pass the search for problems once."""
    texts: set[str] = set()
    for part in parts:
        texts |= set(pl.read_parquet(part, columns=["asked"])["asked"])
    return sorted(texts)


def _step_frame(
    step: int,
    rows: pl.DataFrame,
    settings: ImportSettings,
    task: TaskPrompts | None,
    codec: Codec | None,
    report: ImportReport,
) -> pl.DataFrame:
    prompts = _prompts(rows, settings, task, codec, report)
    records: list[dict[str, Any]] = []
    sizes: Counter[str] = Counter()
    asked: dict[str, Prompt] = {}
    for row, prompt in zip(rows.iter_rows(named=True), prompts, strict=True):
        if prompt is None:
            continue
        if asked.setdefault(prompt.id, prompt).messages != prompt.messages:
            raise DataError(f"{row['where']}: step {step} asks prompt {prompt.id!r} in two different wordings")
        token_ids, finish_reason = _ending(row["text"], settings, codec, report)
        temperature, top_p, top_k = settings.sampling
        records.append(
            {
                "run": settings.run,
                "step": step,
                "model": settings.model,
                "policy_version": max(step - 1, 0),
                "prompt_id": prompt.id,
                "task": prompt.task,
                "messages": [dict(message) for message in prompt.messages],
                "reference": prompt.reference,
                "response_index": sizes[prompt.id],
                "text": row["text"],
                "token_ids": token_ids,
                "logprobs": None,
                "finish_reason": finish_reason,
                "reward": _reward(row, settings),
                "grade_reason": f"imported reward {row['reward']}",
                "advantage": None,
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "tokenizer_fingerprint": None if codec is None else codec.fingerprint,
            }
        )
        sizes[prompt.id] += 1
        report.counts["ungraded"] += records[-1]["reward"] is None
    _add_advantages(records, report)
    report.responses += len(records)
    report.groups += len(sizes)
    return pl.DataFrame(records, schema=ROLLOUT_SCHEMA)


def _prompts(
    rows: pl.DataFrame,
    settings: ImportSettings,
    task: TaskPrompts | None,
    codec: Codec | None,
    report: ImportReport,
) -> list[Prompt | None]:
    """The prompt of every row; None where it is to be left out."""
    messages = rows["messages"].to_list()
    matches: Sequence[Match | None] = [None] * len(messages)
    if task is not None:
        matches = task.find(rows["asked"].to_list())
    renderings: dict[str, str] = {}
    prompts: list[Prompt | None] = []
    for row, of_row, match in zip(rows.iter_rows(named=True), messages, matches, strict=True):
        logged = tuple(of_row)
        restored = match is not None and match.alike and row["rendered"]
        if match is not None:
            of_task = match.prompt
            kept = Prompt(of_task.id, of_task.messages if restored else logged, of_task.reference, of_task.task)
        elif task is None:
            kept = Prompt(text_id(logged), logged, row["reference"] or "", "imported")
        elif settings.drop_unmatched:
            report.counts["unmatched"] += 1
            prompts.append(None)
            continue
        else:
            raise DataError(
                f"{row['where']}: the prompt {row['asked'][:60]!r}... is none of the task's training prompts; "
                "--drop-unmatched leaves such prompts out"
            )
        prompts.append(kept)
        if restored and codec is not None:
            if kept.id not in renderings:
                renderings[kept.id] = codec.tokenizer.decode(codec.encode_prompt(kept), skip_special_tokens=True)
            report.counts["other rendering"] += renderings[kept.id].strip() != row["asked"].strip()
        elif row["rendered"]:
            report.counts["rendered" if match is None else "unlike"] += not restored
        else:
            report.counts["plain"] += row["plain"]
    return prompts


def _ending(
    text: str, settings: ImportSettings, codec: Codec | None, report: ImportReport
) -> tuple[list[int] | None, str | None]:
    """Token ids, if there is a codec, and the finish reason, if it is known."""
    contents = None if codec is None else encode_response(text, codec.tokenizer)
    if isinstance(contents, Rejected):
        report.counts[f"rejected {contents.reason}"] += 1
        contents = None
    limit = settings.max_response_tokens
    finish_reason = None
    if settings.assume_finished:
        finish_reason = "stop"
    elif limit is not None and contents is not None:
        finish_reason = "length" if len(contents) >= limit else "stop"
        report.counts["near limit"] += _NEAR_LIMIT * limit <= len(contents) < limit
    report.counts["unknown finish"] += finish_reason is None
    if contents is None or finish_reason is None or codec is None:
        return None, finish_reason
    return ([*contents, codec.eos_id] if finish_reason == "stop" else contents), finish_reason


def _reward(row: dict[str, Any], settings: ImportSettings) -> float | None:
    value: float | None = row["reward"]
    if value is None:
        return None
    if settings.success_above is not None:
        return 1.0 if value > settings.success_above else 0.0
    if not 0 <= value <= 1:
        raise DataError(
            f"{row['where']}: the reward {value:g} is not in [0, 1]; --success-above X makes rewards above X 1 and "
            "others 0"
        )
    return value


def _add_advantages(records: list[dict[str, Any]], report: ImportReport) -> None:
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["prompt_id"], []).append(record)
    for group in groups.values():
        report.counts["single"] += len(group) == 1
        rewards = [record["reward"] for record in group]
        if len(group) == 1 or None in rewards:
            continue
        for record, advantage in zip(group, group_advantages(np.array(rewards)).tolist(), strict=True):
            record["advantage"] = advantage

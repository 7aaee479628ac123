"""Rollout logs: every response of every step as one row of a Parquet file, complete enough to serve as a peer later.

The schema is listed in docs/run-folder.md. Files are written to a temporary name and renamed.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import polars as pl

from graftrl.methods.base import Transfer
from graftrl.objective import group_advantages
from graftrl.policies.config import SamplingSettings
from graftrl.rollout import Group

SCHEMA_VERSION = 1

ROLLOUT_SCHEMA: dict[str, pl.DataType] = {
    "run": pl.String(),
    "step": pl.Int32(),
    "model": pl.String(),
    "policy_version": pl.Int32(),
    "prompt_id": pl.String(),
    "task": pl.String(),
    "messages": pl.List(pl.Struct({"role": pl.String(), "content": pl.String()})),
    "reference": pl.String(),
    "response_index": pl.Int32(),
    "text": pl.String(),
    "token_ids": pl.List(pl.Int32()),
    "logprobs": pl.List(pl.Float32()),
    "finish_reason": pl.String(),
    "reward": pl.Float64(),
    "grade_reason": pl.String(),
    "advantage": pl.Float64(),
    "temperature": pl.Float64(),
    "top_p": pl.Float64(),
    "top_k": pl.Int32(),
    "tokenizer_fingerprint": pl.String(),
}

_TRANSFER_TYPES: dict[str, pl.DataType] = {
    "str": pl.String(),
    "int": pl.Int32(),
    "int | None": pl.Int32(),
    "float": pl.Float64(),
    "float | None": pl.Float64(),
}
TRANSFER_SCHEMA: dict[str, pl.DataType] = {
    "step": pl.Int32(),
    **{field.name: _TRANSFER_TYPES[str(field.type)] for field in fields(Transfer)},
}


def step_file_name(step: int) -> str:
    return f"step-{step:06d}.parquet"


def write_rollouts(
    path: Path,
    *,
    run: str,
    step: int,
    groups: Mapping[str, Sequence[Group]],
    sampling: SamplingSettings,
    fingerprints: Mapping[str, str],
    policy_version: int | None = None,
) -> None:
    """One file for one step; see `rollout_frame`."""
    write_frame(
        path,
        rollout_frame(
            run=run,
            step=step,
            groups=groups,
            sampling=sampling,
            fingerprints=fingerprints,
            policy_version=policy_version,
        ),
    )


def rollout_frame(
    *,
    run: str,
    step: int,
    groups: Mapping[str, Sequence[Group]],
    sampling: SamplingSettings,
    fingerprints: Mapping[str, str],
    policy_version: int | None = None,
) -> pl.DataFrame:
    """A step's responses in the columns of ROLLOUT_SCHEMA. `advantage` is the group-relative advantage that the source
    computes, null in a group of one; log-probabilities that were not recorded are null; a group that was read from a
    log keeps that log's step; the policy version is the number of finished steps when the responses were sampled:
    `step - 1` where it is not given."""
    rows = []
    for model, of_model in groups.items():
        for group in of_model:
            at = step if group.log_step is None else group.log_step
            version = at - 1 if policy_version is None else policy_version
            advantages = group_advantages(group.rewards).tolist() if group.size > 1 else [None]
            messages = [{"role": message["role"], "content": message["content"]} for message in group.prompt.messages]
            for index, (response, advantage) in enumerate(zip(group.responses, advantages, strict=True)):
                rows.append(
                    (
                        run, at, model, version, group.prompt.id, group.prompt.task, messages,
                        group.prompt.reference, index, response.text, response.token_ids, response.logprobs,
                        response.finish_reason, response.reward, response.grade_reason, advantage,
                        sampling.temperature, sampling.top_p, sampling.top_k, fingerprints[model],
                    )
                )  # fmt: skip
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(ROLLOUT_SCHEMA)
    frame = pl.DataFrame(
        [
            pl.Series(name, values, dtype=dtype, strict=False).cast(dtype)  # lists of arrays keep the arrays' type
            for (name, dtype), values in zip(ROLLOUT_SCHEMA.items(), columns, strict=True)
        ]
    )
    recorded = pl.when(pl.col("logprobs").list.len() > 0).then(pl.col("logprobs"))
    return frame.with_columns(recorded.alias("logprobs"))


def write_transfers(path: Path, step: int, transfers: Sequence[Transfer]) -> None:
    """What became of every peer response of one step."""
    names = [field.name for field in fields(Transfer)]
    rows = [(step, *(getattr(transfer, name) for name in names)) for transfer in transfers]
    frame = pl.DataFrame(rows, schema=TRANSFER_SCHEMA, orient="row")
    write_frame(path, frame.with_columns(pl.col("source_step").fill_null(step)))


def read_steps(folder: Path, columns: Sequence[str] | None = None) -> pl.LazyFrame:
    """All steps of a folder of Parquet files, lazily; only the columns asked for are read from disk."""
    frame = pl.scan_parquet(str(folder / "step-*.parquet"))
    return frame if columns is None else frame.select(columns)


def write_frame(path: Path, frame: pl.DataFrame, **facts: Any) -> None:
    """One Parquet file with the schema version in its metadata; it is there as a whole or not at all.

    facts: further plain JSON for the metadata.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    frame.write_parquet(temporary, metadata=_metadata(facts))
    temporary.replace(path)


def frame_bytes(frame: pl.DataFrame, **facts: Any) -> bytes:
    """What `write_frame` would write."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer, metadata=_metadata(facts))
    return buffer.getvalue()


def _metadata(facts: Mapping[str, Any]) -> dict[str, str]:
    return {"graftrl": json.dumps({"schema_version": SCHEMA_VERSION, **facts})}

"""A model's step as bytes: a rollout log in Parquet, whoever carries it."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from graftrl.errors import DataError
from graftrl.logs.checks import biased_sampling
from graftrl.logs.reader import RolloutLog, check_file
from graftrl.logs.rollouts import frame_bytes, rollout_frame
from graftrl.policies.config import SamplingSettings
from graftrl.rollout import Group

_MAGIC = b"PAR1"  # begins and ends a Parquet file


@dataclass(frozen=True)
class Batch:
    """What a peer published in a step. groups: by prompt id. fingerprint: of its tokenizer."""

    groups: dict[str, Group]
    fingerprint: str


def pack(
    model: str,
    step: int,
    groups: Sequence[Group],
    *,
    run: str,
    fingerprint: str,
    publisher: str,
    policy_version: int | None = None,
) -> bytes:
    """A step's graded groups, sampled from the plain distribution.

    Args:
        fingerprint: of the model's tokenizer. publisher: whose they are; see `Publisher`.
    """
    frame = rollout_frame(
        run=run,
        step=step,
        groups={model: groups},
        sampling=SamplingSettings(),
        fingerprints={model: fingerprint},
        policy_version=policy_version,
    )
    return frame_bytes(frame, publisher=publisher)


def is_whole(content: bytes) -> bool:
    """Whether a Parquet file begins and ends here; false for one that is still being copied."""
    return len(content) > 2 * len(_MAGIC) and content.startswith(_MAGIC) and content.endswith(_MAGIC)


def publisher_of(content: bytes) -> str:
    """Who published it; "" where it does not say."""
    try:
        return str(json.loads(pl.read_parquet_metadata(io.BytesIO(content))["graftrl"])["publisher"])
    except (pl.exceptions.PolarsError, OSError, ValueError, KeyError, TypeError):
        return ""


def unpack(content: bytes, model: str, step: int, where: str) -> Batch:
    """The groups that a model published, each with its `log_step`.

    Raises:
        DataError: torn; another schema version; nothing of this model and step; sampling that would bias scores; a
            response that breaks a rule of logs. The message begins with `where`.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.parquet"
        file.write_bytes(content)
        try:
            return _read(file, model, step)
        except DataError as error:
            raise DataError(str(error).replace(str(file), where)) from error


def _read(file: Path, model: str, step: int) -> Batch:
    check_file(file)
    if not pl.scan_parquet(file).select(pl.len()).collect().item():
        return Batch({}, "")  # every group was left ungraded, or refused by dynamic sampling
    log = RolloutLog(file)
    if model not in log.models or log.steps(model) != [step]:
        raise DataError(f"{file}: holds no responses of {model!r} in step {step}")
    fault = biased_sampling(log.sampling(model))
    if fault is not None:
        raise DataError(f"{file}: responses of {model!r} {fault}")
    keys = [(step, prompt_id) for prompt_id in log.group_index(model)["prompt_id"]]
    groups = {q: replace(group, log_step=step) for (_, q), group in log.groups(model, keys).items()}
    only = log.fingerprints(model)
    return Batch(groups, (only.pop() or "") if len(only) == 1 else "")

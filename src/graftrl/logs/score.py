"""Log-probabilities for responses that have none, under the model that wrote them: `graftrl logs score`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from graftrl.errors import DataError
from graftrl.exchange import Rejected, encode_response
from graftrl.logs.checks import SAMPLING
from graftrl.logs.folders import writing
from graftrl.logs.reader import check_file, collect, log_files
from graftrl.logs.rollouts import ROLLOUT_SCHEMA, write_frame
from graftrl.policies.config import SamplingSettings
from graftrl.policies.hf import HFPolicy
from graftrl.policies.loading import context_length
from graftrl.rollout import Prompt, Row

_ROWS_AT_ONCE = 1024


@dataclass
class Scored:
    """What was done to one file. skipped: responses that stay without log-probabilities, by reason. versions: of the
    policy that wrote the others."""

    file: Path
    scored: int = 0
    encoded: int = 0
    unknown_sampling: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    versions: set[int] = field(default_factory=set)


def score_log(path: Path, policy: HFPolicy, model: str | None = None, out: Path | None = None) -> Iterator[Scored]:
    """Score a log file by file; each file is replaced as a whole, so that a second call goes on after an interruption.

    Where token ids are missing the text is encoded with the policy's tokenizer, and its EOS is appended iff the
    response ended by itself. Log-probabilities are of the model's plain distribution.

    Args:
        policy: the model that wrote the responses, with the weights it had then.
        model: its name in the log; None where all responses without log-probabilities are of one model.
        out: a folder for the result; None replaces the files in place.

    Yields:
        one `Scored` for every file that was written.

    Raises:
        DataError: naming file and row; files already written stay.
    """
    files = log_files(path)
    for file in files:
        check_file(file)
    model = _only_model(files) if model is None else model
    for file in files:
        target = file if out is None else out / file.name
        if target.exists() and target != file:
            check_file(target)
            _check_same(file, target)
            file = target
        frame = collect(file, pl.scan_parquet(file))
        missing = ((pl.col("model") == model) & pl.col("logprobs").is_null()).fill_null(value=False)
        rows = frame.with_row_index("row", offset=1).filter(missing)
        result = Scored(target)
        if rows.height:
            new = _score_rows(file, rows, policy, result)
            frame = frame.with_row_index("row", offset=1).update(new, on="row").drop("row")
        if result.scored or not target.exists():
            with writing(target):
                write_frame(target, frame)
        if rows.height:
            yield result


def _only_model(files: list[Path]) -> str:
    found: set[str] = set()
    for file in files:
        missing = pl.scan_parquet(file).filter(pl.col("logprobs").is_null()).select(pl.col("model").unique())
        found |= set(collect(file, missing)["model"].drop_nulls())
    if len(found) > 1:
        raise DataError(f"responses of {', '.join(sorted(found))} lack log-probabilities; choose one with --name")
    return found.pop() if found else ""


def _check_same(file: Path, target: Path) -> None:
    columns = ("model", "step", "prompt_id", "response_index", "text")
    one, other = (collect(each, pl.scan_parquet(each).select(columns)) for each in (file, target))
    if not one.equals(other):
        raise DataError(f"{target}: exists already and holds other responses than {file}; choose another --out")


def _score_rows(file: Path, rows: pl.DataFrame, policy: HFPolicy, result: Scored) -> pl.DataFrame:
    """Columns row, token_ids, logprobs and tokenizer_fingerprint of the rows that could be scored."""
    prompts: dict[str, NDArray[np.int64]] = {}
    found: list[tuple[int, NDArray[np.int64], NDArray[np.float32]]] = []
    waiting: list[tuple[int, Row]] = []

    def flush() -> None:
        scores = policy.score([row for _, row in waiting])
        found.extend((at, row.response_token_ids, s) for (at, row), s in zip(waiting, scores, strict=True))
        waiting.clear()

    positions = context_length(policy.loaded.causal_lm)
    columns = (
        "row",
        "policy_version",
        "prompt_id",
        "messages",
        "text",
        "token_ids",
        "finish_reason",
        *SAMPLING,
        "tokenizer_fingerprint",
    )
    for row in rows.select(columns).iter_rows(named=True):
        where = f"{file}, row {row['row']}"
        _check_sampling(where, row, result)
        token_ids = _token_ids(where, row, policy)
        if isinstance(token_ids, Rejected):
            result.skipped[token_ids.reason] += 1
            continue
        prompt_ids = _prompt_ids(where, row, policy, prompts)
        if positions is not None and len(prompt_ids) + len(token_ids) > positions:
            result.skipped[f"longer than the model's {positions} positions"] += 1
            continue
        result.versions.add(row["policy_version"])
        result.encoded += row["token_ids"] is None
        waiting.append((row["row"], Row(row["prompt_id"], prompt_ids, token_ids, 0.0, "own", policy.name)))
        if len(waiting) >= _ROWS_AT_ONCE:
            flush()
    if waiting:
        flush()
    result.scored = len(found)
    return pl.DataFrame(
        {
            "row": pl.Series([at for at, _, _ in found], dtype=pl.UInt32),
            "token_ids": pl.Series([ids.tolist() for _, ids, _ in found], dtype=ROLLOUT_SCHEMA["token_ids"]),
            "logprobs": pl.Series([scores.tolist() for _, _, scores in found], dtype=ROLLOUT_SCHEMA["logprobs"]),
            "tokenizer_fingerprint": pl.Series([policy.codec.fingerprint] * len(found), dtype=pl.String),
        }
    )


def _check_sampling(where: str, row: dict[str, Any], result: Scored) -> None:
    """Log-probabilities are of the distribution that was sampled from, and a scoring pass knows only the plain one."""
    values = [row[name] for name in SAMPLING]
    if None in values:
        result.unknown_sampling += 1
    elif not SamplingSettings(temperature=values[0], top_p=values[1], top_k=values[2]).is_plain:
        raise DataError(
            f"{where}: sampled with temperature {values[0]:g}, top_p {values[1]:g}, top_k {values[2]}; only samples of "
            "the plain distribution (1, 1, 0) can be scored, others were not drawn with the log-probabilities it gives"
        )


def _token_ids(where: str, row: dict[str, Any], policy: HFPolicy) -> NDArray[np.int64] | Rejected:
    codec = policy.codec
    if row["token_ids"] is not None:
        if row["tokenizer_fingerprint"] != codec.fingerprint:
            raise DataError(
                f"{where}: its token ids are of tokenizer {row['tokenizer_fingerprint']}, the model's is "
                f"{codec.fingerprint}; this is not the model that wrote it"
            )
        token_ids = row["token_ids"]
    else:
        if row["finish_reason"] not in ("stop", "length"):
            raise DataError(
                f"{where}: whether the response ended by itself is unknown, so whether an EOS belongs to it; import it "
                "with --assume-finished, or with --tokenizer and --max-response-tokens"
            )
        encoded = encode_response(row["text"], codec.tokenizer)
        if isinstance(encoded, Rejected):
            return encoded
        token_ids = [*encoded, codec.eos_id] if row["finish_reason"] == "stop" else encoded
    return np.array(token_ids, dtype=np.int64) if len(token_ids) else Rejected("empty")


def _prompt_ids(
    where: str, row: dict[str, Any], policy: HFPolicy, known: dict[str, NDArray[np.int64]]
) -> NDArray[np.int64]:
    if not row["messages"]:
        raise DataError(f"{where}: has a prompt without messages")
    key = json.dumps(row["messages"])
    if key not in known:
        prompt = Prompt(row["prompt_id"], tuple(row["messages"]), "", "")
        known[key] = np.array(policy.codec.encode_prompt(prompt), dtype=np.int64)
    if not len(known[key]):
        raise DataError(f"{where}: the prompt has no token for this model")
    return known[key]

"""From rollout logs to counts and scores: which groups of several models belong together, and what is known of s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from graftrl.engines.base import Engine
from graftrl.errors import ConfigError, DataError
from graftrl.logs.checks import PLAIN
from graftrl.logs.reader import RolloutLog
from graftrl.logs.rollouts import read_steps
from graftrl.methods import GRAFT, StepContext, Transfer
from graftrl.methods.graft import GRAFTSettings
from graftrl.policies.config import SamplingSettings
from graftrl.probe.analysis import PeerResponses
from graftrl.rollout import Group

Key = str | tuple[int, str]  # a prompt; with its step where a prompt occurs in several

_TRANSFER_COLUMNS = ("step", "receiver", "source", "prompt_id", "status", "reason", "reward", "score")
_SCORED_AT_ONCE = 64  # prompts whose groups are held in memory while they are scored


@dataclass(frozen=True)
class Member:
    """A model of a log. name: what the probe calls it; model: what the log calls it."""

    name: str
    log: RolloutLog
    model: str
    folder: Path


@dataclass
class Observed:
    """Counts of all models on the prompts that they share.

    groups: one row a prompt: prompt_id, and for each member NAME its "step NAME" and "k NAME".
    by_step: groups were matched by step and prompt id, not by prompt id alone.
    tokens, truncated: per member and response, over the same groups.
    scored: per (source, receiver); None where no s is known at all.
    """

    members: list[Member]
    group_size: int
    groups: pl.DataFrame
    by_step: bool
    tokens: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    truncated: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    scored: dict[tuple[str, str], PeerResponses] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def keys(self) -> list[Key]:
        prompts: list[str] = self.groups["prompt_id"].to_list()
        if self.groups["prompt_id"].is_unique().all():
            return list(prompts)
        return list(zip(self.groups[f"step {self.members[0].name}"].to_list(), prompts, strict=True))

    @property
    def successes(self) -> dict[str, dict[Key, int]]:
        return {m.name: dict(zip(self.keys, self.groups[f"k {m.name}"].to_list(), strict=True)) for m in self.members}


def open_logs(paths: Sequence[Path]) -> list[Member]:
    """Every model of every log. A name that occurs in several logs gets its log's name in front.

    Raises:
        DataError: see `RolloutLog`; fewer than two models; responses that were not sampled from the plain distribution.
    """
    logs = [(path, RolloutLog(path)) for path in paths]
    names = Counter(model for _, log in logs for model in log.models)
    members = [
        Member(model if names[model] == 1 else f"{path.resolve().name}-{model}", log, model, path)
        for path, log in logs
        for model in log.models
    ]
    if len(members) < 2:
        raise DataError(f"{members[0].log.name}: holds one model, {members[0].name!r}; give a second --log to compare")
    if len({member.name for member in members}) < len(members):
        raise DataError("two of the logs have the same name and the same models; rename one of the folders")
    for member in members:
        for sampling in member.log.sampling(member.model):
            if sampling != PLAIN:
                temperature, top_p, top_k = sampling
                raise DataError(
                    f"{member.log.name}: {member.model!r} was sampled with temperature {temperature}, top_p {top_p}, "
                    f"top_k {top_k}; counts and s only tell of training if they come from the plain distribution "
                    "(1, 1, 0)"
                )
    return members


def observe(members: Sequence[Member], limit: int | None = None, prompts: Sequence[str] | None = None) -> Observed:
    """Match the members' groups and read what the analysis needs, s not included.

    Groups belong together when step and prompt id agree; if the logs share none, when the prompt id alone does (each
    model's last group on the prompt).

    Args:
        limit: at most that many prompts, in the order of steps and ids; None for all.
        prompts: only these, by id; None for all.

    Raises:
        DataError: no shared prompt; groups of different sizes.
    """
    tables = [member.log.group_index(member.model) for member in members]
    groups, by_step = _match(members, tables, ("step", "prompt_id")), True
    if not groups.height:
        tables = [table.unique("prompt_id", keep="last", maintain_order=True) for table in tables]
        groups, by_step = _match(members, tables, ("prompt_id",)), False
    if not groups.height:
        logs = " and ".join(dict.fromkeys(member.log.name for member in members))
        raise DataError(f"{logs} share no prompt; compare models on the same prompts")
    if prompts is not None:
        groups = groups.filter(pl.col("prompt_id").is_in(list(prompts)))
    if limit is not None:
        groups = groups.head(limit)
    sizes = sorted({n for member in members for n in groups[f"n {member.name}"].unique().to_list()})
    if len(sizes) > 1 or sizes[0] < 2:
        raise DataError(
            f"groups of {' and '.join(map(str, sizes))} responses; a probe needs groups of one size, two or more"
        )
    observed = Observed(list(members), sizes[0], groups, by_step)
    for member in members:
        lengths = _responses(member, groups)
        observed.tokens[member.name] = lengths["tokens"].to_numpy().astype(np.int64)
        observed.truncated[member.name] = lengths["truncated"].to_numpy()
    largest = max(table.height for table in tables)
    if limit is None and prompts is None and groups.height < largest:
        observed.notes.append(f"{groups.height} groups are shared by all models; the largest log has {largest}")
    if not by_step:
        observed.notes.append("the logs share no step: groups are matched by prompt, each model's last on it")
    return observed


def _match(members: Sequence[Member], tables: Sequence[pl.DataFrame], on: Sequence[str]) -> pl.DataFrame:
    """Rows that all tables have, in the order of the first."""
    matched: pl.DataFrame | None = None
    for member, table in zip(members, tables, strict=True):
        part = table.select(
            "prompt_id",
            *([pl.col("step")] if "step" in on else []),
            pl.col("step").alias(f"step {member.name}"),
            pl.col("n").cast(pl.Int64).alias(f"n {member.name}"),
            pl.col("k").cast(pl.Int64).alias(f"k {member.name}"),
        )
        matched = part if matched is None else matched.join(part, on=list(on), how="inner", maintain_order="left")
    assert matched is not None
    return matched


def _responses(member: Member, groups: pl.DataFrame) -> pl.DataFrame:
    """tokens and truncated of the member's responses in these groups."""
    wanted = groups.select(pl.col(f"step {member.name}").alias("step"), "prompt_id").lazy()
    return (
        pl.scan_parquet(member.log.files)
        .filter(pl.col("model") == member.model)
        .join(wanted, on=["step", "prompt_id"], how="semi")
        .select(tokens=pl.col("token_ids").list.len(), truncated=pl.col("finish_reason") == "length")
        .collect()
    )


# Compatibility --------------------------------------------------------------------------------------------------------


def score_candidates(
    groups: Mapping[str, Sequence[Group]], engine: Engine, sampling: SamplingSettings, seed: int, step: int
) -> list[Transfer]:
    """s of every response of every group that GRAFT could exchange, whatever the gate and the balance.

    One pass of GRAFT itself, at a threshold of 0 and unbalanced, so that selection, re-tokenisation and score are the
    method's own.

    Raises:
        DataError: rewards other than 0 and 1.
    """
    size = next((group.size for of_model in groups.values() for group in of_model), 2)
    context = StepContext(
        step=step,
        seed=seed,
        group_size=size,
        max_response_tokens=sampling.max_response_tokens,
        codecs=engine.codecs,
        score=engine.score,
    )
    return GRAFT(GRAFTSettings(threshold=0.0, balanced=False)).exchange(groups, context).transfers


def use_logged_scores(observed: Observed) -> None:
    """Take s from the logs' own exchange folders, as far as they have it."""
    if not observed.by_step:
        return
    frames = []
    for folder in {member.folder: None for member in observed.members}:
        files = sorted((folder / "exchange").glob("step-*.parquet"))
        if not files:
            continue
        try:
            frame = read_steps(folder / "exchange", _TRANSFER_COLUMNS).collect()
        except pl.exceptions.PolarsError as error:
            reason = str(error).strip().splitlines()[0]
            raise DataError(f"{folder / 'exchange'}: cannot be read: {reason}") from error
        names = {member.model: member.name for member in observed.members if member.folder == folder}
        if frame.filter(pl.col("score").is_null(), status="admitted").height:
            continue  # of a method without a gate, which computes no s
        frame = frame.filter(pl.all_horizontal(pl.col("receiver", "source").is_in(list(names))))
        frames.append(frame.with_columns(pl.col("receiver", "source").replace(names)))
    if frames:
        observed.scored = _peer_responses(observed, pl.concat(frames))
        known = sum(len(np.unique(responses.groups)) for responses in observed.scored.values())
        observed.notes.append(f"s comes from the logs' exchanges: {known} groups")


def use_engine_scores(observed: Observed, engine: Engine, sampling: SamplingSettings, seed: int) -> None:
    """Compute s with the receivers' models as they are loaded now.

    Raises:
        ConfigError: a model whose tokenizer is not the one that wrote the log.
    """
    for member in observed.members:
        written = member.log.fingerprints(member.model)
        if written != {engine.codecs[member.name].fingerprint}:
            raise ConfigError(
                f"models.{member.name}: its tokenizer is not the one that wrote {member.log.name}; give the model that "
                "sampled the log"
            )
    candidates = pl.any_horizontal(
        (pl.col(f"k {receiver.name}") == 0) & pl.col(f"k {source.name}").is_between(1, observed.group_size - 1)
        for receiver in observed.members
        for source in observed.members
        if source is not receiver
    )
    rows = observed.groups.filter(candidates)
    moved: list[tuple[Any, ...]] = []
    # A prompt may come in several steps, and GRAFT finds groups by prompt: one step at a time.
    step = f"step {observed.members[0].name}"
    for of_step in rows.partition_by(step, maintain_order=True) if observed.by_step else [rows]:
        for batch in of_step.iter_slices(_SCORED_AT_ONCE):
            groups = {member.name: _groups(member, batch) for member in observed.members}
            moved += [
                (batch[step][0], *(getattr(transfer, column) for column in _TRANSFER_COLUMNS[1:]))
                for transfer in score_candidates(groups, engine, sampling, seed, int(batch[step][0]))
            ]
    types = [pl.Int32, *[pl.String] * 5, pl.Float64, pl.Float64]
    schema = dict(zip(_TRANSFER_COLUMNS, types, strict=True))
    observed.scored = _peer_responses(observed, pl.DataFrame(moved, schema=schema, orient="row"))


def _groups(member: Member, batch: pl.DataFrame) -> list[Group]:
    keys = list(zip(batch[f"step {member.name}"].to_list(), batch["prompt_id"].to_list(), strict=True))
    found = member.log.groups(member.model, keys)
    return [Group(member.name, group.prompt, group.responses) for group in found.values()]


def _peer_responses(observed: Observed, transfers: pl.DataFrame) -> dict[tuple[str, str], PeerResponses]:
    """Per direction the transfers of the candidate groups; directions without any are missing."""
    found: dict[tuple[str, str], PeerResponses] = {}
    for receiver in observed.members:
        for source in observed.members:
            if source is receiver:
                continue
            candidates = observed.groups.filter(
                pl.col(f"k {receiver.name}") == 0, pl.col(f"k {source.name}").is_between(1, observed.group_size - 1)
            ).select(pl.col(f"step {receiver.name}").alias("step"), "prompt_id")
            keys = ["step", "prompt_id"] if observed.by_step else ["prompt_id"]
            numbered = candidates.with_row_index("group").select("group", *keys)
            here = transfers.filter(receiver=receiver.name, source=source.name).join(numbered, on=keys)
            if here.height:
                rejected = here.filter(status="rejected").group_by("reason").len().sort("reason")
                found[source.name, receiver.name] = PeerResponses(
                    scores=here["score"].fill_null(float("nan")).to_numpy(),
                    right=(here["reward"] == 1.0).to_numpy(),
                    groups=here["group"].to_numpy().astype(np.int64),
                    rejected=dict(rejected.iter_rows()),
                )
    return found

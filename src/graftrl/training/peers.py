"""Stored peers: what a model that is not here answered to the same prompts, read from its rollout log.

The peer is never loaded. Its groups join those of the models that train, and the method's ordinary rules decide what is
transferred; with one receiver the transfer goes one way (GRAFT, section 6.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from graftrl.errors import ConfigError, DataError
from graftrl.exchange import Rejected
from graftrl.logs.checks import biased_sampling
from graftrl.logs.config import AnyPeerSettings, PeerSettings
from graftrl.logs.reader import RolloutLog
from graftrl.methods.base import Groups, Method, ScoreRows, StepContext, peer_row, row_scores
from graftrl.rollout import Group, Prompt, Response, Row
from graftrl.seeds import derive_seed
from graftrl.tasks import Task, VerificationPool, grade_groups
from graftrl.training.data import PromptStream

READ_AHEAD = 2048  # responses read at once: opening files costs more than reading small groups


class Stored(NamedTuple):
    """A group in the log: its step, which log it is in, successes as recorded, responses."""

    step: int
    log: int
    successes: int
    size: int


class Batches(Protocol):
    """The prompts of every step, from index 0."""

    def batch(self, index: int) -> Sequence[Prompt]: ...


class StoredPeer:
    """One peer of a recipe, open for reading.

    Attributes:
        name: under `peers` in the recipe.
        fingerprint: of the tokenizer that its ids are from; "" if the log does not say or holds several.
        notes: what a person should know, found when it was opened and checked.

    Raises:
        ConfigError: a log of several models without a word which.
        DataError: a log that cannot be read or holds nothing of the model; sampling settings that would bias scores.
    """

    def __init__(self, name: str, settings: PeerSettings, seed: int) -> None:
        self.name, self.settings, self.seed = name, settings, seed
        self.logs = [RolloutLog(path) for path in settings.log]
        self.models = [self._model_in(log) for log in self.logs]
        self.notes: list[str] = []
        self._groups_of: dict[object, list[Stored]] = {}  # per key, oldest first
        self._planned: list[list[str]] = []  # prompt ids of every step of this run
        self._ahead: dict[tuple[int, int, str], Group] = {}
        fingerprints: set[str | None] = set()
        for index, (log, model) in enumerate(zip(self.logs, self.models, strict=True)):
            self._refuse_biased_sampling(log, model)
            fingerprints |= log.fingerprints(model)
            for step, prompt_id, size, successes in log.group_index(model).iter_rows():
                stored = Stored(step, index, successes, size)
                self._groups_of.setdefault(self._key(step, prompt_id), []).append(stored)
        for found in self._groups_of.values():
            found.sort()
        only = fingerprints.pop() if len(fingerprints) == 1 else None
        self.fingerprint = only or ""
        if fingerprints:
            self.notes.append(
                f"peer {name}: its log holds ids of several tokenizers, so its responses are encoded from their text"
            )

    def check(self, stream: Batches, steps: int) -> None:
        """Compare the log with the prompts of the whole run; adds to `notes`.

        Raises:
            DataError: no prompt of the run is in the log, or prompts of the same ids ask something else.
        """
        self._planned = [[prompt.id for prompt in stream.batch(step)] for step in range(steps)]
        covered = [step for step, ids in enumerate(self._planned, 1) if any(self._find(step, q) for q in ids)]
        found = sum(bool(self._find(step, q)) for step, ids in enumerate(self._planned, 1) for q in ids)
        total = sum(map(len, self._planned))
        if not found:
            raise DataError(f"peers.{self.name}: {self._where}: {self._why_nothing_matches(total)}")
        if found < total:
            elsewhere = self._known_prompts() if self.settings.match == "step_and_prompt" else 0
            self.notes.append(
                f"peer {self.name}: its log has groups for {found:,} of {total:,} prompts of this run, in "
                f"{len(covered)} of {steps} steps; on the others there is nothing to learn from it"
                + (f". Whatever the step it has {elsewhere:,} (match: prompt)" if elsewhere > found else "")
            )
        for step in {covered[0], covered[-1]}:
            self._compare_prompts(stream.batch(step - 1), step)

    @property
    def summary(self) -> str:
        sizes = sorted({stored.size for found in self._groups_of.values() for stored in found})
        steps = {stored.step for found in self._groups_of.values() for stored in found}
        return (
            f"{self.name}: {' and '.join(dict.fromkeys(self.models))} of {self._where}, "
            f"{sum(map(len, self._groups_of.values())):,} groups of {' or '.join(map(str, sizes))} responses in "
            f"{len(steps):,} steps"
        )

    @property
    def scores(self) -> bool:
        """Whether choosing a group needs scoring passes."""
        return self.settings.choose == "most_compatible"

    def groups(self, own: Groups, method: Method, context: StepContext) -> list[Group]:
        """The peer's groups on the step's prompts, in their order; prompts without one are left out.

        Rewards are those of the log. With `choose: most_compatible` candidates are scored where `method.usable` says
        that a transfer is possible; elsewhere the newest is taken.

        Args:
            own: the fresh groups of the models that train.

        Raises:
            DataError: a group that cannot be used, such as one without log-probabilities.
        """
        prompts = {group.prompt.id: group.prompt for of_model in own.values() for group in of_model}
        if self.scores:
            return self._most_compatible(prompts, own, method, context)
        chosen = [(q, stored) for q in prompts if (stored := self._pick(context.step, q)) is not None]
        return [self._adopt(group, prompts) for group in self._read(chosen, ahead_of=context.step)]

    # Finding ---------------------------------------------------------------------------------------------------------

    def _key(self, step: int, prompt_id: str) -> object:
        return (step, prompt_id) if self.settings.match == "step_and_prompt" else prompt_id

    def _find(self, step: int, prompt_id: str) -> list[Stored]:
        return self._groups_of.get(self._key(step, prompt_id), [])

    def _pick(self, step: int, prompt_id: str) -> Stored | None:
        found = self._find(step, prompt_id)
        if not found:
            return None
        if self.settings.choose == "random":
            return found[derive_seed(self.seed, "stored peer", self.name, step, prompt_id) % len(found)]
        return found[-1]

    def _most_compatible(
        self, prompts: Mapping[str, Prompt], own: Groups, method: Method, context: StepContext
    ) -> list[Group]:
        asking: dict[str, list[Group]] = {q: [] for q in prompts}
        for of_model in own.values():
            for group in of_model:
                asking[group.prompt.id].append(group)
        may_use = getattr(method, "usable", lambda own, successes, size: True)  # a method of one's own may lack it
        contenders: list[tuple[str, Stored]] = []
        receivers: dict[tuple[str, Stored], list[str]] = {}
        for q in prompts:
            found = self._find(context.step, q)
            usable = {
                stored: [g.model for g in asking[q] if may_use(g, stored.successes, stored.size)] for stored in found
            }
            usable = {stored: models for stored, models in usable.items() if models}
            usable = usable or {stored: [] for stored in found[-1:]}
            contenders += [(q, stored) for stored in usable]
            receivers |= {(q, stored): models for stored, models in usable.items() if len(usable) > 1}
        groups = [self._adopt(group, prompts) for group in self._read(contenders)]
        group_of = dict(zip(contenders, groups, strict=True))
        scores = self._mean_scores(group_of, receivers, context)
        best: dict[str, tuple[str, Stored]] = {}
        for q, stored in contenders:  # oldest first: of equals the newest wins
            if q not in best or scores.get((q, stored), 0.0) >= scores.get(best[q], 0.0):
                best[q] = (q, stored)
        return [group_of[choice] for choice in best.values()]

    def _mean_scores(
        self,
        group_of: Mapping[tuple[str, Stored], Group],
        receivers: Mapping[tuple[str, Stored], Sequence[str]],
        context: StepContext,
    ) -> dict[tuple[str, Stored], float]:
        """Mean s of each contender's responses, over the receivers that can use it; a response without a score counts
        as 0."""
        total: dict[tuple[str, Stored], float] = dict.fromkeys(receivers, 0.0)
        for model in sorted({model for models in receivers.values() for model in models}):
            rows: list[Row] = []
            origins: list[tuple[tuple[str, Stored], Response]] = []
            for contender, models in receivers.items():
                group = group_of[contender]
                for index in range(group.size if model in models else 0):
                    row = peer_row(group, index, model, context, advantage=0.0, kind="candidate")
                    if not isinstance(row, Rejected):
                        rows.append(row)
                        origins.append((contender, group.responses[index]))
            scores = np.nan_to_num(row_scores(rows, context.score(model, rows), [r for _, r in origins]))
            for (contender, _), score in zip(origins, scores.tolist(), strict=True):
                total[contender] += score / (group_of[contender].size * len(receivers[contender]))
        return total

    # Reading ---------------------------------------------------------------------------------------------------------

    def _read(self, chosen: Sequence[tuple[str, Stored]], ahead_of: int | None = None) -> list[Group]:
        """The groups of these prompts, as the log has them.

        ahead_of: a step; when files have to be opened, groups of the steps after it are read as well and kept.
        """
        keys = [(stored.log, stored.step, q) for q, stored in chosen]
        missing = [key for key in keys if key not in self._ahead]
        if missing and ahead_of is not None:
            held = sum(stored.size for _, stored in chosen)
            for step in range(ahead_of + 1, len(self._planned) + 1):
                further = [(q, s) for q in self._planned[step - 1] if (s := self._pick(step, q)) is not None]
                held += sum(stored.size for _, stored in further)
                if held > READ_AHEAD:
                    break
                missing += [(stored.log, stored.step, q) for q, stored in further]
        fetched: dict[tuple[int, int, str], Group] = {}
        for index, (log, model) in enumerate(zip(self.logs, self.models, strict=True)):
            of_log = [(step, q) for at, step, q in missing if at == index]
            for (step, q), group in log.groups(model, of_log).items():
                fetched[index, step, q] = Group(self.name, group.prompt, group.responses, log_step=step)
        known = {**self._ahead, **fetched}
        if ahead_of is not None:
            self._ahead = {key: group for key, group in known.items() if key not in keys}
        return [known[key] for key in keys]

    @staticmethod
    def _adopt(group: Group, prompts: Mapping[str, Prompt]) -> Group:
        """The group on this run's own prompt: wording and chat template are the receiver's business."""
        return replace(group, prompt=prompts[group.prompt.id])

    # Checks ----------------------------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return ", ".join(str(path) for path in self.settings.log)

    def _model_in(self, log: RolloutLog) -> str:
        if self.settings.model is not None:
            return self.settings.model
        if len(log.models) > 1:
            raise ConfigError(
                f"peers.{self.name}.model is missing: {log.name} holds responses of {', '.join(log.models)}; say whose"
            )
        return log.models[0]

    def _refuse_biased_sampling(self, log: RolloutLog, model: str) -> None:
        fault = biased_sampling(log.sampling(model))
        if fault is not None:
            raise DataError(f"peers.{self.name}: {log.name}: responses of {model!r} {fault}")

    def _why_nothing_matches(self, total: int) -> str:
        known = self._known_prompts()
        if not known:
            return (
                f"none of the {total:,} prompts of this run is in the log; it was recorded on another task, or met "
                "other prompts of it: use the seed of the log's run"
            )
        return (
            f"no prompt of this run has a group of the same step, but {known:,} of {total:,} are in the log in other "
            f"steps; use the seed and training.prompts_per_step of the log's run, or peers.{self.name}.match=prompt"
        )

    def _known_prompts(self) -> int:
        """How many prompts of the run the log has, whatever the step."""
        recorded = {key[1] if isinstance(key, tuple) else key for key in self._groups_of}
        return sum(q in recorded for ids in self._planned for q in ids)

    def _compare_prompts(self, prompts: Sequence[Prompt], step: int) -> None:
        chosen = [(prompt, stored) for prompt in prompts if (stored := self._pick(step, prompt.id)) is not None]
        recorded = self._read([(prompt.id, stored) for prompt, stored in chosen])
        pairs = [(prompt, group.prompt) for (prompt, _), group in zip(chosen, recorded, strict=True)]
        self.notes += compare_prompts(f"peers.{self.name}: {self._where}", pairs)


def compare_prompts(where: str, pairs: Sequence[tuple[Prompt, Prompt]]) -> list[str]:
    """Notes on this run's prompts and the peer's prompts of the same ids, given as pairs.

    Raises:
        DataError: most of them have another reference answer. `where` begins the message.
    """
    other = [mine for mine, theirs in pairs if theirs.reference and theirs.reference != mine.reference]
    if 2 * len(other) > len(pairs):
        raise DataError(
            f"{where}: {len(other)} of {len(pairs)} prompts that were compared have another reference answer there "
            f"({other[0].id!r} ...); it comes from another task"
        )
    reworded = [mine for mine, theirs in pairs if mine.text != theirs.text]
    if not reworded:
        return []
    return [
        f"{where}: {len(reworded)} of {len(pairs)} prompts that were compared are worded otherwise there "
        f"({reworded[0].id!r} ...); its responses answer that wording"
    ]


def open_peers(peers: Mapping[str, AnyPeerSettings], stream: PromptStream, steps: int, seed: int) -> list[StoredPeer]:
    """Open and check the logs of a recipe's stored peers; see `StoredPeer` for the errors."""
    opened = [StoredPeer(name, of, seed) for name, of in peers.items() if isinstance(of, PeerSettings)]
    for peer in opened:
        peer.check(stream, steps)
    return opened


def regrade(task: Task, groups: Sequence[Group], pool: VerificationPool) -> int:
    """Put the current verifier's rewards in place of the recorded ones; returns how many it contradicts."""
    recorded = [response.reward for group in groups for response in group.responses]
    grade_groups(task, groups, pool)
    verified = [response.reward for group in groups for response in group.responses]
    return sum(old != new for old, new in zip(recorded, verified, strict=True))


def peer_metrics(groups: Sequence[Group], prompts: int, contradicted: int) -> dict[str, Any]:
    """What a step's line says about a peer that is not trained here; `prompts`: those of the step."""
    rewards: list[NDArray[np.float64]] = [group.rewards for group in groups]
    return {
        "groups": len(groups),
        "missing": prompts - len(groups),
        "responses": sum(group.size for group in groups),
        "contradicted": contradicted,
        "reward_mean": float(np.concatenate(rewards).mean()) if rewards else None,
    }


class Remembered:
    """A step's scores, so that a response which was scored when a stored group was chosen is not scored again."""

    def __init__(self, score: ScoreRows) -> None:
        self._score = score
        self._known: dict[tuple[str, str, bytes], NDArray[np.float32]] = {}

    def __call__(self, model: str, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        keys = [(model, row.prompt_id, row.response_token_ids.tobytes()) for row in rows]
        fresh = {key: row for key, row in zip(keys, rows, strict=True) if key not in self._known}
        self._known |= zip(fresh, self._score(model, list(fresh.values())), strict=True)
        return [self._known[key] for key in keys]

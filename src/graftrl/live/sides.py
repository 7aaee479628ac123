"""The two sides of a job in an exchange: it publishes its own groups, and listens for a peer's."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from graftrl.errors import ConfigError, DataError, RunError
from graftrl.live.content import Batch, is_whole, publisher_of, unpack
from graftrl.live.service import Service, Unreachable
from graftrl.rollout import Group, Prompt
from graftrl.training.peers import compare_prompts


def steps_kept(max_staleness: int) -> int:
    """How many steps of a model stay: those a peer may use, and one more, for a peer that has published a step and has
    not yet read ours while we have gone on."""
    return max_staleness + 2


class Publisher:
    """Publishes the groups of a job's models.

    Args:
        identity: of the run; another run that publishes under one of our names has another one.
        keep: steps of a model that stay.
    """

    def __init__(self, service: Service, identity: str, keep: int) -> None:
        self.service, self.keep = service, keep
        self._own = {identity}

    def begin(self, models: Iterable[str], finished_steps: int, *, adopt: bool = False) -> None:
        """Before the first step, or where a run goes on: what it published of steps to come is taken back.

        adopt: what lies there under our names is ours if the run goes on, whoever published it.

        Raises:
            RunError: the service cannot be reached, or holds what another run published under one of our names.
        """
        self.service.open()
        for model in models:
            held = self.service.look(model)
            for step in held:
                found = publisher_of(self.service.fetch(model, step) or b"")
                if adopt and finished_steps:
                    self._own.add(found)
                elif found not in self._own:
                    raise RunError(self._foreign(model, step))
            self.service.drop(model, [step for step in held if step > finished_steps])

    def publish(self, model: str, step: int, content: bytes) -> None:
        """Raises RunError where another run publishes under this name, Unreachable where the service is away."""
        if step in self.service.look(model):
            before = self.service.fetch(model, step)
            if before is not None and publisher_of(before) not in self._own:
                raise RunError(self._foreign(model, step))
        self.service.publish(model, step, content, self.keep)

    def _foreign(self, model: str, step: int) -> str:
        return (
            f"{self.service.place(model, step)}: another run has published as {model!r}, an earlier run or the other "
            "side; remove what it left or choose another place to meet, and give the models of both sides two names"
        )


@dataclass
class Received:
    """What a step got from a peer.

    groups: on this job's prompts, in their order, each with the peer's step as `log_step`; rewards as the peer has
        them. waited_s, bytes: of this step. notes: what a person should know.
    """

    groups: list[Group] = field(default_factory=list)
    fingerprint: str = ""
    waited_s: float = 0.0
    bytes: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def alone(self) -> bool:
        return not self.groups


class Listener:
    """Listens for one peer.

    A step waits until the peer has published that step, or a group on every prompt that is fresh enough, or has gone
    beyond it; at most `timeout_s`. Each further wait in vain is half as long, until the peer is heard again: so a peer
    that is gone costs twice `timeout_s` in all.

    Args:
        peer: its name where the jobs meet. name: what it is called here.
        max_staleness: steps that a group may be older than the step that uses it.
        known: whether this run has had groups of the peer before.
    """

    def __init__(
        self,
        service: Service,
        peer: str,
        *,
        name: str | None = None,
        timeout_s: float,
        max_staleness: int = 0,
        poll_s: float = 0.2,
        known: bool = False,
    ) -> None:
        self.service, self.peer, self.name = service, peer, name or peer
        self.timeout_s, self.max_staleness, self.poll_s = timeout_s, max_staleness, poll_s
        self.patience = timeout_s
        self._known = known
        self._seen: dict[int, Hashable] = {}
        self._read: dict[int, tuple[Hashable, Batch]] = {}
        self._was_alone = False

    def receive(self, step: int, prompts: Mapping[str, Prompt]) -> Received:
        """The peer's groups for this step; none where it goes on alone.

        Args:
            prompts: of this job's step, by id.

        Raises:
            ConfigError: the peer answers other prompts.
            DataError: what the peer published cannot be used.
        """
        found = Received()
        started = time.monotonic()
        deadline, heard, held, fault = started + self.patience, False, dict[int, Hashable](), ""
        while True:
            try:
                held, fault = self.service.look(self.peer), ""
                if held != self._seen:
                    self._seen, heard, deadline = held, True, started + self.timeout_s
                    self.patience = self.timeout_s
                torn = self._read_new(step, held, found)
            except Unreachable as error:
                torn, fault = "", str(error)
            usable = self._usable(step)
            if step in usable or max(held, default=0) > step or (prompts and self._covered(prompts, usable)):
                break
            left = deadline - time.monotonic()
            if left <= 0:
                if torn:
                    raise DataError(torn)
                if not heard:
                    self.patience = self.patience / 2 if self.patience > self.poll_s else 0.0
                break
            time.sleep(min(self.poll_s, left))
        found.waited_s = time.monotonic() - started
        self._choose(step, prompts, usable, found)
        self._say(step, found, held, fault)
        return found

    def _read_new(self, step: int, held: Mapping[int, Hashable], found: Received) -> str:
        """Read what is fresh enough and not yet read; returns what to say of a file that is torn so far."""
        torn = ""
        self._read = {at: read for at, read in self._read.items() if step - self.max_staleness <= at <= step}
        for at, mark in held.items():
            if not step - self.max_staleness <= at <= step or (at in self._read and self._read[at][0] == mark):
                continue
            content = self.service.fetch(self.peer, at)
            where = self.service.place(self.peer, at)
            if content is None:
                continue
            if not is_whole(content):
                torn = f"{where}: torn or not a Parquet file; remove it, or let {self.peer!r} publish its step again"
                continue
            self._read[at] = mark, unpack(content, self.peer, at, where)
            found.bytes += len(content)
        return torn

    def _usable(self, step: int) -> dict[int, Batch]:
        """By step, the newest first."""
        return {at: batch for at, (_, batch) in sorted(self._read.items(), reverse=True) if at <= step}

    @staticmethod
    def _covered(prompts: Mapping[str, Prompt], usable: Mapping[int, Batch]) -> bool:
        return all(any(q in batch.groups for batch in usable.values()) for q in prompts)

    def _choose(self, step: int, prompts: Mapping[str, Prompt], usable: Mapping[int, Batch], found: Received) -> None:
        pairs = []
        for q, prompt in prompts.items():
            batch = next((batch for batch in usable.values() if q in batch.groups), None)
            if batch is not None:
                group = batch.groups[q]
                pairs.append((prompt, group.prompt))
                # Copies, since rewards are graded anew and a batch may serve several steps.
                responses = [replace(response) for response in group.responses]
                found.groups.append(replace(group, model=self.name, prompt=prompt, responses=responses))
                found.fingerprint = batch.fingerprint
        asked = step in usable and bool(usable[step].groups) and bool(prompts)
        if asked and not self._known:
            where = self.service.place(self.peer, step)
            if not pairs:
                raise ConfigError(
                    f"{where}: none of its prompts is one of this step's; give both jobs the same task or data set, "
                    "seed, and number of prompts in a step"
                )
            found.notes += compare_prompts(where, pairs)
        self._known = self._known or bool(pairs)

    def _say(self, step: int, found: Received, held: Mapping[int, Hashable], fault: str) -> None:
        alone = not found.groups
        if alone and fault:
            found.notes.append(f"peer {self.name}: ALONE in this step: {fault}")
        elif alone and step in held:
            found.notes.append(f"peer {self.name}: ALONE in this step: it has no group on these prompts")
        elif alone and max(held, default=0) > step:
            found.notes.append(f"peer {self.name}: ALONE in this step: it has gone beyond it")
        elif alone:
            found.notes.append(
                f"peer {self.name}: ALONE in this step: nothing came in time ({self.service.where}); until it is heard "
                "again, each step waits half as long as the one before"
            )
        elif self._was_alone:
            found.notes.append(f"peer {self.name}: heard again")
        self._was_alone = alone

"""One side of an exchange through a shared folder, for a script that trains one model.

The other side is the same script for another model, or `graftrl train` with a live peer: see `graftrl.live`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from graftrl.errors import ConfigError
from graftrl.live.content import pack
from graftrl.live.folder import SharedFolder
from graftrl.live.service import Unreachable
from graftrl.live.sides import Listener, Publisher, steps_kept
from graftrl.rollout import Group

logger = logging.getLogger("graftrl")


@dataclass
class FolderExchange:
    """One side of the exchange.

    folder: one that both processes reach; new for every run of the pair. name, peer: of this model and the other.
    timeout_s: how long a step waits for the peer's; then this side goes on alone. While nothing more is heard of the
    peer, each further step waits half as long. max_staleness: steps that a peer's group of the same prompt may be
    older than this one. alone: whether the last step got nothing. waited_s: of the last step.

    Raises:
        ConfigError: names that are equal or cannot name a folder; a time-out or staleness that cannot be.
    """

    folder: Path | str
    name: str
    peer: str
    timeout_s: float = 1800.0
    poll_s: float = 0.2
    max_staleness: int = 0
    alone: bool = field(default=False, init=False)
    waited_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        for name in (self.name, self.peer):
            if not name or name != Path(name).name or name.startswith("."):
                raise ConfigError(f"FolderExchange: {name!r} cannot name a folder")
        if self.name == self.peer:
            raise ConfigError(f"FolderExchange: both sides are called {self.name!r}; give them two names")
        if not self.timeout_s > 0:
            raise ConfigError(f"FolderExchange: timeout_s is {self.timeout_s:g}; it must be positive")
        if self.max_staleness < 0:
            raise ConfigError(f"FolderExchange: max_staleness is {self.max_staleness}; it must be 0 or more")
        self._service = SharedFolder(Path(self.folder))
        self._noted: list[str] = []
        self._identity = uuid.uuid4().hex
        self._publisher = Publisher(self._service, self._identity, steps_kept(self.max_staleness))
        self._listener = Listener(
            self._service,
            self.peer,
            timeout_s=self.timeout_s,
            max_staleness=self.max_staleness,
            poll_s=self.poll_s,
        )

    def file(self, model: str, step: int) -> Path:
        return self._service.file(model, step)

    def begin(self, finished_steps: int) -> None:
        """Raises RunError where the folder cannot be used, or holds this model's files of another run."""
        self._publisher.begin([self.name], finished_steps, adopt=True)

    def swap(
        self, step: int, groups: Sequence[Group], fingerprint: str, policy_version: int
    ) -> tuple[list[Group], str] | None:
        """Give this step's groups and take the peer's.

        Args:
            groups: graded, with log-probabilities of the plain distribution. fingerprint: of this model's tokenizer.

        Returns:
            the peer's groups, on this side's prompts, and the fingerprint of its tokenizer; None when this side goes on
            alone.

        Raises:
            ConfigError: the peer answers other prompts.
            RunError: another run publishes under this name.
            DataError: the peer's file cannot be used.
        """
        content = pack(
            self.name, step, groups, run=self.name, fingerprint=fingerprint, publisher=self._identity,
            policy_version=policy_version,
        )  # fmt: skip
        try:
            self._publisher.publish(self.name, step, content)
        except Unreachable as error:
            logger.warning("step %d: nothing was published: %s", step, error)
        found = self._listener.receive(step, {group.prompt.id: group.prompt for group in groups})
        self.waited_s = found.waited_s
        for note in found.notes:
            if note not in self._noted:
                logger.warning("step %d: %s", step, note)
        self._noted = found.notes
        self.alone = found.alone
        return None if found.alone else (found.groups, found.fingerprint)

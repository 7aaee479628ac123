"""Two processes that train one model each and hand their groups to each other through a folder.

    FOLDER/A/rollouts/step-000001.parquet    what A sampled in step 1, complete once it is there
    FOLDER/B/rollouts/step-000001.parquet

Each side writes its file of a step and waits for the other's. Both files are rollout logs: text, generation
log-probabilities and rewards, and nothing else passes between the processes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import polars as pl

from graftrl.errors import ConfigError, DataError, RunError
from graftrl.logs.folders import writing
from graftrl.logs.reader import RolloutLog, check_file
from graftrl.logs.rollouts import step_file_name, write_rollouts
from graftrl.policies.config import SamplingSettings
from graftrl.rollout import Group, Prompt

logger = logging.getLogger("graftrl")


@dataclass
class FolderExchange:
    """One side of the exchange.

    folder: one that both processes reach; new for every run of the pair. name, peer: of this model and the other.
    timeout_s: how long to wait for the peer's file of a step. When it passes, this side goes on alone for good.
    alone: whether it has.
    """

    folder: Path | str
    name: str
    peer: str
    timeout_s: float = 1800.0
    poll_s: float = 0.2
    alone: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        for name in (self.name, self.peer):
            if not name or name != Path(name).name or name.startswith("."):
                raise ConfigError(f"FolderExchange: {name!r} cannot name a folder")
        if self.name == self.peer:
            raise ConfigError(f"FolderExchange: both sides are called {self.name!r}; give them two names")
        if not self.timeout_s > 0:
            raise ConfigError(f"FolderExchange: timeout_s is {self.timeout_s:g}; it must be positive")

    def file(self, model: str, step: int) -> Path:
        return Path(self.folder) / model / "rollouts" / step_file_name(step)

    def begin(self, finished_steps: int) -> None:
        """Raises RunError where the folder holds this model's files of another run: the peer would read them."""
        held = sorted((Path(self.folder) / self.name / "rollouts").glob("step-*.parquet"))
        if held and not finished_steps:
            raise RunError(f"{held[0].parent}: holds an exchange of an earlier run; remove it or choose another folder")

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
            ConfigError: the peer answered none of this step's prompts.
            RunError: the folder cannot be written.
            DataError: the peer's file cannot be used.
        """
        if self.alone:
            return None
        mine = self.file(self.name, step)
        with writing(mine):
            write_rollouts(
                mine,
                run=self.name,
                step=step,
                groups={self.name: groups},
                sampling=SamplingSettings(),
                fingerprints={self.name: fingerprint},
                policy_version=policy_version,
            )
        theirs = self.file(self.peer, step)
        deadline = time.monotonic() + self.timeout_s
        while not theirs.exists():
            if time.monotonic() >= deadline:
                self.alone = True
                logger.warning(
                    "step %d: nothing came from %r within %g s (%s). %r GOES ON ALONE from here, as plain GRPO",
                    step, self.peer, self.timeout_s, theirs, self.name,
                )  # fmt: skip
                return None
            time.sleep(min(self.poll_s, self.timeout_s))
        return self._read(theirs, step, {group.prompt.id: group.prompt for group in groups})

    def _read(self, file: Path, step: int, prompts: Mapping[str, Prompt]) -> tuple[list[Group], str]:
        check_file(file)
        if not prompts or not pl.scan_parquet(file).select(pl.len()).collect().item():
            return [], ""  # one side's reward functions left every group ungraded
        log = RolloutLog(file)
        if self.peer not in log.models:
            raise DataError(f"{file}: holds no responses of {self.peer!r}")
        keys = [(step, q) for q in log.group_index(self.peer)["prompt_id"] if q in prompts]
        if not keys:
            raise ConfigError(
                f"{file}: none of its prompts is one of this step's; give both scripts the same data set, seed, and "
                "prompts in a generation batch"
            )
        groups = [
            replace(group, model=self.peer, prompt=prompts[q]) for (_, q), group in log.groups(self.peer, keys).items()
        ]
        only = log.fingerprints(self.peer)
        return groups, (only.pop() or "") if len(only) == 1 else ""

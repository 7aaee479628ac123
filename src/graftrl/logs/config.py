"""Settings of a peer that this run does not train: a stored one, whose log is read, or a live one, in another job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from graftrl.settings import Settings


class PeerSettings(Settings):
    """A peer that is not trained and never loaded: what it said is read from the rollout log of a run that is over.

    log: a run folder, a folder of Parquet files or one such file; or a list of them, such as the runs of several seeds.
    model: whose responses; a name in the log (default: the only one there).
    match: "step_and_prompt" takes the group of the same step and prompt id, so that a run with the seed and batch size
        of the log's run meets the peer as it was then; "prompt" takes one of the prompt, whatever its step.
    choose: among several groups of a prompt: the "newest" (largest step), a "random" one, or the "most_compatible": the
        one with the highest mean score under the receiver at the start of the step.
    """

    log: list[Path] = Field(min_length=1)
    model: str | None = Field(None, min_length=1)
    match: Literal["step_and_prompt", "prompt"] = "step_and_prompt"
    choose: Literal["newest", "random", "most_compatible"] = "newest"

    @field_validator("log", mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, log: Any) -> Any:
        if not isinstance(log, str | Path | list) or not log:
            raise ValueError("name a run folder, a folder of Parquet files or one such file, or a list of them")
        return log if isinstance(log, list) else [log]

    @model_validator(mode="after")
    def _choice_is_possible(self) -> PeerSettings:
        if self.match == "step_and_prompt" and len(self.log) == 1 and self.choose != "newest":
            raise ValueError(
                f"choose is {self.choose!r}, but one log has one group for a step and prompt; set match to 'prompt'"
            )
        return self


class LivePeerSettings(Settings):
    """A peer that trains in another job at the same time. Both jobs hand each other the groups of each step.

    live: where they meet: a folder that both reach; "ray", a service on the cluster of ray.address; or
        "ray://HOST:PORT", one on the cluster behind that Ray client server. "ray/NAME" and "ray://HOST:PORT/NAME" name
        the service, so that several pairs can share a cluster.
    model: its name in the other job (default: the one it has here).
    timeout_s: how long a step waits for the peer's groups; then this job goes on alone. While nothing more is heard of
        the peer, each further step waits half as long as the one before.
    max_staleness: how many steps older than this one a peer's group of the same prompt may be.
    """

    live: str = Field(min_length=1)
    model: str | None = Field(None, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")
    timeout_s: float = Field(600.0, gt=0)
    max_staleness: int = Field(0, ge=0)

    @field_validator("live")
    @classmethod
    def _place_is_one(cls, live: str) -> str:
        if live.startswith("ray:") and not re.fullmatch(r"ray://[^/:]+:\d+(/[A-Za-z0-9._-]+)?", live):
            raise ValueError(f"is {live!r}; write ray://HOST:PORT or ray://HOST:PORT/NAME")
        return live


def _kind_of_peer(settings: Any) -> str:
    live = isinstance(settings, LivePeerSettings) or (isinstance(settings, Mapping) and "live" in settings)
    return "live peer" if live else "stored peer"


# A tag has a space, so that it can be told from the keys of a recipe.
AnyPeerSettings = Annotated[
    Annotated[PeerSettings, Tag("stored peer")] | Annotated[LivePeerSettings, Tag("live peer")],
    Discriminator(_kind_of_peer),
]


def log_of_peer(settings: Mapping[str, Any], name: str, received: Path) -> PeerSettings:
    """Where the groups of a peer lie that a run's config.yaml describes so.

    received: the file in which the run recorded what it got from live peers in the step in question.
    """
    if "live" in settings:
        return PeerSettings(log=[received], model=name, match="prompt")
    return PeerSettings.model_validate(settings)

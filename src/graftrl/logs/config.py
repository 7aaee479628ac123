"""Settings of a stored peer: whose log, and which of its groups belong to a prompt of this run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

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

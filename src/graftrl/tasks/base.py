"""What a task is: prompts, and a verifier that turns a response into a reward and a reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from graftrl.rollout import FinishReason, Prompt

TIME_LIMIT = "time limit"  # how a reason begins that says so


@dataclass(frozen=True, slots=True)
class Grade:
    """reward: in [0, 1]; 1 means verified correct. reason: a short phrase that says why, for logs and people."""

    reward: float
    reason: str


class Verifier(Protocol):
    """Grades one response. Must be picklable: it runs in a worker process unless the task says `in_process`.

    One with a clock of its own says in an attribute `limit_s` after how many seconds it has answered at the latest; the
    pool waits as long, and its reason for a response that ran out of time is `TIME_LIMIT`.
    """

    def __call__(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> Grade: ...


@dataclass(frozen=True)
class Task:
    """Prompts plus verifier.

    train, validation: prompts; a procedural task may give a lazy sequence that builds item i on demand.
    in_process: True only for a verifier that is bounded in time by construction (no parsing of mathematics, no user
        code); every other verifier runs in the killable pool.
    notes: what was left out at load time and why, one line each; printed when a run starts.
    """

    name: str
    train: Sequence[Prompt]
    validation: Sequence[Prompt]
    verifier: Verifier
    in_process: bool = False
    notes: tuple[str, ...] = field(default=())

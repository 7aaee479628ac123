"""What a method is: a way to turn one step's groups into weighted rows, and the loss on them.

A method is blind to devices: it sees groups, codecs (tokenizers with their conventions) and a scoring function. It
keeps no state between steps, so a resumed run needs nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from graftrl.objective import Objective, group_advantages
from graftrl.rollout import Group, Prompt, Row
from graftrl.settings import Settings

Groups = Mapping[str, Sequence[Group]]  # model -> its groups, in prompt order


class CodecLike(Protocol):
    """The part of a codec that a method may use."""

    tokenizer: Any
    eos_id: int
    fingerprint: str

    def prompt_token_ids(self, prompt: Prompt) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class StepContext:
    """What a method may ask for during a step.

    seed: for this step's draws. score: log-probabilities, float32 [T] per row, under the receiver's weights at the
    start of the step.
    """

    step: int
    seed: int
    group_size: int
    max_response_tokens: int
    codecs: Mapping[str, CodecLike]
    score: Callable[[str, Sequence[Row]], list[NDArray[np.float32]]]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One peer response and what became of it, for the logs. status: "admitted", "gated" or "rejected"."""

    receiver: str
    source: str
    prompt_id: str
    response_index: int
    status: str
    reason: str
    reward: float
    advantage: float
    score: float | None
    weight: float
    receiver_tokens: int


@dataclass
class Exchange:
    """rows: per receiver, a prompt's rows side by side. directions: diagnostics per "source->receiver"."""

    rows: dict[str, list[Row]]
    transfers: list[Transfer] = field(default_factory=list)
    directions: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Method(Protocol):
    """The whole protocol. `filter` (or None) says whether a freshly sampled group is worth training on; the loop
    samples further prompts for those it refuses, at most `sampling_rounds` times."""

    settings_type: ClassVar[type[Settings]]
    fewest_models: ClassVar[int]
    settings: Any
    filter: Callable[[Group], bool] | None
    sampling_rounds: int

    def exchange(self, groups: Groups, context: StepContext) -> Exchange: ...

    def order(self, rows: Sequence[Row], minibatch_prompts: int, rng: np.random.Generator) -> list[list[Row]]: ...

    def objective(self, minibatch_index: int) -> Objective: ...


def own_rows(group: Group, codec: CodecLike, *, normalize_std: bool = True) -> list[Row]:
    """A model's own group as rows with group-relative advantages. Sampled ids are kept, never re-encoded."""
    advantages = group_advantages(group.rewards, normalize_std=normalize_std).tolist()
    return [
        Row(
            prompt_id=group.prompt.id,
            prompt_token_ids=codec.prompt_token_ids(group.prompt),
            response_token_ids=response.token_ids,
            advantages=advantage,
            kind="own",
            source=group.model,
            old_logprobs=response.logprobs,
        )
        for response, advantage in zip(group.responses, advantages, strict=True)
    ]


def by_prompt(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of the same prompt together, prompts in order of first appearance."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.prompt_id, []).append(row)
    return list(found.values())


def cut_by_prompt(rows: Sequence[Row], minibatch_prompts: int) -> list[list[Row]]:
    """Minibatches of `minibatch_prompts` prompts with all their rows; the last may be smaller."""
    prompts = by_prompt(rows)
    return [
        [row for of_prompt in prompts[start : start + minibatch_prompts] for row in of_prompt]
        for start in range(0, len(prompts), minibatch_prompts)
    ]

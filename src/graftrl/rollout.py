"""The nouns of the code: what models say, how it was graded, and the rows a receiver trains on.

Nothing here knows a torch model. Everything that travels between models is one of these: strings, generation
log-probabilities and rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length"]
Message = Mapping[str, str]  # {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem. `id` is unique within a task and stable between runs: groups are found by it, never by position.

    messages: a last message of the role "assistant" is the beginning of the answer, which responses go on with.
    """

    id: str
    messages: tuple[Message, ...]
    reference: str
    task: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The contents of all messages, one after the other; what a reader wants to see."""
        return "\n".join(message["content"] for message in self.messages)

    @property
    def prefix(self) -> str:
        """The given beginning of the answer; "" as a rule."""
        return self.messages[-1]["content"] if self._begins_answer else ""

    @property
    def question(self) -> tuple[Message, ...]:
        """The messages without a given beginning of the answer."""
        return self.messages[:-1] if self._begins_answer else self.messages

    @property
    def _begins_answer(self) -> bool:
        return bool(self.messages) and self.messages[-1].get("role") == "assistant"


@dataclass(slots=True)
class Response:
    """One sampled answer.

    token_ids: int64 [T], the source model's own ids, including its EOS when `finish_reason` is "stop".
    logprobs:  float32 [T], log-probability of each of those ids under the distribution it was sampled from, in nats;
        empty where another trainer sampled it and did not say.
    finish_reason: "stop" iff the model emitted one of its EOS ids; "length" iff it was cut at the token limit.
    reward: None until graded.
    """

    text: str
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    reward: float | None = None
    grade_reason: str = ""

    @property
    def content_logprobs(self) -> NDArray[np.float32]:
        """Log-probabilities without the final EOS (methods: compatibility compares contents, EOS excluded)."""
        return self.logprobs[:-1] if self.finish_reason == "stop" else self.logprobs


@dataclass(slots=True)
class Group:
    """The n responses of one model to one prompt in one step.

    log_step: for a group that was read from a log, the step of the run that wrote it; None for one sampled just now.
    """

    model: str
    prompt: Prompt
    responses: list[Response]
    log_step: int | None = None

    @property
    def size(self) -> int:
        return len(self.responses)

    @property
    def rewards(self) -> NDArray[np.float64]:
        """float64 [n]; raises ValueError while a response is ungraded."""
        return np.array(self._graded(), dtype=np.float64)

    @property
    def successes(self) -> int:
        """k: the number of responses with reward 1."""
        return self._graded().count(1.0)

    def _graded(self) -> list[float]:
        rewards = [response.reward for response in self.responses if response.reward is not None]
        if len(rewards) < len(self.responses):
            raise ValueError(f"group of {self.model!r} on prompt {self.prompt.id!r} holds ungraded responses")
        return rewards

    @property
    def all_fail(self) -> bool:
        return self.successes == 0

    @property
    def all_success(self) -> bool:
        return self.successes == self.size


RowKind = str  # "own", "grafted", "sft", ...: a method's objective says which token loss each kind gets


@dataclass(slots=True)
class Row:
    """One response as a receiver trains on it, in the receiver's own tokens.

    prompt_token_ids:   int64 [P], after the receiver's own chat template.
    response_token_ids: int64 [T], T >= 1.
    loss_mask:    bool [T]; True where a token enters the loss and the token counts; all tokens where it is not given.
        Comes from lengths, never from ids.
    old_logprobs: float32 [T] under the receiver's weights when the step began; None until scored.
    advantages:   a scalar for the whole response, or float32 [T].
    weight:       multiplies the row's loss, never its token count.
    ends_with_eos: the last token is the receiver's EOS.
    source_logprob: mean log-probability per token under the source at generation, EOS excluded; NaN where no term of
        the method reads it.
    clip_high: upper clip bound of this row's ratio; NaN where the objective's own bound holds.
    constants: named values per token, [T], that the method's token losses read, such as a scorer's log-probabilities.
    contexts: prompt ids as each scorer reads this row's prompt, where sums over the vocabulary need the scorers.
    """

    prompt_id: str
    prompt_token_ids: NDArray[np.int64]
    response_token_ids: NDArray[np.int64]
    advantages: float | NDArray[np.float32]
    kind: RowKind
    source: str
    loss_mask: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    old_logprobs: NDArray[np.float32] | None = None
    weight: float = 1.0
    ends_with_eos: bool = False
    source_logprob: float = float("nan")
    clip_high: float = float("nan")
    constants: dict[str, NDArray[Any]] = field(default_factory=dict)
    contexts: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.loss_mask) == 0:
            self.loss_mask = np.ones(len(self.response_token_ids), dtype=np.bool_)
        if len(self.response_token_ids) == 0:
            raise ValueError(f"row of prompt {self.prompt_id!r} has no response token")

    @property
    def loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def carries_policy_gradient(self) -> bool:
        """False when every loss token's weighted advantage is 0: such a row adds nothing to a surrogate's gradient."""
        weighted = np.broadcast_to(np.asarray(self.advantages) * self.weight, self.loss_mask.shape)
        return bool(np.any(weighted[self.loss_mask] != 0))


def sizes_by_model(groups: Mapping[str, Sequence[Group]]) -> dict[str, dict[str, int]]:
    """`{model: {prompt_id: n}}`: groups of a stored log may be of another size than those sampled now."""
    return {model: {group.prompt.id: group.size for group in of_model} for model, of_model in groups.items()}


def successes_by_model(groups: Mapping[str, Sequence[Group]]) -> dict[str, dict[str, int]]:
    """`{model: {prompt_id: k}}`, what the selection rules read."""
    return {model: {group.prompt.id: group.successes for group in of_model} for model, of_model in groups.items()}

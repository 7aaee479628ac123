"""What a method is: a way to turn one step's groups into weighted rows, and the loss on them.

A method is blind to devices: it sees groups, codecs (tokenizers with their conventions) and a scoring function. It
keeps no state between steps: what it has to remember travels through `Exchange.memory`, so that a resumed run has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from graftrl.exchange import Rejected, compatibility_scores, retokenize
from graftrl.objective import Objective, group_advantages
from graftrl.rollout import Group, Prompt, Response, Row
from graftrl.settings import Settings

Groups = Mapping[str, Sequence[Group]]  # model -> its groups, in prompt order
ScoreRows = Callable[[str, Sequence[Row]], list[NDArray[np.float32]]]  # model, rows -> float32 [T] per row


FRESH_KINDS = ("own", "distilled")  # of rows that the model itself sampled in this step

SCORE_BINS = [round(0.05 * i, 2) for i in range(41)]  # of s, 0 to 2; the last bin also holds what lies above


class CodecLike(Protocol):
    """The part of a codec that a method may use."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def architecture(self) -> str:
        """Of the model, in words; "" where it is not known."""
        ...

    def prompt_token_ids(self, prompt: Prompt) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class StepContext:
    """What a method may ask for during a step.

    seed: for this step's draws. codecs: of the models that train. score: log-probabilities, float32 [T] per row, under
    the receiver's weights at the start of the step, or under a scorer. scorers: the frozen models by name, as codecs
    whose prompts come in the scorer's context. mean_rewards: per model its mean reward of every step so far, this
    one last. receivers: the models that train; None: all that have groups. elsewhere: models that train in another
    process: a balanced selection counts them as receivers, and their rows are made there. stored: the peers that are
    not here, read from logs: name -> fingerprint of the tokenizer that its ids are from, "" where unknown. history: a
    model's groups of earlier steps of this run, oldest first. memory: what the method's exchange of the last step left
    in its own.
    """

    step: int
    seed: int
    group_size: int
    max_response_tokens: int
    codecs: Mapping[str, CodecLike]
    score: ScoreRows
    mean_rewards: Mapping[str, Sequence[float]] = field(default_factory=dict)
    receivers: Collection[str] | None = None
    elsewhere: Collection[str] = ()
    stored: Mapping[str, str] = field(default_factory=dict)
    history: Callable[[str, range], Sequence[Group]] = lambda model, steps: ()
    memory: Mapping[str, Any] = field(default_factory=dict)
    scorers: Mapping[str, CodecLike] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One peer response and what became of it, for the logs. status: "admitted", "gated" or "rejected". source_step:
    of the log that it was read from; None for a response of this step."""

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
    source_step: int | None = None


@dataclass
class Exchange:
    """rows: per receiver, a prompt's rows side by side. directions: diagnostics per "source->receiver". diagnostics:
    others, per model. memory: what the method wants to know in the next step; plain JSON, saved with checkpoints."""

    rows: dict[str, list[Row]]
    transfers: list[Transfer] = field(default_factory=list)
    directions: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    diagnostics: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)


class Method(Protocol):
    """The whole protocol. `filter` (or None) says whether a freshly sampled group is worth training on; the loop
    samples further prompts for those it refuses, at most `sampling_rounds` times. `usable` says whether a receiver
    whose own group is given could learn from a peer's group with so many successes; it is asked only where one of a
    stored peer's groups has to be chosen. A method without group-relative advantages may have `fewest_responses = 1`;
    the others need groups of 2."""

    settings_type: ClassVar[type[Settings]]
    fewest_models: ClassVar[int]
    settings: Any
    filter: Callable[[Group], bool] | None
    sampling_rounds: int

    def exchange(self, groups: Groups, context: StepContext) -> Exchange:
        """The step's groups of all models and stored peers, as rows of the models that train."""
        ...

    def usable(self, own: Group, successes: int, size: int) -> bool:
        """Whether the receiver whose group is `own` could learn from a peer's group with so many successes."""
        ...

    def order(self, rows: Sequence[Row], minibatch_prompts: int, rng: np.random.Generator) -> list[list[Row]]:
        """One model's rows as minibatches of so many prompts, in the order in which they are trained."""
        ...

    def objective(self, minibatch_index: int) -> Objective:
        """The loss on the step's minibatch of that number, from 0."""
        ...


def receiving(groups: Groups, context: StepContext) -> Groups:
    """The groups of the models that train; what a method loops over. Stored peers are left out: they only give."""
    return {
        model: of_model for model, of_model in groups.items() if context.receivers is None or model in context.receivers
    }


def own_rows(group: Group, codec: CodecLike, *, normalize_std: bool = True) -> list[Row]:
    """A model's own group as rows with group-relative advantages."""
    return rows_of(group, codec, group_advantages(group.rewards, normalize_std=normalize_std).tolist())


def rows_of(group: Group, codec: CodecLike, advantages: Sequence[float]) -> list[Row]:
    """A model's own group as rows. Sampled ids are kept, never re-encoded."""
    return [
        Row(
            prompt_id=group.prompt.id,
            prompt_token_ids=codec.prompt_token_ids(group.prompt),
            response_token_ids=response.token_ids,
            advantages=advantage,
            kind="own",
            source=group.model,
            old_logprobs=response.logprobs,
            ends_with_eos=response.finish_reason == "stop",
        )
        for response, advantage in zip(group.responses, advantages, strict=True)
    ]


def groups_by_prompt(groups: Groups) -> dict[str, list[Group]]:
    """Every model's group on the same prompt, found by the prompt's id."""
    found: dict[str, list[Group]] = {}
    for of_model in groups.values():
        for group in of_model:
            found.setdefault(group.prompt.id, []).append(group)
    return found


def peer_row(
    group: Group, index: int, receiver: str, context: StepContext, *, advantage: float, kind: str
) -> Row | Rejected:
    """One response of a peer's group as a row in the receiver's tokens, not yet scored."""
    response, codec, source = group.responses[index], context.codecs[receiver], context.codecs.get(group.model)
    fingerprint = context.stored[group.model] if source is None else source.fingerprint
    ours = retokenize(
        response.token_ids,
        response.finish_reason,
        None if source is None else source.tokenizer,
        codec.tokenizer,
        receiver_eos_id=codec.eos_id,
        max_tokens=context.max_response_tokens,
        same_vocabulary=fingerprint == codec.fingerprint,
        text=response.text,
    )
    if isinstance(ours, Rejected):
        return ours
    return Row(
        prompt_id=group.prompt.id,
        prompt_token_ids=codec.prompt_token_ids(group.prompt),
        response_token_ids=ours.token_ids,
        advantages=advantage,
        kind=kind,
        source=group.model,
        ends_with_eos=ours.ends_with_eos,
        source_logprob=float(response.content_logprobs.mean(dtype=np.float64)),
    )


def row_scores(
    rows: Sequence[Row], receiver_logprobs: Sequence[NDArray[np.float32]], responses: Sequence[Response]
) -> NDArray[np.float64]:
    """Compatibility s of each row: float64 [rows], EOS excluded on both sides.

    Args:
        receiver_logprobs: float32 [T] per row, from `StepContext.score`. responses: those that the rows were made of.
    """
    return compatibility_scores(
        [x[:-1] if row.ends_with_eos else x for x, row in zip(receiver_logprobs, rows, strict=True)],
        [response.content_logprobs for response in responses],
    )


def transfer_of(
    receiver: str,
    group: Group,
    index: int,
    status: str,
    reason: str = "",
    *,
    advantage: float,
    score: float | None = None,
    weight: float = 0.0,
    receiver_tokens: int = 0,
) -> Transfer:
    """The log entry of one peer response."""
    return Transfer(
        receiver=receiver,
        source=group.model,
        prompt_id=group.prompt.id,
        response_index=index,
        status=status,
        reason=reason,
        reward=float(group.responses[index].reward or 0.0),
        advantage=advantage,
        score=score,
        weight=weight,
        receiver_tokens=receiver_tokens,
        source_step=group.log_step,
    )


def direction_stats(
    transfers: Sequence[Transfer],
    models: Iterable[str],
    candidates: Mapping[tuple[str, str], int],
    receivers: Collection[str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Diagnostics per "source->receiver". candidates: prompts per (source, receiver) that the method could transfer.
    receivers: those of the models that train; None: all."""
    names = list(models)
    return {
        f"{source}->{receiver}": {
            **_moved_stats([t for t in transfers if (t.receiver, t.source) == (receiver, source)]),
            "candidates": candidates.get((source, receiver), 0),
        }
        for receiver in names
        for source in names
        if source != receiver and (receivers is None or receiver in receivers)
    }


def _moved_stats(moved: Sequence[Transfer]) -> dict[str, Any]:
    admitted = [t for t in moved if t.status == "admitted"]
    scores = np.array([t.score for t in moved if t.score is not None])
    rejected = Counter(t.reason for t in moved if t.status == "rejected")
    counts, _ = np.histogram(np.minimum(scores, SCORE_BINS[-1]), bins=SCORE_BINS)
    return {
        "selected": len({t.prompt_id for t in moved}),
        "responses": len(moved),
        "admitted": len(admitted),
        "admitted_successes": sum(t.reward == 1.0 for t in admitted),
        "admitted_failures": sum(t.reward != 1.0 for t in admitted),
        "gated": sum(t.status == "gated" for t in moved),
        "gated_not_finite": sum(t.reason == "not finite" for t in moved),
        "rejected": dict(rejected),
        "score_mean": float(scores.mean()) if len(scores) else None,
        "score_histogram": counts.tolist(),
        "weight_mean": float(np.mean([t.weight for t in admitted])) if admitted else None,
        "advantage_mean": float(np.mean([t.advantage for t in admitted])) if admitted else None,
    }


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

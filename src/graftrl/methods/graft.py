"""GRAFT: gated replacement of answer-failed groups with peer trajectories (Park et al., 2026).

Where the receiver's whole group fails and a peer's group is mixed, the peer's group takes its place: re-tokenised,
weighted by how compatible it is with the receiver, and trained last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from graftrl.errors import DataError
from graftrl.exchange import (
    Rejected,
    compatibility_scores,
    compatibility_weights,
    complementary_candidates,
    retokenize,
    select_complementary,
)
from graftrl.methods.base import Exchange, Groups, StepContext, Transfer, by_prompt, cut_by_prompt, own_rows
from graftrl.methods.grpo import ClipSettings, clip_objective
from graftrl.objective import Objective, group_advantages
from graftrl.rollout import Group, Row, successes_by_model
from graftrl.settings import Settings

SCORE_BINS = [round(0.05 * i, 2) for i in range(41)]  # 0 to 2; the last bin also holds what lies above


class GRAFTSettings(ClipSettings):
    """threshold: delta of the gate. weighting: "gate" is the paper's 1[s > delta] * min(s, 1); "no_floor" is min(s, 1);
    "none" is 1 for every response. peer_position: where minibatches with grafted prompts stand in the step."""

    name: Literal["graft"] = "graft"
    threshold: float = Field(0.8, ge=0)
    weighting: Literal["gate", "no_floor", "none"] = "gate"
    balanced: bool = True
    admit_all_success: bool = False
    peer_position: Literal["last", "first", "uniform"] = "last"


class GRAFT:
    settings_type: ClassVar[type[Settings]] = GRAFTSettings
    fewest_models: ClassVar[int] = 2
    filter: Callable[[Group], bool] | None = None
    sampling_rounds = 1

    def __init__(self, settings: GRAFTSettings) -> None:
        self.settings = settings
        self._objective = clip_objective(settings, ("own", "grafted"))

    def exchange(self, groups: Groups, context: StepContext) -> Exchange:
        _require_binary_rewards(groups)
        successes = successes_by_model(groups)
        selected = select_complementary(
            successes,
            context.group_size,
            balanced=self.settings.balanced,
            admit_all_success=self.settings.admit_all_success,
            seed=context.seed,
        )
        group_of = {(group.model, group.prompt.id): group for of_model in groups.values() for group in of_model}
        exchange = Exchange({})
        for receiver, of_receiver in groups.items():
            rows: list[Row] = []
            for group in of_receiver:
                source = selected[receiver].get(group.prompt.id)
                if source is None:
                    rows += own_rows(group, context.codecs[receiver], normalize_std=self.settings.normalize_std)
            peers = [group_of[source, prompt_id] for prompt_id, source in selected[receiver].items()]
            rows += self._graft(receiver, peers, context, exchange.transfers)
            exchange.rows[receiver] = rows
        self._diagnose(exchange, successes, selected, context)
        return exchange

    def _graft(
        self, receiver: str, peers: Sequence[Group], context: StepContext, transfers: list[Transfer]
    ) -> list[Row]:
        """The peer groups as rows of the receiver. One scoring pass gives both s and `old_logprobs`."""
        codec = context.codecs[receiver]
        rows: list[Row] = []
        origins: list[tuple[Group, int]] = []
        for group in peers:
            # Source-computed advantages over the full group, before any response is gated or rejected.
            advantages = group_advantages(group.rewards, normalize_std=self.settings.normalize_std).tolist()
            source = context.codecs[group.model]
            for index, response in enumerate(group.responses):
                ours = retokenize(
                    response.token_ids,
                    response.finish_reason,
                    source.tokenizer,
                    codec.tokenizer,
                    receiver_eos_id=codec.eos_id,
                    max_tokens=context.max_response_tokens,
                    same_vocabulary=source.fingerprint == codec.fingerprint,
                )
                if isinstance(ours, Rejected):
                    transfers.append(_transfer(receiver, group, index, "rejected", ours.reason, advantages[index]))
                    continue
                rows.append(
                    Row(
                        prompt_id=group.prompt.id,
                        prompt_token_ids=codec.prompt_token_ids(group.prompt),
                        response_token_ids=ours.token_ids,
                        advantages=advantages[index],
                        kind="grafted",
                        source=group.model,
                    )
                )
                origins.append((group, index))
        receiver_logprobs = context.score(receiver, rows)
        responses = [group.responses[index] for group, index in origins]
        scores = compatibility_scores(
            [
                logprobs[:-1] if response.finish_reason == "stop" else logprobs  # EOS excluded on both sides
                for logprobs, response in zip(receiver_logprobs, responses, strict=True)
            ],
            [response.content_logprobs for response in responses],
        )
        if self.settings.weighting == "none":
            weights = np.where(np.isnan(scores), 0.0, 1.0)
        else:
            floor = self.settings.weighting == "gate"
            weights = compatibility_weights(scores, self.settings.threshold, floor=floor)
        admitted: list[Row] = []
        for row, (group, index), logprobs, score, weight in zip(
            rows, origins, receiver_logprobs, scores.tolist(), weights.tolist(), strict=True
        ):
            finite = bool(np.isfinite(score)) and bool(np.isfinite(logprobs).all())
            weight = weight if finite else 0.0
            status, reason = ("admitted", "") if weight > 0 else ("gated", "score" if finite else "not finite")
            transfers.append(
                _transfer(
                    receiver, group, index, status, reason, float(row.advantages), score if finite else None, weight,
                    len(row.response_token_ids),
                )
            )  # fmt: skip
            if weight > 0:
                row.old_logprobs, row.weight = logprobs, weight
                admitted.append(row)
        return admitted

    def order(self, rows: Sequence[Row], minibatch_prompts: int, rng: np.random.Generator) -> list[list[Row]]:
        """Own prompts, then grafted ones, cut into minibatches; the boundary minibatch may hold both."""
        prompts = by_prompt(rows)
        own = [row for of_prompt in prompts if of_prompt[0].kind == "own" for row in of_prompt]
        grafted = [row for of_prompt in prompts if of_prompt[0].kind != "own" for row in of_prompt]
        minibatches = cut_by_prompt([*own, *grafted], minibatch_prompts)
        if self.settings.peer_position == "first":
            minibatches.sort(key=lambda minibatch: all(row.kind == "own" for row in minibatch))
        elif self.settings.peer_position == "uniform":
            minibatches = [minibatches[i] for i in rng.permutation(len(minibatches))]
        return minibatches

    def objective(self, minibatch_index: int) -> Objective:
        return self._objective

    def _diagnose(
        self,
        exchange: Exchange,
        successes: dict[str, dict[str, int]],
        selected: dict[str, dict[str, str]],
        context: StepContext,
    ) -> None:
        candidates = complementary_candidates(
            successes, context.group_size, admit_all_success=self.settings.admit_all_success, seed=context.seed
        )
        for receiver in successes:
            for source in successes:
                if source == receiver:
                    continue
                moved = [t for t in exchange.transfers if (t.receiver, t.source) == (receiver, source)]
                stats = _direction_stats(moved)
                stats["candidates"] = sum(s == source for s, _ in candidates[receiver].values())
                stats["selected"] = sum(s == source for s in selected[receiver].values())
                exchange.directions[f"{source}->{receiver}"] = stats
                if stats["admitted_failures"] >= context.group_size and stats["admitted_successes"] == 0:
                    exchange.notes.append(
                        f"{source}->{receiver}: only failed peer responses passed the gate (negative-only transfer). "
                        "Successes score too low for this receiver: responses are short or styles differ; try "
                        "method.weighting=no_floor or a lower method.threshold"
                    )


def _require_binary_rewards(groups: Groups) -> None:
    for of_model in groups.values():
        for group in of_model:
            odd = [reward for reward in group.rewards.tolist() if reward not in (0.0, 1.0)]
            if odd:
                raise DataError(
                    f"prompt {group.prompt.id!r} has reward {odd[0]:g}; graft's selection rules need rewards of 0 or "
                    "1: let the verifier of the task decide right or wrong, or use method grpo"
                )


def _transfer(
    receiver: str,
    group: Group,
    index: int,
    status: str,
    reason: str,
    advantage: float,
    score: float | None = None,
    weight: float = 0.0,
    receiver_tokens: int = 0,
) -> Transfer:
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
    )


def _direction_stats(moved: Sequence[Transfer]) -> dict[str, Any]:
    admitted = [t for t in moved if t.status == "admitted"]
    scores = np.array([t.score for t in moved if t.score is not None])
    rejected: dict[str, int] = {}
    for t in moved:
        if t.status == "rejected":
            rejected[t.reason] = rejected.get(t.reason, 0) + 1
    counts, _ = np.histogram(np.minimum(scores, SCORE_BINS[-1]), bins=SCORE_BINS)
    return {
        "responses": len(moved),
        "admitted": len(admitted),
        "admitted_successes": sum(t.reward == 1.0 for t in admitted),
        "admitted_failures": sum(t.reward != 1.0 for t in admitted),
        "gated": sum(t.status == "gated" for t in moved),
        "gated_not_finite": sum(t.reason == "not finite" for t in moved),
        "rejected": rejected,
        "score_mean": float(scores.mean()) if len(scores) else None,
        "score_histogram": counts.tolist(),
        "weight_mean": float(np.mean([t.weight for t in admitted])) if admitted else None,
    }

"""GRAFT: gated replacement of answer-failed groups with peer trajectories (Park et al., 2026).

Where the receiver's whole group fails and a peer's group is mixed, the peer's group takes its place: re-tokenised,
weighted by how compatible it is with the receiver, and trained last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from graftrl.errors import DataError
from graftrl.exchange import (
    Rejected,
    compatibility_weights,
    complementary_candidates,
    is_complementary,
    select_complementary,
)
from graftrl.methods.base import (
    Exchange,
    Groups,
    StepContext,
    Transfer,
    by_prompt,
    cut_by_prompt,
    direction_stats,
    own_rows,
    peer_row,
    receiving,
    row_scores,
    transfer_of,
)
from graftrl.methods.grpo import ClipSettings, clip_objective
from graftrl.objective import Objective, group_advantages
from graftrl.rollout import Group, Row, sizes_by_model, successes_by_model
from graftrl.settings import Settings

Selection = dict[str, dict[str, str]]  # receiver -> prompt id -> the source whose group it gets
Origin = tuple[Group, int]  # a response by its group and its index there


class GRAFTSettings(ClipSettings):
    """threshold: delta of the gate.
    weighting: "gate" is the paper's 1[s > delta] * min(s, 1); "no_floor" is min(s, 1); "none" is 1 for every response.
    balanced: as many prompts in each direction; else every candidate of each.
    admit_all_success: peer groups without a failure are candidates too.
    peer_position: where minibatches with grafted prompts stand in the step.
    """

    name: str = "graft"
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
        selected = self.select(groups, context)
        group_of = {(group.model, group.prompt.id): group for of_model in groups.values() for group in of_model}
        exchange = Exchange({})
        for receiver, of_receiver in receiving(groups, context).items():
            rows: list[Row] = []
            peers: list[tuple[Group, list[float]]] = []
            for group in of_receiver:
                source = selected[receiver].get(group.prompt.id)
                if source is None:
                    rows += own_rows(group, context.codecs[receiver], normalize_std=self.settings.normalize_std)
                else:
                    peer = group_of[source, group.prompt.id]
                    kept, advantages = self.combine(group, peer, context)
                    rows += kept
                    peers.append((peer, advantages))
            rows += self._graft(receiver, peers, context, exchange.transfers)
            exchange.rows[receiver] = rows
        self._diagnose(exchange, groups, context)
        return exchange

    def select(self, groups: Groups, context: StepContext) -> Selection:
        """Which: complementary prompts, balanced between the directions."""
        return complementary_selection(
            groups, context, balanced=self.settings.balanced, admit_all_success=self.settings.admit_all_success
        )

    def usable(self, own: Group, successes: int, size: int) -> bool:
        return is_complementary(own.successes, successes, size, admit_all_success=self.settings.admit_all_success)

    def combine(self, own: Group, peer: Group, context: StepContext) -> tuple[list[Row], list[float]]:
        """The receiver's rows that stay (none: the group is replaced) and the advantages of the peer's responses,
        computed over the source's full group before any response is gated or rejected."""
        return [], group_advantages(peer.rewards, normalize_std=self.settings.normalize_std).tolist()

    def transferred(self, peer: Group) -> Iterable[int]:
        """Which responses of a selected peer group travel: all, successes and failures."""
        return range(peer.size)

    def weigh(
        self, scores: NDArray[np.float64], receiver: str, origins: Sequence[Origin], context: StepContext
    ) -> NDArray[np.float64]:
        """How strongly: w of each response from its compatibility; a NaN score weighs 0."""
        if self.settings.weighting == "none":
            return np.where(np.isnan(scores), 0.0, 1.0)
        floor = self.settings.weighting == "gate"
        return compatibility_weights(scores, self.settings.threshold, floor=floor)

    def _graft(
        self,
        receiver: str,
        peers: Sequence[tuple[Group, list[float]]],
        context: StepContext,
        transfers: list[Transfer],
    ) -> list[Row]:
        """The peer groups as rows of the receiver. One scoring pass gives both s and `old_logprobs`."""
        rows: list[Row] = []
        origins: list[Origin] = []
        for group, advantages in peers:
            for index in self.transferred(group):
                advantage = advantages[index]
                row = peer_row(group, index, receiver, context, advantage=advantage, kind="grafted")
                if isinstance(row, Rejected):
                    rejected = transfer_of(receiver, group, index, "rejected", row.reason, advantage=advantage)
                    transfers.append(rejected)
                    continue
                rows.append(row)
                origins.append((group, index))
        receiver_logprobs = context.score(receiver, rows)
        scores = row_scores(rows, receiver_logprobs, [group.responses[index] for group, index in origins])
        weights = self.weigh(scores, receiver, origins, context)
        admitted: list[Row] = []
        for row, (group, index), logprobs, score, weight in zip(
            rows, origins, receiver_logprobs, scores.tolist(), weights.tolist(), strict=True
        ):
            finite = bool(np.isfinite(score)) and bool(np.isfinite(logprobs).all())
            row.old_logprobs, row.weight = logprobs, weight if finite else 0.0
            if row.weight > 0:
                admitted.append(row)
            transfers.append(
                transfer_of(
                    receiver, group, index,
                    "admitted" if row.weight > 0 else "gated",
                    "" if row.weight > 0 else "score" if finite else "not finite",
                    advantage=float(row.advantages),
                    score=score if finite else None,
                    weight=row.weight,
                    receiver_tokens=len(row.response_token_ids),
                )
            )  # fmt: skip
        return admitted

    def order(self, rows: Sequence[Row], minibatch_prompts: int, rng: np.random.Generator) -> list[list[Row]]:
        """Own prompts, then grafted ones, cut into minibatches; the boundary minibatch may hold both."""
        prompts = by_prompt(rows)
        own = [of_prompt for of_prompt in prompts if all(row.kind == "own" for row in of_prompt)]
        grafted = [of_prompt for of_prompt in prompts if any(row.kind != "own" for row in of_prompt)]
        minibatches = cut_by_prompt([row for of_prompt in [*own, *grafted] for row in of_prompt], minibatch_prompts)
        if self.settings.peer_position == "first":
            minibatches.sort(key=lambda minibatch: all(row.kind == "own" for row in minibatch))
        elif self.settings.peer_position == "uniform":
            minibatches = [minibatches[i] for i in rng.permutation(len(minibatches))]
        return minibatches

    def objective(self, minibatch_index: int) -> Objective:
        return self._objective

    def _diagnose(self, exchange: Exchange, groups: Groups, context: StepContext) -> None:
        candidates = complementary_candidates(
            successes_by_model(groups),
            context.group_size,
            admit_all_success=self.settings.admit_all_success,
            seed=context.seed,
            receivers=context.receivers,
            sizes=sizes_by_model(groups),
        )
        found = Counter((source, receiver) for receiver, of in candidates.items() for source, _ in of.values())
        exchange.directions = direction_stats(exchange.transfers, groups, found, context.receivers)
        for direction, stats in exchange.directions.items():
            if stats["admitted_failures"] >= context.group_size and stats["admitted_successes"] == 0:
                exchange.notes.append(
                    f"{direction}: only failed peer responses passed the gate (negative-only transfer). Successes "
                    "score too low for this receiver: responses are short or styles differ; try "
                    "method.weighting=no_floor or a lower method.threshold"
                )


def complementary_selection(
    groups: Groups, context: StepContext, *, balanced: bool = True, admit_all_success: bool = False
) -> Selection:
    """`select_complementary` on a step's groups."""
    return select_complementary(
        successes_by_model(groups),
        context.group_size,
        balanced=balanced,
        admit_all_success=admit_all_success,
        seed=context.seed,
        receivers=None if context.receivers is None else (*context.receivers, *context.elsewhere),
        sizes=sizes_by_model(groups),
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

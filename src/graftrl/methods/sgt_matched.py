"""SGT at SCION's strength: a control that tells more supervision from better chosen supervision.

SGT's choice of prompts and responses, none of SCION's damping or weights by prompt; one strength a per receiver and
step, such that its imitation loss pulls as hard as SCION's would on the same groups. The pull of a loss is the L1 norm
of its gradient with respect to the receiver's logits, summed over the tokens of the step:

    pull = 2 * sum_j weight_j * a_j * mean_t( c_t * (1 - p_t) )

because the derivative of -log p_t by the logits is softmax - onehot, whose L1 norm is 2 * (1 - p_t). Probabilities are
those of the receiver's weights at the start of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from graftrl.methods.base import Exchange, Groups, StepContext, cut_by_prompt, direction_stats
from graftrl.methods.grpo import clip_objective
from graftrl.methods.scion import SCION, SCIONSettings, imitation_term
from graftrl.methods.sgt import SGT, SGTSettings
from graftrl.objective import Objective
from graftrl.rollout import Group, Row
from graftrl.settings import Settings


class SGTMatchedSettings(SCIONSettings):
    """Those of the SCION that is matched."""

    name: str = "sgt-matched"


def pull(rows: Sequence[Row], logprobs: Sequence[NDArray[np.float32]], tau: float) -> float:
    """L1 norm of the gradient of sum_j weight_j * a_j * mean_t(c_t * -log p_t) by the logits, c = min(p / tau, 1).

    Args:
        logprobs: float32 [T] per row.
    """
    total = 0.0
    for row, of_row in zip(rows, logprobs, strict=True):
        p = np.exp(of_row.astype(np.float64))
        c = np.ones_like(p) if tau == 0 else np.minimum(p / tau, 1)
        total += 2 * row.weight * float(np.mean(row.advantages * c * (1 - p)))
    return total


class SGTMatched:
    settings_type: ClassVar[type[Settings]] = SGTMatchedSettings
    fewest_models: ClassVar[int] = 2
    filter: Callable[[Group], bool] | None = None
    sampling_rounds = 1

    def __init__(self, settings: SGTMatchedSettings) -> None:
        self.settings = settings
        self._scion = SCION(settings)
        self._sgt = SGT(SGTSettings(normalize_std=settings.normalize_std))
        own = clip_objective(settings, ("own",))
        undamped = imitation_term(0.0, settings.sft_coefficient)
        self._objective = Objective((*own.terms, undamped), own.needs_reference)

    def exchange(self, groups: Groups, context: StepContext) -> Exchange:
        exchange = self._sgt.exchange(groups, context)
        matched = self._scion.exchange(groups, context)
        for receiver, rows in exchange.rows.items():
            ours = [row for row in rows if row.kind == "sft"]
            theirs = [row for row in matched.rows[receiver] if row.kind == "sft"]
            for row in ours:
                row.advantages = 1.0
            logprobs = context.score(receiver, [*ours, *theirs]) if ours and theirs else []
            wanted = pull(theirs, logprobs[len(ours) :], self.settings.tau) if logprobs else 0.0
            given = pull(ours, logprobs[: len(ours)], 0.0) if logprobs else 0.0
            strength = wanted / given if given > 0 else 0.0
            for row in ours:
                row.advantages = strength
            exchange.transfers = [
                replace(t, advantage=strength) if t.receiver == receiver else t for t in exchange.transfers
            ]
            exchange.diagnostics[receiver] = {"pull": wanted, "strength": strength}
        candidates = {
            (source, receiver): stats["candidates"]
            for direction, stats in exchange.directions.items()
            for source, _, receiver in [direction.partition("->")]
        }
        exchange.directions = direction_stats(exchange.transfers, groups, candidates, context.receivers)
        return exchange

    def usable(self, own: Group, successes: int, size: int) -> bool:
        return self._sgt.usable(own, successes, size)

    def order(self, rows: Sequence[Row], minibatch_prompts: int, rng: np.random.Generator) -> list[list[Row]]:
        return cut_by_prompt(rows, minibatch_prompts)

    def objective(self, minibatch_index: int) -> Objective:
        return self._objective

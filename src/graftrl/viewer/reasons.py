"""Why a receiver's group was or was not exchanged, in words; worked out from the log by the method's own rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from graftrl.errors import ConfigError
from graftrl.exchange import complementary_candidates, select_complementary
from graftrl.methods import build_method
from graftrl.methods.graft import GRAFT
from graftrl.methods.graft_variants import HACPOUpdate, Pooled, RandomPrompts, SGTUpdate
from graftrl.rollout import Group, Prompt, Response
from graftrl.seeds import derive_seed

Outcome = Literal["taken", "refused", "passed", "none"]  # as in index.Query.exchange
Counts = Mapping[str, tuple[int, int]]  # model -> k and n of its group on the prompt
StepCounts = Mapping[str, Mapping[str, tuple[int, int]]]  # model -> prompt id -> k and n, of a whole step


@dataclass(frozen=True)
class Reason:
    outcome: Outcome
    text: str


class Rules:
    """The method of a run, as far as it can be read from the run's config without running code that is not ours."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        settings = config["method"]
        self.name = str(settings.get("name", ""))
        self.seed = int(config.get("seed", 0))
        self.group_size = int((config.get("training") or {}).get("group_size", 2))
        self.receivers = list(config["models"])
        self.stored = dict(config.get("peers") or {})
        self.method: Any = None
        if ":" not in self.name:  # a class of the user's own: its module is not imported for looking at a log
            try:
                self.method = build_method(settings)
            except (ConfigError, ValidationError):  # of another version of graftrl: the log speaks for itself
                self.method = None
        self.usable = lru_cache(maxsize=None)(self._usable)

    def _usable(self, k: int, n: int, k_peer: int, n_peer: int) -> bool:
        """Whether a receiver with k successes of n could use a peer's group with k_peer of n_peer."""
        return self.method is not None and bool(self.method.usable(_group(k, n), k_peer, n_peer))

    # Words -----------------------------------------------------------------------------------------------------------

    def explain(
        self, receiver: str, prompt_id: str, step: int, counts: Counts, moved: Sequence[Mapping[str, Any]],
        of_step: StepCounts,
    ) -> Reason:  # fmt: skip
        """Why the receiver's group on a prompt was or was not exchanged.

        Args:
            counts: of all models that have a group on the prompt. moved: rows of the exchange log for this receiver.
            of_step: of all models on all prompts of the step; read only where balancing has to be explained.
        """
        if moved:
            return self._moved(receiver, moved)
        k, n = counts[receiver]
        peers = {model: of_model for model, of_model in counts.items() if model != receiver}
        own = f"{receiver} {_of(k, n)}"
        others = ", ".join(f"{model} {_of(*of_model)}" for model, of_model in peers.items())
        both = f"{own}, {others}" if others else own
        if self.method is None:
            return Reason("none", f"nothing was transferred ({both} right)")
        if self.method.fewest_models < 2:
            return Reason("none", f"{self.name} exchanges nothing between models ({both} right)")
        if any(self.usable(k, n, *of_model) for of_model in peers.values()):
            return Reason("passed", self._passed(receiver, prompt_id, step, both, of_step))
        if self.stored:
            return Reason("none", f"nothing was transferred ({both} right); stored peers' groups are in their own logs")
        return Reason("none", f"not a candidate: {self._unfit(receiver, k, n, peers, both)}")

    def _moved(self, receiver: str, moved: Sequence[Mapping[str, Any]]) -> Reason:
        sources = ", ".join(dict.fromkeys(row["source"] for row in moved))
        told = ", ".join(f"{count} {status}" for status, count in sorted(Counter(map(self._status, moved)).items()))
        admitted = any(row["status"] == "admitted" for row in moved)
        if not self._replaces:
            return Reason("taken" if admitted else "refused", f"responses of {sources} beside {receiver}'s own: {told}")
        text = f"exchanged: the group of {sources} took the place of {receiver}'s own; {told}"
        if admitted:
            return Reason("taken", text)
        return Reason("refused", f"{text}; so {receiver} learns nothing from this prompt")

    def _status(self, row: Mapping[str, Any]) -> str:
        """A transferred response's fate in words."""
        status, reason = row["status"], row["reason"]
        if reason != "score":
            return f"{status} ({reason})" if reason else str(status)
        settings = None if self.method is None else self.method.settings
        gate = getattr(settings, "threshold", None) if getattr(settings, "weighting", "") == "gate" else None
        return "gated by score" + ("" if gate is None else f" (s not above {gate:g})")

    @property
    def _replaces(self) -> bool:
        return isinstance(self.method, GRAFT) and not isinstance(self.method, Pooled)

    def _unfit(self, receiver: str, k: int, n: int, peers: Counts, both: str) -> str:
        if not peers:
            return "no other model has a group on this prompt"
        if not isinstance(self.method, GRAFT | HACPOUpdate | SGTUpdate):
            return f"{self.name} takes nothing at {both} right"
        if k > 0:
            return f"{receiver} has successes of its own ({_of(k, n)})"
        tried = " and ".join(_no_use(model, *of_model) for model, of_model in peers.items())
        return f"{receiver} has no success ({_of(k, n)}), but {tried}"

    def _passed(self, receiver: str, prompt_id: str, step: int, both: str, of_step: StepCounts) -> str:
        if isinstance(self.method, RandomPrompts):
            return f"not among the prompts that were drawn ({both} right)"
        balanced = isinstance(self.method, GRAFT | HACPOUpdate | SGTUpdate)
        if not balanced or not getattr(self.method.settings, "balanced", True) or self.stored:
            return f"a candidate ({both} right), but nothing was transferred"
        k_of = {model: {q: k for q, (k, _) in of_model.items()} for model, of_model in of_step.items()}
        n_of = {model: {q: n for q, (_, n) in of_model.items()} for model, of_model in of_step.items()}
        options: dict[str, Any] = {
            "admit_all_success": getattr(self.method.settings, "admit_all_success", False),
            "seed": derive_seed(self.seed, "exchange", step),
            "receivers": [model for model in self.receivers if model in k_of],
            "sizes": n_of,
        }
        candidates = complementary_candidates(k_of, self.group_size, **options)
        kept = select_complementary(k_of, self.group_size, **options)[receiver]
        if prompt_id in kept or prompt_id not in candidates[receiver]:
            return f"a candidate ({both} right), but nothing was transferred"
        numbers = {model: len(found) for model, found in candidates.items()}
        fewest = min(numbers, key=lambda model: numbers[model])
        many = f"{numbers[receiver]} {'candidate' if numbers[receiver] == 1 else 'candidates'}"
        has = f"{receiver} has {many} in this step and {fewest} has {numbers[fewest]}"
        if not kept:
            return f"a candidate ({both} right), dropped by balancing: {has}, so nobody receives anything"
        ties = f" ({len(kept)} with ties)" if len(kept) > numbers[fewest] else ""
        solved = [
            (k / n_of[source][q], k, n_of[source][q]) for q, (source, k) in candidates[receiver].items() if q in kept
        ]
        return (
            f"a candidate ({both} right), dropped by balancing: {has}, so {receiver} keeps the {numbers[fewest]}{ties} "
            f"that its peer solves most often; the last of them {_of(*min(solved)[1:])}"
        )


def _no_use(peer: str, k: int, n: int) -> str:
    return f"{peer} has none either" if k == 0 else f"{peer} is always right ({_of(k, n)}): no contrast to learn from"


def _of(k: int, n: int) -> str:
    return f"{k} of {n}"


def _group(k: int, n: int) -> Group:
    """A group of which only the successes matter."""
    ids, logprobs = np.empty(0, np.int64), np.empty(0, np.float32)
    responses = [Response("", ids, logprobs, "stop", 1.0 if index < k else 0.0) for index in range(n)]
    return Group("", Prompt("", (), "", ""), responses)

"""What rollouts of several models on the same prompts say about an exchange: pure functions of counts and scores."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graftrl.evaluation import pass_at_k
from graftrl.evaluation.intervals import Estimate, bootstrap_interval, wilson_interval
from graftrl.evaluation.passk import powers_up_to
from graftrl.exchange import all_fail_overlap, compatibility_weights, select_complementary
from graftrl.exchange.selection import Q
from graftrl.methods.base import SCORE_BINS
from graftrl.seeds import generator

Successes = Mapping[str, Mapping[Q, int]]  # model -> prompt -> k; every model has the same prompts
Floats = NDArray[np.float64]

_RESAMPLED = 8_000_000  # problems drawn by a bootstrap at most, which bounds its memory
_STEPS = 300  # steps drawn to see how many prompts a step exchanges


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One model on the probed prompts.

    pass_at: `{k: estimate}` for k = 1, 2, 4, ... and n, with the unbiased estimator; intervals over prompts.
    all_fail, mixed, all_success: shares of prompts by their number of successes: 0, between, n.
    tokens_*: response lengths, EOS included. truncated: share of responses cut at the limit.
    """

    prompts: int
    pass_at: dict[int, Estimate]
    all_fail: float
    mixed: float
    all_success: float
    tokens_mean: float
    tokens_median: float
    tokens_p95: float
    truncated: float


@dataclass(frozen=True, slots=True)
class PerStep:
    """Prompts that a step of `prompts` would exchange in one direction: means, and the middle 95 % of single steps."""

    prompts: int
    candidates: Estimate
    selected: Estimate


@dataclass(frozen=True, slots=True)
class PeerResponses:
    """The peer responses of one direction's candidate groups, as the receiver sees them.

    scores: float64 [R], s; NaN where the response was rejected or a log-probability was not finite.
    right: bool [R], reward 1. groups: int64 [R], which group a response belongs to.
    rejected: responses that cannot be put into the receiver's tokens, by reason.
    """

    scores: Floats
    right: NDArray[np.bool_]
    groups: NDArray[np.int64]
    rejected: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Admission:
    """What the gate lets pass at one threshold delta. Shares are of all responses of the kind, rejected ones included;
    None without any. groups: those with at least one admitted success."""

    threshold: float
    successes: int
    failures: int
    success_share: float | None
    failure_share: float | None
    groups: int

    @property
    def negative_only(self) -> bool:
        """Failures pass and successes hardly do: the receiver would mostly be pushed away from what the peer does."""
        successes, failures = self.success_share or 0.0, self.failure_share or 0.0
        return failures > 0 and successes < failures / 2


@dataclass(frozen=True, slots=True)
class Compatibility:
    """s of the candidate groups' responses. quantiles: the 10th, 50th and 90th percentile, None without a score.
    histogram: counts in `bins`; the last bin also holds what lies above."""

    groups: int
    successes: int
    failures: int
    rejected: dict[str, int]
    not_finite: int
    success_quantiles: tuple[float, float, float] | None
    failure_quantiles: tuple[float, float, float] | None
    bins: list[float]
    success_histogram: list[int]
    failure_histogram: list[int]
    admission: list[Admission]

    @property
    def unusable(self) -> dict[str, int]:
        """Responses without a score, by reason."""
        return {**self.rejected, **({"log-probability not finite": self.not_finite} if self.not_finite else {})}

    def at(self, threshold: float) -> Admission:
        """Raises KeyError for a threshold that was not swept."""
        found = next((admission for admission in self.admission if admission.threshold == threshold), None)
        if found is None:
            raise KeyError(f"threshold {threshold} was not swept")
        return found


@dataclass(frozen=True, slots=True)
class Direction:
    """What one model (source) has for another (receiver).

    all_fail: prompts that the receiver fails entirely. solved: of these, those that the source solves at least once.
    always_solved: of these, those that it solves every time: without contrast in reward, GRAFT leaves them out.
    candidates, selected: groups that GRAFT would exchange among all probed prompts, before and after balancing.
    compatibility: None where s is not known, or there is no candidate.
    """

    source: str
    receiver: str
    all_fail: int
    solved: int
    solved_share: Estimate | None
    always_solved: int
    candidates: int
    selected: int
    per_step: list[PerStep]
    compatibility: Compatibility | None

    @property
    def name(self) -> str:
        return f"{self.source}->{self.receiver}"


# Models ---------------------------------------------------------------------------------------------------------------


def estimate_mean(values: Sequence[float]) -> Estimate:
    """Mean over prompts with its percentile bootstrap interval; raises ValueError without a value."""
    resamples = max(200, min(2000, _RESAMPLED // max(len(values), 1)))
    return Estimate(*bootstrap_interval(values, resamples=resamples))


def estimate_share(part: int, whole: int) -> Estimate | None:
    """A share with its Wilson interval; None of nothing."""
    return Estimate(*wilson_interval(part, whole)) if whole else None


def pass_estimates(successes: Sequence[int], n: int) -> dict[int, Estimate]:
    """pass@k over prompts, for k = 1, 2, 4, ... and n.

    Args:
        successes: right responses among n, one count a prompt.
    """
    estimates = {}
    for k in powers_up_to(n):
        of_count = [pass_at_k(n, c, k) for c in range(n + 1)]
        estimates[k] = estimate_mean([of_count[c] for c in successes])
    return estimates


def summarize_model(
    successes: Sequence[int], n: int, tokens: NDArray[np.int64], truncated: NDArray[np.bool_]
) -> ModelSummary:
    """Args:
    successes: right responses among n, one count a prompt.
    tokens, truncated: [responses], lengths in the model's own tokens; cut at the limit.
    """
    counts = np.asarray(successes)
    return ModelSummary(
        prompts=len(counts),
        pass_at=pass_estimates(successes, n),
        all_fail=float((counts == 0).mean()),
        mixed=float(((counts > 0) & (counts < n)).mean()),
        all_success=float((counts == n).mean()),
        tokens_mean=float(tokens.mean()),
        tokens_median=float(np.median(tokens)),
        tokens_p95=float(np.quantile(tokens, 0.95)),
        truncated=float(truncated.mean()),
    )


# Exchange -------------------------------------------------------------------------------------------------------------


def winnable(successes: Successes[Q]) -> dict[str, int]:
    """`{receiver: prompts}` that the model fails entirely and at least one other solves at least once."""
    return {
        receiver: sum(
            k == 0 and any(successes[source][q] > 0 for source in successes if source != receiver)
            for q, k in of_receiver.items()
        )
        for receiver, of_receiver in successes.items()
    }


def joint_counts(first: Mapping[Q, int], second: Mapping[Q, int], n: int) -> NDArray[np.int64]:
    """int64 [n + 1, n + 1]: prompts by the first model's successes (row) and the second's (column)."""
    table = np.zeros((n + 1, n + 1), dtype=np.int64)
    for q, k in first.items():
        table[k, second[q]] += 1
    return table


def exchanged(successes: Successes[Q], n: int, *, balanced: bool, seed: int) -> dict[tuple[str, str], int]:
    """`{(source, receiver): groups}` that GRAFT would exchange; pairs without any are missing."""
    found: dict[tuple[str, str], int] = {}
    for receiver, of_receiver in select_complementary(successes, n, balanced=balanced, seed=seed).items():
        for source in of_receiver.values():
            found[source, receiver] = found.get((source, receiver), 0) + 1
    return found


def per_step(successes: Successes[Q], n: int, prompts: int, seed: int) -> dict[tuple[str, str], PerStep]:
    """What single steps would exchange: steps are drawn with replacement from the probed prompts.

    Balancing takes a minimum over directions and ties at the boundary, so a step's count is not its share of the whole:
    the selection rule is applied to each drawn step.

    Args:
        prompts: in a step.
    """
    models = list(successes)
    counts = np.array([list(of_model.values()) for of_model in successes.values()])
    rng = generator(seed, "probe steps", prompts)
    pairs = list(itertools.permutations(models, 2))
    found: dict[bool, list[list[int]]] = {False: [], True: []}
    for _ in range(_STEPS):
        drawn = rng.integers(counts.shape[1], size=prompts)
        step = {
            model: dict(enumerate(of_model[drawn].tolist())) for model, of_model in zip(models, counts, strict=True)
        }
        for balanced, steps in found.items():
            moved = exchanged(step, n, balanced=balanced, seed=seed)
            steps.append([moved.get(pair, 0) for pair in pairs])
    candidates, selected = (np.array(found[balanced], dtype=np.float64) for balanced in (False, True))
    return {pair: PerStep(prompts, _middle(candidates[:, i]), _middle(selected[:, i])) for i, pair in enumerate(pairs)}


def _middle(values: Floats) -> Estimate:
    low, high = np.quantile(values, [0.025, 0.975])
    return Estimate(float(values.mean()), float(low), float(high))


def directions(
    successes: Successes[Q],
    n: int,
    step_sizes: Sequence[int],
    scored: Mapping[tuple[str, str], PeerResponses] | None,
    thresholds: Sequence[float],
    seed: int,
) -> list[Direction]:
    """Every ordered pair of models, in the models' order.

    Args:
        successes: `{model: {prompt: k}}`, the same prompts for all.
        n: responses per prompt.
        step_sizes: prompts a step, each of which is estimated.
        scored: per (source, receiver); a missing pair has no candidates. None: s is not known.
    """
    overlap = all_fail_overlap(successes)
    candidates = exchanged(successes, n, balanced=False, seed=seed)
    selected = exchanged(successes, n, balanced=True, seed=seed)
    steps = [per_step(successes, n, size, seed) for size in step_sizes]
    found = []
    for source, receiver in itertools.permutations(successes, 2):
        failed = [q for q, k in successes[receiver].items() if k == 0]
        solved = round((overlap[f"{source}->{receiver}"]["solved_by_peer"] or 0.0) * len(failed))
        responses = None if scored is None else scored.get((source, receiver))
        found.append(
            Direction(
                source=source,
                receiver=receiver,
                all_fail=len(failed),
                solved=solved,
                solved_share=estimate_share(solved, len(failed)),
                always_solved=sum(successes[source][q] == n for q in failed),
                candidates=candidates.get((source, receiver), 0),
                selected=selected.get((source, receiver), 0),
                per_step=[of_size[source, receiver] for of_size in steps],
                compatibility=None if responses is None else compatibility(responses, thresholds),
            )
        )
    return found


# Compatibility --------------------------------------------------------------------------------------------------------


def admit(responses: PeerResponses, threshold: float) -> Admission:
    """GRAFT's gate at one threshold: admitted iff s > delta."""
    passed = compatibility_weights(responses.scores, threshold) > 0
    right = responses.right
    successes, failures = int((passed & right).sum()), int((passed & ~right).sum())
    return Admission(
        threshold=threshold,
        successes=successes,
        failures=failures,
        success_share=successes / int(right.sum()) if right.any() else None,
        failure_share=failures / int((~right).sum()) if not right.all() else None,
        groups=len(np.unique(responses.groups[passed & right])),
    )


def compatibility(responses: PeerResponses, thresholds: Sequence[float]) -> Compatibility:
    """Summary of one direction's scored responses."""
    right, finite = responses.right, np.isfinite(responses.scores)
    return Compatibility(
        groups=len(np.unique(responses.groups)),
        successes=int(right.sum()),
        failures=int((~right).sum()),
        rejected=dict(responses.rejected),
        not_finite=int((~finite).sum()) - sum(responses.rejected.values()),
        success_quantiles=_quantiles(responses.scores[right & finite]),
        failure_quantiles=_quantiles(responses.scores[~right & finite]),
        bins=SCORE_BINS,
        success_histogram=_histogram(responses.scores[right & finite]),
        failure_histogram=_histogram(responses.scores[~right & finite]),
        admission=[admit(responses, threshold) for threshold in thresholds],
    )


def _quantiles(scores: Floats) -> tuple[float, float, float] | None:
    if len(scores) == 0:
        return None
    low, middle, high = np.quantile(scores, [0.1, 0.5, 0.9]).tolist()
    return low, middle, high


def _histogram(scores: Floats) -> list[int]:
    counts: list[int] = np.histogram(np.minimum(scores, SCORE_BINS[-1]), bins=SCORE_BINS)[0].tolist()
    return counts

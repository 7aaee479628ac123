"""Time of selecting among and weighing one million responses; run as `python benchmarks/selection.py`.

Two models answer the same prompts 8 times each, a million responses per model at the largest size. Counts are drawn
from a shared difficulty per prompt, so that many groups fail entirely. All responses of one model are weighed: as many
ragged float32 rows on the receiver's side as on the source's.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from graftrl.exchange import compatibility_scores, compatibility_weights, select_complementary

GROUP_SIZE = 8
RESPONSES = (250_000, 500_000, 1_000_000)

Rows = list[NDArray[np.float32]]


def success_counts(responses: int, rng: np.random.Generator) -> dict[str, dict[str, int]]:
    """`{model: {prompt_id: k}}` of two models with `responses` each."""
    prompts = responses // GROUP_SIZE
    rates = rng.beta(0.4, 0.8, size=prompts)
    ids = [f"math/{i:06d}" for i in range(prompts)]
    return {
        model: dict(zip(ids, rng.binomial(GROUP_SIZE, rates).tolist(), strict=True)) for model in ("large", "small")
    }


def logprob_rows(responses: int, rng: np.random.Generator) -> Rows:
    """Rows of 20 to 60 log-probabilities, mostly near 0 as sampled tokens are."""
    lengths = rng.integers(20, 61, size=responses)
    tokens = -rng.exponential(0.4, size=int(lengths.sum())).astype(np.float32)
    return np.split(tokens, np.cumsum(lengths)[:-1])


def time_of(responses: int, *, repeats: int = 3, seed: int = 0) -> tuple[float, float]:
    """Seconds of selection and of scores with weights, each the best of `repeats`: other load only ever adds."""
    rng = np.random.default_rng(seed)
    successes = success_counts(responses, rng)
    receiver, source = logprob_rows(responses, rng), logprob_rows(responses, rng)
    select_seconds, weigh_seconds = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        selected = select_complementary(successes, GROUP_SIZE)
        middle = time.perf_counter()
        weights = compatibility_weights(compatibility_scores(receiver, source))
        end = time.perf_counter()
        select_seconds.append(middle - start)
        weigh_seconds.append(end - middle)
        if not all(selected.values()) or not 0 < np.count_nonzero(weights) < responses:
            raise RuntimeError("nothing selected, or all or none admitted: the data do not exercise the functions")
    return min(select_seconds), min(weigh_seconds)


def timings() -> dict[int, tuple[float, float]]:
    time_of(10_000)  # imports and allocator are warm before the first measured size
    return {responses: time_of(responses) for responses in RESPONSES}


def growth_exponent(by_size: dict[int, tuple[float, float]]) -> float:
    """Slope of log time over log size: 1 is linear."""
    seconds = [sum(parts) for parts in by_size.values()]
    return float(np.polyfit(np.log(list(by_size)), np.log(seconds), 1)[0])


def summary(by_size: dict[int, tuple[float, float]]) -> dict[str, float]:
    select, weigh = by_size[1_000_000]
    return {
        "select_1m_seconds": select + weigh,  # the key's name is short for selection and weighing
        "selection_alone_1m_seconds": select,
        "weighing_alone_1m_seconds": weigh,
        "growth_exponent": growth_exponent(by_size),
    }


def measure() -> dict[str, float]:
    return summary(timings())


def main() -> None:
    by_size = timings()
    print(f"{'responses':>10} {'select s':>9} {'weigh s':>9} {'total s':>9}")
    for responses, (select, weigh) in by_size.items():
        print(f"{responses:>10,} {select:>9.3f} {weigh:>9.3f} {select + weigh:>9.3f}")
    print(f"growth exponent {growth_exponent(by_size):.2f} (1 is linear)")


if __name__ == "__main__":
    main()

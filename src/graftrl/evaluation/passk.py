"""pass@k with the unbiased estimator of Chen et al. (2021, "Evaluating Large Language Models Trained on Code")."""

from __future__ import annotations

import itertools
from math import comb


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k responses, drawn without replacement from n of which c are right, is right.

    1 - C(n - c, k) / C(n, k), in exact integers.

    Raises:
        ValueError: not 0 <= c <= n, or not 1 <= k <= n (the estimator needs at least k samples).
    """
    if not 0 <= c <= n:
        raise ValueError(f"c = {c} right answers among n = {n} samples")
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} needs between 1 and n = {n}: draw at least k samples per problem")
    return 1.0 - comb(n - c, k) / comb(n, k)


def powers_up_to(n: int) -> list[int]:
    """1, 2, 4, ... below n, and n."""
    return [*itertools.takewhile(lambda k: k < n, (2**i for i in range(n))), n]

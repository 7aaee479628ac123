"""Which rank passes which rows of a minibatch. Every rank works it out from the same lengths, so nobody has to tell."""

from __future__ import annotations

from collections.abc import Sequence

from graftrl.policies.microbatch import cut
from graftrl.policies.ranks import Microbatch


def spread(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of each rank's rows, with near-equal sums of lengths.

    The longest row goes first, each to the rank with the fewest tokens so far (Graham, 1969: no rank exceeds 4/3 of the
    best possible maximum). Ties go to the lowest rank. A rank's indices ascend.
    """
    rows: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(ranks), key=lambda r: (tokens[r], r))
        rows[rank].append(index)
        tokens[rank] += lengths[index]
    return [sorted(of_rank) for of_rank in rows]


def deal(lengths: Sequence[int], ranks: int, max_tokens: int) -> list[list[Microbatch]]:
    """Every rank's microbatches: as many for each, since a pass over sharded weights is one that all ranks make.

    A rank with fewer of its own passes the shortest row of all again, which does not count.
    """
    if not lengths:
        return [[] for _ in range(ranks)]
    shortest = min(range(len(lengths)), key=lambda i: (lengths[i], i))
    dealt = []
    for of_rank in spread(lengths, ranks):
        batches = cut([lengths[i] for i in of_rank], max_tokens)
        dealt.append([Microbatch([of_rank[j] for j in batch]) for batch in batches])
    most = max(len(batches) for batches in dealt)
    return [[*batches, *[Microbatch([shortest], counts=False)] * (most - len(batches))] for batches in dealt]

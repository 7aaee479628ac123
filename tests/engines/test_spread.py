"""Rows over ranks: near-equal tokens, every row once, as many passes for each."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftrl.engines.ray.spread import deal, spread
from graftrl.policies.ranks import Microbatch

LENGTHS = st.lists(st.integers(1, 200), max_size=40)


def test_the_longest_rows_go_first_each_to_the_emptiest_rank():
    # 9 -> 0, 8 -> 1, 5 -> 1 (8 < 9), 4 -> 0 (9 < 13), 1 -> 0 (a tie of 13)
    assert spread([5, 9, 1, 8, 4], 2) == [[1, 2, 4], [0, 3]]


@given(LENGTHS, st.integers(1, 6))
def test_every_row_has_one_rank_and_no_rank_is_far_above_the_others(lengths, ranks):
    dealt = spread(lengths, ranks)
    assert sorted(itertools.chain.from_iterable(dealt)) == list(range(len(lengths)))
    tokens = [sum(lengths[i] for i in of_rank) for of_rank in dealt]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7))
def test_no_rank_exceeds_four_thirds_of_the_best_split(lengths):
    best = min(
        max(sum(x for x, rank in zip(lengths, ranks, strict=True) if rank == r) for r in (0, 1))
        for ranks in itertools.product((0, 1), repeat=len(lengths))
    )
    assert max(sum(lengths[i] for i in of_rank) for of_rank in spread(lengths, 2)) <= 4 / 3 * best


@given(LENGTHS, st.integers(1, 5), st.integers(1, 300))
def test_all_ranks_make_as_many_passes_and_each_row_counts_once(lengths, ranks, max_tokens):
    dealt = deal(lengths, ranks, max_tokens)
    assert len(dealt) == ranks and len({len(batches) for batches in dealt}) == 1
    counted = [i for batches in dealt for batch in batches if batch.counts for i in batch.rows]
    assert sorted(counted) == list(range(len(lengths)))
    for batch in itertools.chain.from_iterable(dealt):
        longest = max(lengths[i] for i in batch.rows)
        assert len(batch.rows) == 1 or len(batch.rows) * longest <= max_tokens


def test_a_rank_without_rows_of_its_own_passes_the_shortest_one_again():
    assert deal([7, 3, 3, 3], 2, 3) == [
        [Microbatch([0]), Microbatch([1], counts=False), Microbatch([1], counts=False)],
        [Microbatch([1]), Microbatch([2]), Microbatch([3])],
    ]
    assert deal([5], 3, 10) == [[Microbatch([0])], [Microbatch([0], counts=False)], [Microbatch([0], counts=False)]]


@pytest.mark.parametrize("ranks", [1, 4])
def test_no_rows_no_passes(ranks):
    assert deal([], ranks, 10) == [[]] * ranks

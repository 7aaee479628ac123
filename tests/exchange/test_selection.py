"""Complementary selection with balanced exchange against direct transcriptions of its rule."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftrl.exchange import all_fail_overlap, complementary_candidates, select_complementary


@st.composite
def tables(draw, fewest=2, most=4):
    """(successes, group size): prompts may be missing from a model, failed groups are common."""
    n = draw(st.integers(2, 8))
    prompts = st.sampled_from([f"q{i}" for i in range(12)])
    counts = st.dictionaries(prompts, st.just(0) | st.integers(0, n))
    return {name: draw(counts) for name in "ABCD"[: draw(st.integers(fewest, most))]}, n


options = st.fixed_dictionaries({"admit_all_success": st.booleans(), "seed": st.integers(0, 5)})


def reference_candidates(successes, n, admit_all_success=False):
    """{receiver: {prompt: (admissible sources, their k)}} by enumerating every receiver, prompt and source."""
    result = {receiver: {} for receiver in successes}
    for receiver in successes:
        for q in {q for counts in successes.values() for q in counts}:
            if successes[receiver].get(q) != 0:
                continue
            usable = {}
            for source in set(successes) - {receiver}:
                k = successes[source].get(q)
                if k is not None and k >= 1 and (k < n or admit_all_success):
                    usable[source] = k
            if usable:
                top = max(usable.values())
                result[receiver][q] = ({source for source, k in usable.items() if k == top}, top)
    return result


def first_with_ties(counts, m):
    """The m prompts of the largest counts and everything that ties with the m-th, by counting who beats whom."""
    return {q for q, k in counts.items() if sum(other > k for other in counts.values()) < m}


def balanced_pair(k_a, k_b, n):
    """The balanced rule of two models as written: rank by the source's successes, first m and ties with the m-th."""
    a_to_b = [q for q in k_a if k_b.get(q) == 0 and 1 <= k_a[q] < n]
    b_to_a = [q for q in k_b if k_a.get(q) == 0 and 1 <= k_b[q] < n]
    m = min(len(a_to_b), len(b_to_a))
    kept = []
    for candidates, k in ((a_to_b, k_a), (b_to_a, k_b)):
        ranked = sorted(candidates, key=lambda q, k=k: -k[q])
        kept.append({q for q in ranked if m > 0 and k[q] >= k[ranked[m - 1]]})
    return {"A": dict.fromkeys(kept[1], "B"), "B": dict.fromkeys(kept[0], "A")}


# Against references


@given(tables(most=2))
def test_two_models_follow_the_balanced_rule_as_written(table):
    successes, n = table
    assert select_complementary(successes, n) == balanced_pair(successes["A"], successes["B"], n)


@given(tables(fewest=3), options)
def test_several_models_follow_the_rule_by_enumeration(table, option):
    successes, n = table
    candidates = reference_candidates(successes, n, option["admit_all_success"])
    m = min(len(found) for found in candidates.values())
    selected = select_complementary(successes, n, **option)
    for receiver, found in candidates.items():
        assert set(selected[receiver]) == first_with_ties({q: k for q, (_, k) in found.items()}, m)
        assert all(source in found[q][0] for q, source in selected[receiver].items())


@given(tables(), options)
def test_candidates_carry_the_best_peer_and_its_successes(table, option):
    successes, n = table
    candidates = complementary_candidates(successes, n, **option)
    expected = reference_candidates(successes, n, option["admit_all_success"])
    assert list(candidates) == list(successes)
    for receiver, found in candidates.items():
        assert list(found) == [q for q in successes[receiver] if q in expected[receiver]]  # the receiver's order
        for q, (source, k) in found.items():
            sources, top = expected[receiver][q]
            assert source in sources
            assert k == top == successes[source][q]


# The rule on examples


def test_all_ties_at_the_boundary_are_kept():
    a = dict(zip(["q0", "q1", "q2", "q3", "q4", "q5", "q6"], [7, 5, 5, 5, 2, 0, 0], strict=True))
    b = dict(zip(["q0", "q1", "q2", "q3", "q4", "q5", "q6"], [0, 0, 0, 0, 0, 4, 1], strict=True))
    selected = select_complementary({"A": a, "B": b}, 8)
    assert selected == {"A": {"q5": "B", "q6": "B"}, "B": dict.fromkeys(["q0", "q1", "q2", "q3"], "A")}


def test_only_failed_groups_receive_and_only_mixed_groups_give():
    a = {"both fail": 0, "solved by peer": 0, "mixed": 0, "own success": 1, "peer missing": 0, "gives": 3}
    b = {"both fail": 0, "solved by peer": 4, "mixed": 2, "own success": 3, "own missing": 3, "gives": 0}
    selected = select_complementary({"A": a, "B": b}, 4)
    assert selected == {"A": {"mixed": "B"}, "B": {"gives": "A"}}


def test_nobody_receives_when_one_direction_has_no_candidate():
    successes = {
        "A": {"q0": 0, "q1": 0, "q2": 3},
        "B": {"q0": 2, "q1": 5, "q2": 0},
        "C": {"q0": 1, "q1": 8, "q2": 4},
    }
    assert select_complementary(successes, 8) == {"A": {}, "B": {}, "C": {}}
    every = select_complementary(successes, 8, balanced=False)
    assert every == {"A": {"q0": "B", "q1": "B"}, "B": {"q2": "C"}, "C": {}}


def test_solved_peer_groups_travel_only_on_request():
    successes = {"A": {"q0": 0, "q1": 8}, "B": {"q0": 8, "q1": 0}}
    assert select_complementary(successes, 8) == {"A": {}, "B": {}}
    assert select_complementary(successes, 8, admit_all_success=True) == {"A": {"q0": "B"}, "B": {"q1": "A"}}


def test_a_model_alone_or_no_model_receives_nothing():
    assert select_complementary({"A": {"q0": 0}}, 8) == {"A": {}}
    assert select_complementary({}, 8) == {}


# Invariants


@given(tables(), options)
def test_unbalanced_selection_is_every_candidate_and_holds_the_balanced_one(table, option):
    successes, n = table
    everything = select_complementary(successes, n, balanced=False, **option)
    candidates = complementary_candidates(successes, n, **option)
    assert everything == {r: {q: source for q, (source, _) in found.items()} for r, found in candidates.items()}
    for receiver, chosen in select_complementary(successes, n, **option).items():
        assert chosen.items() <= everything[receiver].items()


@given(tables(), options)
def test_selected_receivers_failed_and_selected_sources_did_not(table, option):
    successes, n = table
    for receiver, chosen in select_complementary(successes, n, **option).items():
        for q, source in chosen.items():
            assert source != receiver
            assert successes[receiver][q] == 0
            assert 1 <= successes[source][q] <= n - (not option["admit_all_success"])


@given(tables(), options)
def test_every_direction_gets_the_same_number_up_to_ties_at_the_boundary(table, option):
    successes, n = table
    candidates = complementary_candidates(successes, n, **option)
    m = min(len(found) for found in candidates.values())
    for receiver, chosen in select_complementary(successes, n, **option).items():
        counts = sorted((candidates[receiver][q][1] for q in chosen), reverse=True)
        assert (len(counts) == 0) == (m == 0)
        assert len(counts) >= m
        assert sum(k > counts[-1] for k in counts) < m or m == 0


@given(tables(), options)
def test_admitting_solved_groups_only_adds_candidates(table, option):
    successes, n = table
    strict = complementary_candidates(successes, n, seed=option["seed"])
    wide = complementary_candidates(successes, n, admit_all_success=True, seed=option["seed"])
    for receiver in successes:
        assert strict[receiver].keys() <= wide[receiver].keys()
        assert all(wide[receiver][q][1] == n for q in wide[receiver].keys() - strict[receiver].keys())


@given(tables(), options, st.booleans(), st.randoms(use_true_random=False))
def test_order_of_models_and_prompts_changes_nothing(table, option, balanced, rng):
    successes, n = table
    shuffled = {}
    for name in rng.sample(list(successes), len(successes)):
        prompts = rng.sample(list(successes[name]), len(successes[name]))
        shuffled[name] = {q: successes[name][q] for q in prompts}
    assert select_complementary(shuffled, n, balanced=balanced, **option) == select_complementary(
        successes, n, balanced=balanced, **option
    )


# The draw between equally successful peers


def tied_sources(prompts, seed):
    """Source of each prompt for a receiver with three equally successful peers."""
    peers = {name: dict.fromkeys(prompts, 3) for name in ("B", "C", "D")}
    return select_complementary({"A": dict.fromkeys(prompts, 0), **peers}, 8, balanced=False, seed=seed)["A"]


def test_tie_between_peers_is_drawn_by_the_seed():
    prompts = [f"q{i}" for i in range(50)]
    assert tied_sources(prompts, 1) == tied_sources(prompts, 1)
    assert tied_sources(prompts, 1) != tied_sources(prompts, 2)


def test_tie_draw_of_a_prompt_does_not_depend_on_the_rest_of_the_batch():
    prompts = [f"q{i}" for i in range(50)]
    whole = tied_sources(prompts, 1)
    part = tied_sources(prompts[::3], 1)
    assert part.items() <= whole.items()


def test_tied_peers_are_drawn_about_equally_often():
    prompts = list(range(3000))
    drawn = Counter(tied_sources(prompts, 0).values())
    assert set(drawn) == {"B", "C", "D"}
    assert all(abs(count - 1000) < 5 * (3000 * (1 / 3) * (2 / 3)) ** 0.5 for count in drawn.values())


# Peers that only give, and groups of unequal size


@given(tables(), options, st.booleans())
def test_naming_every_model_a_receiver_changes_nothing(table, option, balanced):
    successes, n = table
    assert select_complementary(
        successes, n, balanced=balanced, receivers=list(successes), **option
    ) == select_complementary(successes, n, balanced=balanced, **option)


@given(tables(), options)
def test_a_single_receiver_keeps_all_candidates(table, option):
    successes, n = table
    only = select_complementary(successes, n, receivers=["A"], **option)
    everything = select_complementary(successes, n, balanced=False, **option)
    assert only == {"A": everything["A"]}


@given(tables(fewest=3), options)
def test_balance_counts_receivers_alone(table, option):
    successes, n = table
    candidates = reference_candidates(successes, n, option["admit_all_success"])
    m = min(len(candidates[receiver]) for receiver in "AB")
    selected = select_complementary(successes, n, receivers=("A", "B"), **option)
    assert list(selected) == ["A", "B"]
    for receiver in "AB":
        counts = {q: k for q, (_, k) in candidates[receiver].items()}
        assert set(selected[receiver]) == first_with_ties(counts, m)


@given(tables(), options, st.booleans())
def test_sizes_that_equal_the_group_size_change_nothing(table, option, balanced):
    successes, n = table
    sizes = {model: dict.fromkeys(counts, n) for model, counts in successes.items()}
    assert select_complementary(successes, n, balanced=balanced, sizes=sizes, **option) == select_complementary(
        successes, n, balanced=balanced, **option
    )


def test_a_stored_group_is_mixed_by_its_own_size():
    successes = {"A": {"q0": 0, "q1": 0, "q2": 0, "q3": 0}, "B": {"q0": 4, "q1": 9, "q2": 16, "q3": 1}}
    sizes = {"B": {"q0": 4, "q1": 16, "q2": 16, "q3": 1}}  # the receiver's groups have 8
    assert complementary_candidates(successes, 8, receivers=["A"], sizes=sizes) == {"A": {"q1": ("B", 9)}}
    every = complementary_candidates(successes, 8, receivers=["A"], sizes=sizes, admit_all_success=True)
    assert every["A"] == {"q0": ("B", 4), "q1": ("B", 9), "q2": ("B", 16)}  # one response has no contrast at any k


def test_groups_of_unequal_size_are_ranked_by_success_rate():
    successes = {"A": {"q0": 0, "q1": 0, "q2": 0, "q3": 2}, "B": {"q0": 3, "q1": 2, "q2": 2, "q3": 0}, "C": {"q0": 4}}
    sizes = {"B": {"q0": 8, "q1": 4, "q2": 8, "q3": 8}, "C": {"q0": 16}}
    candidates = complementary_candidates(successes, 8, sizes=sizes)
    assert candidates["A"]["q0"] == ("B", 3)  # 3 of 8 beat 4 of 16
    selected = select_complementary(successes, 8, receivers=["A", "B"], sizes=sizes)
    assert selected == {"A": {"q1": "B"}, "B": {"q3": "A"}}  # m = 1: 2 of 4 beat 3 of 8


def test_equal_rates_of_unequal_groups_tie():
    successes = {"A": {"q0": 0, "q1": 0, "q2": 1}, "B": {"q0": 1, "q1": 3, "q2": 0}}
    sizes = {"B": {"q0": 3, "q1": 9}}  # 1/3 and 3/9
    assert select_complementary(successes, 8, sizes=sizes)["A"] == {"q0": "B", "q1": "B"}


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_a_rate_does_not_depend_on_how_often_a_group_is_counted(k, n, times):
    k, n = min(k, n), max(k, n) + 1
    successes = {"A": {"q0": 0, "q1": 0, "q2": 1}, "B": {"q0": k, "q1": k * times, "q2": 0}}
    sizes = {"B": {"q0": n, "q1": n * times}}
    assert select_complementary(successes, 8, sizes=sizes)["A"] == {"q0": "B", "q1": "B"}


# Refusals


@pytest.mark.parametrize("k", [-1, 9])
def test_count_outside_the_group_is_refused_with_its_place(k):
    with pytest.raises(ValueError, match=rf"'B', prompt 'q1': {k} successes in a group of 8"):
        select_complementary({"A": {"q0": 0}, "B": {"q0": 1, "q1": k}}, 8)


@pytest.mark.parametrize("group_size", [1, 0, -3])
def test_group_without_a_possible_contrast_is_refused(group_size):
    with pytest.raises(ValueError, match="at least 2 responses"):
        select_complementary({"A": {}, "B": {}}, group_size)


def test_a_count_beyond_a_stored_groups_own_size_is_refused():
    with pytest.raises(ValueError, match="'B', prompt 'q0': 5 successes in a group of 4"):
        select_complementary({"A": {"q0": 0}, "B": {"q0": 5}}, 8, receivers=["A"], sizes={"B": {"q0": 4}})


def test_overlap_of_receivers_counts_peers_that_only_give():
    successes = {"A": {"q0": 0, "q1": 0}, "B": {"q0": 1}}
    assert all_fail_overlap(successes, receivers=["A"]) == {"B->A": {"all_fail_prompts": 2, "solved_by_peer": 0.5}}


def test_overlap_is_the_share_of_a_receivers_all_fail_prompts_that_a_source_solves():
    successes = {
        "A": {"q0": 0, "q1": 1, "q2": 0, "q3": 4},
        "B": {"q0": 1, "q1": 0, "q2": 0, "q3": 0},
        "C": {"q0": 4, "q1": 4, "q2": 4},
    }
    assert all_fail_overlap(successes) == {
        "B->A": {"all_fail_prompts": 2, "solved_by_peer": 0.5},
        "C->A": {"all_fail_prompts": 2, "solved_by_peer": 1.0},
        "A->B": {"all_fail_prompts": 3, "solved_by_peer": 2 / 3},
        "C->B": {"all_fail_prompts": 3, "solved_by_peer": 2 / 3},
        "A->C": {"all_fail_prompts": 0, "solved_by_peer": None},
        "B->C": {"all_fail_prompts": 0, "solved_by_peer": None},
    }

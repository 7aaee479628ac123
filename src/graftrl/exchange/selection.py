"""Which prompts travel: complementary group replacement with balanced exchange (GRAFT, section 4.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

Q = TypeVar("Q", bound=Hashable)


Sizes = Mapping[str, Mapping[Q, int]]  # model -> prompt id -> n of its group


def is_complementary(k_receiver: int, k_source: int, n_source: int, *, admit_all_success: bool = False) -> bool:
    """Whether a source's group of n >= 2 can replace the receiver's: k_R = 0 and 1 <= k_S < n (or k_S <= n)."""
    return k_receiver == 0 and n_source >= 2 and 1 <= k_source <= n_source - (not admit_all_success)


def complementary_candidates(
    successes: Mapping[str, Mapping[Q, int]],
    group_size: int,
    *,
    admit_all_success: bool = False,
    seed: int = 0,
    receivers: Collection[str] | None = None,
    sizes: Sizes[Q] | None = None,
) -> dict[str, dict[Q, tuple[str, int]]]:
    """For each receiver the prompts that it fails entirely and a peer solves in part, with the best such peer.

    GRAFT, equation 4: C[S->R] = {q : k_R(q) = 0 and 1 <= k_S(q) < n}. With more than two models the source of a prompt
    is the peer with the largest k_S / n_S, which is the largest k_S where all groups are of one size; a tie is drawn
    with `seed`, independently of the order of models and prompts.

    Args:
        successes: `{model: {prompt_id: k}}`, k the number of successes in the group. A prompt that a model did not
            sample is missing from its mapping: it neither receives nor gives there.
        group_size: n, responses per group.
        admit_all_success: also take peer groups with k_S = n (they carry no reward contrast; an ablation).
        seed: decides between equally successful peers.
        receivers: the models that train; the others only give. None: all train.
        sizes: `{model: {prompt_id: n}}` of groups that may differ from `group_size`, such as those of a stored log.

    Returns:
        `{receiver: {prompt_id: (source, k_S)}}`, prompts in the receiver's order; every receiver is a key.

    Raises:
        ValueError: group_size below 2, or a count outside 0..n.
    """
    if group_size < 2:
        raise ValueError(f"group_size is {group_size}; a group needs at least 2 responses to carry a reward contrast")
    for model, counts in successes.items():
        of_model = (sizes or {}).get(model, {})
        wrong = next((q for q, k in counts.items() if not 0 <= k <= of_model.get(q, group_size)), None)
        if wrong is not None:
            n = of_model.get(wrong, group_size)
            raise ValueError(f"model {model!r}, prompt {wrong!r}: {counts[wrong]} successes in a group of {n}")
    candidates: dict[str, dict[Q, tuple[str, int]]] = {}
    for receiver in successes if receivers is None else receivers:
        peers = sorted(name for name in successes if name != receiver)
        found: dict[Q, tuple[str, int]] = {}
        for q, k in successes.get(receiver, {}).items():
            if k != 0:
                continue
            usable = []
            for name in peers:
                k_s, n_s = successes[name].get(q, 0), _size(sizes, name, q, group_size)
                if is_complementary(k, k_s, n_s, admit_all_success=admit_all_success):
                    usable.append((k_s / n_s, k_s, name))  # equal fractions divide to equal floats
            if not usable:
                continue
            best = max(usable)[0]
            tied = [(name, k_s) for rate, k_s, name in usable if rate == best]
            found[q] = tied[0] if len(tied) == 1 else tied[_draw(len(tied), seed, receiver, q)]
        candidates[receiver] = found
    return candidates


def _size(sizes: Sizes[Q] | None, model: str, q: Q, group_size: int) -> int:
    return group_size if sizes is None else sizes.get(model, {}).get(q, group_size)


def _draw(count: int, seed: int, receiver: str, q: Hashable) -> int:
    # Hashed rather than drawn from a generator: the draw of one prompt depends on no other prompt and on no order.
    digest = hashlib.blake2b(repr((seed, receiver, q)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % count


def all_fail_overlap(
    successes: Mapping[str, Mapping[Q, int]], receivers: Collection[str] | None = None
) -> dict[str, dict[str, float | None]]:
    """How complementary models are: of the prompts that a receiver fails entirely, the share that a source solves.

    Args:
        successes: `{model: {prompt_id: k}}`; a prompt that the source did not sample counts as unsolved.
        receivers: the models that train; None: all.

    Returns:
        `{"source->receiver": {"all_fail_prompts": count, "solved_by_peer": share, None without such prompts}}`.
    """
    overlap: dict[str, dict[str, float | None]] = {}
    for receiver in successes if receivers is None else receivers:
        failed = [q for q, k in successes[receiver].items() if k == 0]
        for source in successes:
            if source != receiver:
                solved = sum(successes[source].get(q, 0) >= 1 for q in failed)
                share = solved / len(failed) if failed else None
                overlap[f"{source}->{receiver}"] = {"all_fail_prompts": len(failed), "solved_by_peer": share}
    return overlap


def select_complementary(
    successes: Mapping[str, Mapping[Q, int]],
    group_size: int,
    *,
    balanced: bool = True,
    admit_all_success: bool = False,
    seed: int = 0,
    receivers: Collection[str] | None = None,
    sizes: Sizes[Q] | None = None,
) -> dict[str, dict[Q, str]]:
    """Which peer group replaces which of the receiver's failed groups (GRAFT, section 4.1).

    Balanced exchange: m is the smallest candidate count over the receivers; each ranks its candidates by k_S / n_S
    descending (by k_S where all groups are of one size) and keeps the first m with all ties at the boundary. m = 0
    means that nobody receives anything. A single receiver, with peers that only give, keeps all its candidates.

    Args:
        successes, group_size, admit_all_success, seed, receivers, sizes: see `complementary_candidates`.
        balanced: False keeps every candidate of each direction.

    Returns:
        `{receiver: {prompt_id: source}}`, prompts in the receiver's order; every receiver is a key.
    """
    candidates = complementary_candidates(
        successes, group_size, admit_all_success=admit_all_success, seed=seed, receivers=receivers, sizes=sizes
    )
    if not balanced:
        return {receiver: {q: source for q, (source, _) in found.items()} for receiver, found in candidates.items()}
    m = min((len(found) for found in candidates.values()), default=0)
    selected: dict[str, dict[Q, str]] = {}
    for receiver, found in candidates.items():
        rates = {q: k / _size(sizes, source, q, group_size) for q, (source, k) in found.items()}
        cutoff = sorted(rates.values(), reverse=True)[m - 1] if m > 0 else 2.0  # above every rate
        selected[receiver] = {q: source for q, (source, _) in found.items() if rates[q] >= cutoff}
    return selected

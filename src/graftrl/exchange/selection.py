"""Which prompts travel: complementary group replacement with balanced exchange (GRAFT, section 4.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Q = TypeVar("Q", bound=Hashable)


def complementary_candidates(
    successes: Mapping[str, Mapping[Q, int]],
    group_size: int,
    *,
    admit_all_success: bool = False,
    seed: int = 0,
) -> dict[str, dict[Q, tuple[str, int]]]:
    """For each receiver the prompts that it fails entirely and a peer solves in part, with the best such peer.

    GRAFT, equation 4: C[S->R] = {q : k_R(q) = 0 and 1 <= k_S(q) < n}. With more than two models the source of a prompt
    is the peer with the largest k_S; a tie is drawn with `seed`, independently of the order of models and prompts.

    Args:
        successes: `{model: {prompt_id: k}}`, k the number of successes among `group_size` responses. A prompt that a
            model did not sample is missing from its mapping: it neither receives nor gives there.
        group_size: n, responses per group.
        admit_all_success: also take peer groups with k_S = n (they carry no reward contrast; an ablation).
        seed: decides between equally successful peers.

    Returns:
        `{receiver: {prompt_id: (source, k_S)}}`, prompts in the receiver's order; every model is a key.

    Raises:
        ValueError: group_size below 2, or a count outside 0..group_size.
    """
    if group_size < 2:
        raise ValueError(f"group_size is {group_size}; a group needs at least 2 responses to carry a reward contrast")
    for model, counts in successes.items():
        wrong = next((q for q, k in counts.items() if not 0 <= k <= group_size), None)
        if wrong is not None:
            raise ValueError(f"model {model!r}, prompt {wrong!r}: {counts[wrong]} successes in a group of {group_size}")
    most = group_size if admit_all_success else group_size - 1
    candidates: dict[str, dict[Q, tuple[str, int]]] = {}
    for receiver, counts in successes.items():
        peers = sorted(name for name in successes if name != receiver)
        found: dict[Q, tuple[str, int]] = {}
        for q, k in counts.items():
            if k != 0:
                continue
            best = [(name, successes[name].get(q, 0)) for name in peers]
            best = [(name, k_s) for name, k_s in best if 1 <= k_s <= most]
            if not best:
                continue
            k_max = max(k_s for _, k_s in best)
            tied = [name for name, k_s in best if k_s == k_max]
            found[q] = (tied[0] if len(tied) == 1 else _draw(tied, seed, receiver, q), k_max)
        candidates[receiver] = found
    return candidates


def _draw(tied: Sequence[str], seed: int, receiver: str, q: Hashable) -> str:
    # Hashed rather than drawn from a generator: the draw of one prompt depends on no other prompt and on no order.
    digest = hashlib.blake2b(repr((seed, receiver, q)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return tied[int.from_bytes(digest, "big") % len(tied)]


def all_fail_overlap(successes: Mapping[str, Mapping[Q, int]]) -> dict[str, dict[str, float | None]]:
    """How complementary models are: of the prompts that a receiver fails entirely, the share that a source solves.

    Args:
        successes: `{model: {prompt_id: k}}`; a prompt that the source did not sample counts as unsolved.

    Returns:
        `{"source->receiver": {"all_fail_prompts": count, "solved_by_peer": share, None without such prompts}}`.
    """
    overlap: dict[str, dict[str, float | None]] = {}
    for receiver, counts in successes.items():
        failed = [q for q, k in counts.items() if k == 0]
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
) -> dict[str, dict[Q, str]]:
    """Which peer group replaces which of the receiver's failed groups (GRAFT, section 4.1).

    Balanced exchange: m is the smallest candidate count over the receivers; each ranks its candidates by k_S descending
    and keeps the first m with all ties at the boundary. m = 0 means that nobody receives anything.

    Args:
        successes, group_size, admit_all_success, seed: see `complementary_candidates`.
        balanced: False keeps every candidate of each direction.

    Returns:
        `{receiver: {prompt_id: source}}`, prompts in the receiver's order; every model is a key.
    """
    candidates = complementary_candidates(successes, group_size, admit_all_success=admit_all_success, seed=seed)
    if not balanced:
        return {receiver: {q: source for q, (source, _) in found.items()} for receiver, found in candidates.items()}
    m = min((len(found) for found in candidates.values()), default=0)
    selected: dict[str, dict[Q, str]] = {}
    for receiver, found in candidates.items():
        ranked = sorted((k for _, k in found.values()), reverse=True)
        cutoff = ranked[m - 1] if m > 0 else group_size + 1
        selected[receiver] = {q: source for q, (source, k) in found.items() if k >= cutoff}
    return selected

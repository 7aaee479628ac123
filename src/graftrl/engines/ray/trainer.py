"""One rank of a policy's trainers, in a process of its own."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from graftrl.config import Recipe
from graftrl.engines.scorers import open_scorers
from graftrl.objective import Objective
from graftrl.policies.frozen import FrozenWeights
from graftrl.policies.hf import HFPolicy, UpdateStats
from graftrl.rollout import Row

_PART_BYTES = 1 << 30  # of the weights that travel to a sampler at once


@dataclass(frozen=True)
class Opened:
    """What the driver must know of a loaded policy and of the scorers beside it. prepend_bos: of each, by name."""

    prepend_bos: dict[str, bool]
    notes: tuple[str, ...]


class Trainer:
    """Every method is called on all ranks of a policy at the same time, `listen` on rank 0 alone."""

    def __init__(self, name: str, rank: int, size: int, threads: int | None, timeout_s: float) -> None:
        self._name, self._rank, self._size = name, rank, size
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._store: Any = None
        self._frozen = FrozenWeights()
        if threads is not None:
            torch.set_num_threads(threads)

    def listen(self) -> tuple[str, int]:
        """Open the store through which the ranks find each other; where it listens."""
        host = _own_address()
        self._store = TCPStore(host, 0, self._size, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return host, self._store.port

    def open(self, address: tuple[str, int], recipe: Recipe, checkpoint: Path | None) -> Opened:
        """Join the other ranks and load the model, and the scorers of the recipe's method.

        Args:
            address: as `listen` gave it. recipe: with the devices and paths that hold in this process.

        Raises:
            ModelError: as `HFPolicy` and `open_scorers`.
        """
        from torch.distributed.device_mesh import init_device_mesh

        from graftrl.engines.ray.sharding import ShardedRanks

        store = self._store or TCPStore(*address, self._size, timeout=self._timeout)
        settings = recipe.models[self._name]
        kind = "cuda" if settings.device.startswith("cuda") else "cpu"
        torch.distributed.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            store=store,
            rank=self._rank,
            world_size=self._size,
            timeout=self._timeout,
        )
        ranks = ShardedRanks(init_device_mesh(kind, (self._size,)))
        self._policy = HFPolicy(self._name, settings, recipe.sampling, checkpoint, self._frozen, ranks=ranks)
        self._scorers = open_scorers(recipe, self._frozen)
        return Opened(
            {self._name: self._policy.codec.prepend_bos}
            | {name: scorer.codec.prepend_bos for name, scorer in self._scorers.items()},
            (*self._policy.notes, *(note for scorer in self._scorers.values() for note in scorer.notes)),
        )

    def score(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """As `HFPolicy.score`; empty for the rows that other ranks passed."""
        return self._policy.score(rows)

    def read(self, scorer: str, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Log-probabilities under a scorer, which every rank holds whole: no other rank takes part."""
        return self._scorers[scorer].model.logprobs(rows)

    def update(self, minibatches: Sequence[Sequence[Row]], objective_of: Callable[[int], Objective]) -> UpdateStats:
        """As `HFPolicy.update`, with this rank's part of what is counted."""
        models = {name: scorer.model for name, scorer in self._scorers.items()}
        try:
            return self._policy.update(minibatches, objective_of, models)
        finally:
            self._frozen.forget()  # the step's rows will not come again

    def weights(self, dtype: str) -> list[Any]:
        """References to the whole weights in this precision, as safetensors files; from rank 0, none from others."""
        whole = self._policy.ranks.whole_weights(self._policy.loaded.causal_lm)
        if not self._policy.ranks.writes or whole is None:
            return []
        import ray

        precision = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        # A copy of each: a tied head is written out, for a sampler may hold it apart from the embeddings.
        return [
            ray.put(save({name: value.to(precision, copy=True).contiguous() for name, value in part.items()}))
            for part in parts(whole, _PART_BYTES)
        ]

    def save(self, folder: Path) -> None:
        self._policy.save(folder)

    def pid(self) -> int:
        return os.getpid()


def parts(weights: dict[str, Tensor], most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The weights in groups of at most that many bytes, or of one that is larger."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, value in weights.items():
        if part and size + value.nbytes > most_bytes:
            yield part
            part, size = {}, 0
        part[name] = value
        size += value.nbytes
    if part:
        yield part


def merge_stats(of_ranks: Sequence[UpdateStats]) -> UpdateStats:
    """One policy's statistics. Ranks share what is of whole minibatches (steps, norms, trained tokens) and have each a
    part of the rest (losses, clipped tokens, diagnostics, passed tokens)."""
    merged = of_ranks[0]
    for other in of_ranks[1:]:
        merged.losses = [a + b for a, b in zip(merged.losses, other.losses, strict=True)]
        merged.clipped_tokens.update(other.clipped_tokens)
        merged.token_counts.update(other.token_counts)
        for name, value in other.token_sums.items():
            merged.token_sums[name] += value
        merged.passed_tokens += other.passed_tokens
    return merged


def _own_address() -> str:
    """By which other nodes reach this one."""
    import ray

    address: str = ray.util.get_node_ip_address()
    try:
        socket.getaddrinfo(address, None)
    except OSError:
        return "127.0.0.1"
    return address

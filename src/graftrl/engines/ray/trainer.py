"""One rank of a policy's trainers, in a process of its own."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from graftrl.config import Recipe
from graftrl.engines.ray.weights import Chunk, Link, chunks_of, gathered, open_link, synchronize
from graftrl.engines.scorers import open_scorers
from graftrl.objective import Objective
from graftrl.policies import shards
from graftrl.policies.frozen import FrozenWeights
from graftrl.policies.hf import HFPolicy, UpdateStats
from graftrl.rollout import Row


@dataclass(frozen=True)
class Opened:
    """What the driver must know of a loaded policy and of the scorers beside it. prepend_bos: of each, by name."""

    prepend_bos: dict[str, bool]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Sent:
    """Of one weight sync, at one rank. bytes: of whole weights. gather_s: collecting shards. transport_s: handing them
    on, with the time in which the sampler was not ready yet."""

    bytes: int
    gather_s: float
    transport_s: float


class Trainer:
    """Every method is called on all ranks of a policy at the same time, `listen` on rank 0 alone."""

    def __init__(self, name: str, rank: int, size: int, threads: int | None, timeout_s: float) -> None:
        self._name, self._rank, self._size = name, rank, size
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._store: Any = None
        self._weights_store: Any = None
        self._policy: Any = None
        self._parts: tuple[Path, Future[Any]] | None = None  # of the checkpoint that is or was written
        self._link: Link | None = None  # to this rank's samplers
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
        self._mesh = init_device_mesh(kind, (self._size,))
        self.load(recipe, checkpoint)
        self._scorers = open_scorers(recipe, self._frozen)
        return Opened(
            {self._name: self._policy.codec.prepend_bos}
            | {name: scorer.codec.prepend_bos for name, scorer in self._scorers.items()},
            (*self._policy.notes, *(note for scorer in self._scorers.values() for note in scorer.notes)),
        )

    def load(self, recipe: Recipe, checkpoint: Path | None) -> None:
        """The policy as it is in the checkpoint; the one before is forgotten first."""
        from graftrl.engines.ray.sharding import ShardedRanks

        if self._parts is not None:  # its folder may be written again
            wait([self._parts[1]])
        self._parts, self._policy = None, None
        self._policy = HFPolicy(
            self._name,
            recipe.models[self._name],
            recipe.sampling,
            checkpoint,
            self._frozen,
            ranks=ShardedRanks(self._mesh),
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

    # Weights ---------------------------------------------------------------------------------------------------------

    def chunks(self) -> list[Chunk]:
        """What a sync sends, in its order; no other rank takes part."""
        return chunks_of(self._policy.loaded.causal_lm)

    def offer(self) -> tuple[str, int]:
        """Open the store through which this rank's samplers find it; where it listens. No other rank takes part."""
        host = _own_address()
        self._weights_store = TCPStore(host, 0, None, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return host, self._weights_store.port

    def join(self, way: str, size: int) -> None:
        """Open this rank's end of a link, as the samplers open theirs. size: of the group of a broadcast."""
        device = self._policy.device
        self._link = open_link(way, self._weights_store, 0, size, device, self._timeout.total_seconds())

    def send(self, dtype: str) -> Sent:
        """The weights in this precision to the samplers at the other end of the link, if this rank has one."""
        link = self._link
        return self._each(dtype, None if link is None else link.give)

    def weights(self, dtype: str) -> tuple[list[Any], Sent]:
        """References to the weights in this precision, each a chunk and its bytes; from rank 0, none from others."""
        import ray

        chunks, parts = iter(self.chunks()), []

        def put(flat: Tensor) -> None:
            parts.append(ray.put((next(chunks), flat.cpu().view(torch.uint8).numpy())))

        return parts, self._each(dtype, put if self._rank == 0 else None)

    def _each(self, dtype: str, give: Callable[[Tensor], None] | None) -> Sent:
        device = self._policy.device
        whole = gathered(self._policy.loaded.causal_lm, self.chunks(), getattr(torch, dtype), keeps=give is not None)
        size, gathering, giving = 0, 0.0, 0.0
        start = time.perf_counter()
        for flat in whole:
            synchronize(device)
            ready = time.perf_counter()
            if give is not None and flat is not None:
                size += flat.nbytes
                give(flat)
            end = time.perf_counter()
            gathering, giving, start = gathering + ready - start, giving + end - ready, end
        return Sent(size, gathering, giving)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def save(self, folder: Path, in_parts: bool) -> None:
        """Write a checkpoint; in parts: only begin to."""
        if in_parts:
            self._parts = folder, shards.signed_when_done(self._policy.save_shards(folder), folder, self._rank)
        else:
            self._policy.save(folder)

    def written(self) -> list[str]:
        """The files of this rank, when those of all ranks are on the disk.

        Raises:
            OSError, RuntimeError: why they never will be.
        """
        assert self._parts is not None
        folder, writing = self._parts
        shards.finish(writing)
        return shards.own_files(folder, self._rank)

    def pid(self) -> int:
        return os.getpid()


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

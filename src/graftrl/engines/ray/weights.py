"""Weights on their way from a policy's trainers to its samplers, a layer at a time.

Trainers hold shards. A chunk is one layer's weights, or one weight that belongs to no layer. It is gathered in the
precision of the sampler, travels as one flat tensor and is freed before the next one is gathered: beside the shards
there is never more than one chunk of whole weights. Three ways lead to a sampler:

    Broadcast   from trainer 0 to all devices of all samplers at once: NCCL between GPUs, gloo between CPUs
    Handover    to the sampler on the trainer's own device, in memory that both see; NCCL allows one process a device
    by way of hosts: through Ray's object store (`Trainer.weights`, `Sampler.load`)

All three carry the same chunks. A weight that layers share travels once and arrives under all of its names: a sampler
may hold a tied head apart from the embeddings.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from graftrl.engines.ray.sharding import whole


@dataclass(frozen=True)
class Weight:
    """names: of the model's `state_dict`, several where layers share it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


Chunk = tuple[Weight, ...]


def chunks_of(causal_lm: Any) -> list[Chunk]:
    """The model's weights in the order of its `state_dict`, which every rank knows without a word to the others."""
    names: dict[int, list[str]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for name, value in causal_lm.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(name)
        shapes[id(value)] = tuple(value.shape)
    weights = [Weight(tuple(of_one), shapes[key]) for key, of_one in names.items()]
    chunks: list[Chunk] = []
    for layer, group in itertools.groupby(weights, lambda weight: _layer(weight.names[0])):
        of_layer = tuple(group)
        chunks += [(weight,) for weight in of_layer] if layer is None else [of_layer]
    return chunks


def _layer(name: str) -> str | None:
    """Up to the first number: `model.layers.3`; None for what is in no layer."""
    parts = name.split(".")
    return next((".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()), None)


def gathered(causal_lm: Any, chunks: Iterable[Chunk], dtype: torch.dtype, *, keeps: bool) -> Iterator[Tensor | None]:
    """Each chunk's weights, one behind the other in a flat tensor on the model's device. All ranks iterate.

    keeps: whether this rank wants them; one that does not gets None, since gathering takes all ranks.
    """
    values = causal_lm.state_dict(keep_vars=True)
    for chunk in chunks:
        first = values[chunk[0].names[0]]
        flat = torch.empty(sum(weight.size for weight in chunk), dtype=dtype, device=first.device) if keeps else None
        start = 0
        for weight in chunk:
            value = whole(values[weight.names[0]].detach().to(dtype))  # shards change precision before they travel
            if flat is not None:
                flat[start : start + weight.size].copy_(value.reshape(-1))
            start += weight.size
        yield flat


def named(chunk: Chunk, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The chunk's weights as they are in a checkpoint; views of `flat`."""
    start = 0
    for weight in chunk:
        for name in weight.names:
            yield name, flat[start : start + weight.size].view(weight.shape)
        start += weight.size


# Ways ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """How a sampler is reached. address: of the trainer's store. rank, size: in the group of a broadcast, of the
    sampler's first device and in all."""

    way: Literal["broadcast", "handover", "host"]
    address: tuple[str, int]
    rank: int
    size: int
    timeout_s: float


class Link(Protocol):
    def give(self, flat: Tensor) -> None:
        """Returns when the tensor may be freed."""
        ...

    def take(self, size: int, dtype: torch.dtype) -> Tensor:
        """The next tensor, in memory of this process."""
        ...


def open_link(way: str, store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Link:
    """All ends of a link are opened at the same time."""
    timeout = datetime.timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    if way == "broadcast":
        return Broadcast(store, rank, size, device, timeout)
    return Handover(store, rank, device, timeout)


class Broadcast:
    """From rank 0 of a process group to all others of it."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, timeout: datetime.timedelta) -> None:
        self._device = device
        self._group: Any
        if device.type == "cuda":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = ProcessGroupNCCL(store, rank, size, options)
        else:
            from torch.distributed import ProcessGroupGloo

            self._group = ProcessGroupGloo(store, rank, size, timeout)

    def give(self, flat: Tensor) -> None:
        self._send(flat)

    def take(self, size: int, dtype: torch.dtype) -> Tensor:
        flat = torch.empty(size, dtype=dtype, device=self._device)
        self._send(flat)
        return flat

    def _send(self, flat: Tensor) -> None:
        self._group.broadcast(flat.view(torch.uint8), 0).wait()
        synchronize(self._device)


class Handover:
    """Between two processes on one device, in its memory: the giver says where a tensor lies, the taker copies it.

    A CPU's memory is shared by name, a GPU's by CUDA's handles. What is said goes through the store as JSON. Where one
    process ends the other raises RuntimeError.
    """

    def __init__(self, store: Store, rank: int, device: torch.device, timeout: datetime.timedelta) -> None:
        """rank: 0 of the giver, 1 of the taker."""
        self._store, self._device, self._timeout = store, device, timeout
        self._count = 0
        store.set(f"process {rank}", str(os.getpid()))
        self._other = int(store.get(f"process {1 - rank}"))

    def give(self, flat: Tensor) -> None:
        where, taken = self._keys()
        synchronize(self._device)
        storage = flat.untyped_storage()
        shared = storage._share_cuda_() if flat.is_cuda else storage._share_filename_cpu_()
        self._store.set(where, json.dumps([part.hex() if isinstance(part, bytes) else part for part in shared]))
        self._await(taken)
        self._store.delete_key(where)
        self._store.delete_key(taken)
        if flat.is_cuda:
            del storage, flat
            torch.cuda.ipc_collect()

    def take(self, size: int, dtype: torch.dtype) -> Tensor:
        where, taken = self._keys()
        self._await(where)
        said = json.loads(self._store.get(where))
        parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in said]
        if self._device.type == "cuda":
            parts[0] = self._device.index or 0  # the other process may count its devices otherwise
            storage = torch.UntypedStorage._new_shared_cuda(*parts)
        else:
            storage = torch.UntypedStorage._new_shared_filename_cpu(*parts)
        lent = torch.empty(0, dtype=dtype, device=self._device).set_(storage)
        copy: Tensor = lent[:size].clone()
        synchronize(self._device)
        del lent, storage
        self._store.set(taken, "")
        return copy

    def _await(self, key: str) -> None:
        end = time.monotonic() + self._timeout.total_seconds()
        while True:
            try:
                return self._store.wait([key], datetime.timedelta(seconds=1))
            except DistStoreError:
                if not psutil.pid_exists(self._other):
                    raise RuntimeError("the process at the other end of a weight handover ended") from None
                if time.monotonic() > end:
                    raise

    def _keys(self) -> tuple[str, str]:
        self._count += 1
        return f"chunk {self._count}", f"chunk {self._count} taken"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# At a sampler ---------------------------------------------------------------------------------------------------------


def taken(link: Link, chunks: Sequence[Chunk], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a sync, as it arrives."""
    for chunk in chunks:
        yield from named(chunk, link.take(sum(weight.size for weight in chunk), dtype))


Source = NDArray[np.uint8] | Path


def read(sources: Iterable[tuple[Chunk, Source]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a sync by way of hosts. Source: a chunk's bytes, in memory or in a file."""
    for chunk, source in sources:
        data = np.memmap(source, np.uint8, mode="r") if isinstance(source, Path) else source
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to it
            flat = torch.from_numpy(data).view(dtype)
        yield from named(chunk, flat)

"""What a vLLM worker, in whichever process it runs, can do besides: take a trainer's new weights.

vLLM mixes the class into its own worker (`worker_extension_cls`). Whichever way the weights come, vLLM's own in-place
reload puts them where the old ones were: what it keeps packed for its kernels is packed again, recorded graphs stay.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from graftrl.engines.ray.weights import Chunk, Route, Source, open_link, read, taken


class TakesWeights:
    """Names begin with `graftrl_`, since they stand beside those of vLLM's worker."""

    def graftrl_join(self: Any, route: Route) -> None:
        """Open this device's end of the link. The trainer opens its own at the same time."""
        store = TCPStore(*route.address, is_master=False)
        self.graftrl_link = open_link(
            route.way, store, route.rank + self.rank, route.size, torch.device(self.device), route.timeout_s
        )

    def graftrl_take(self: Any, chunks: Sequence[Chunk], dtype: str) -> float:
        """Weights from the link, while the trainer sends them; the seconds without waiting for them."""
        return _reload(self, taken(self.graftrl_link, chunks, getattr(torch, dtype)))

    def graftrl_read(self: Any, sources: Sequence[tuple[Chunk, Source]], dtype: str) -> float:
        """Weights that lie in this host's memory or files; the seconds it takes."""
        return _reload(self, read(sources, getattr(torch, dtype)))


def _reload(worker: Any, weights: Iterator[tuple[str, Tensor]]) -> float:
    arriving = _Timed(weights)
    start = time.perf_counter()
    worker.reload_weights(weights_iterator=arriving)
    for _ in arriving:  # what the model had no use for must be taken all the same
        pass
    return time.perf_counter() - start - arriving.seconds


class _Timed(Iterator[tuple[str, Tensor]]):
    """The same items, and the seconds in which they were waited for."""

    def __init__(self, items: Iterator[tuple[str, Tensor]]) -> None:
        self._items, self.seconds = items, 0.0

    def __next__(self) -> tuple[str, Tensor]:
        start = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self.seconds += time.perf_counter() - start

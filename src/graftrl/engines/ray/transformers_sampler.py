"""A sampler that samples as the local engine does, in a process of its own. It takes every model that can train."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from graftrl.engines.ray.sampler import Ids
from graftrl.engines.ray.weights import Chunk, Link, Route, open_link, read, taken
from graftrl.errors import ModelError
from graftrl.policies.config import ModelSettings, SamplingSettings
from graftrl.policies.hf import HFPolicy
from graftrl.policies.sampling import Sampled
from graftrl.rollout import Row


class TransformersSampler:
    """Has the methods of `Sampler`.

    sleeps: it leaves its device between samplings.
    """

    def __init__(self, name: str, settings: ModelSettings, sampling: SamplingSettings, *, sleeps: bool = False) -> None:
        self._policy = HFPolicy(name, settings, sampling)
        self._dtype = getattr(torch, settings.dtype)
        self._sleeps = sleeps
        self._link: Link | None = None

    def sample(
        self, prompts: Sequence[Ids], n: int, seeds: Sequence[int], sampling: SamplingSettings, eos_ids: Sequence[int]
    ) -> list[list[Sampled]]:
        """n responses to each prompt, drawn from the prompt's seed: whoever samples beside it changes nothing but
        rounding. eos_ids: those of the model's own codec."""
        self.wake()
        generators = [torch.Generator(device=self._policy.device).manual_seed(seed) for seed in seeds]
        return self._policy.draw([np.asarray(ids, np.int64) for ids in prompts], n, generators, sampling)

    def score(self, sequences: Sequence[tuple[Ids, Ids]]) -> list[NDArray[np.float32]]:
        """Log-probabilities of the second ids of each pair after the first, float32 [T]."""
        self.wake()
        rows = [
            Row(str(i), np.asarray(prompt, np.int64), np.asarray(response, np.int64), 0.0, "own", self._policy.name)
            for i, (prompt, response) in enumerate(sequences)
        ]
        return self._policy.score(rows)

    # Weights ---------------------------------------------------------------------------------------------------------

    def join(self, route: Route) -> None:
        store = TCPStore(*route.address, is_master=False)
        self._link = open_link(route.way, store, route.rank, route.size, self._policy.device, route.timeout_s)

    def take(self, chunks: Sequence[Chunk]) -> float:
        assert self._link is not None
        return self._renew(taken(self._link, chunks, self._dtype))

    def load(self, parts: Sequence[Any]) -> float:
        import ray

        return self._renew(read([ray.get(part) for part in parts], self._dtype))

    @torch.no_grad()
    def _renew(self, weights: Iterator[tuple[str, Tensor]]) -> float:
        """Seconds without waiting. Raises ModelError where a weight of the model did not come."""
        self.wake()
        missing, seconds = dict(self._policy.loaded.causal_lm.state_dict()), 0.0
        for name, value in weights:
            start = time.perf_counter()
            missing.pop(name).copy_(value)
            seconds += time.perf_counter() - start
        if missing:
            raise ModelError(f"model {self._policy.name!r}: no new weights came for {min(missing)}")
        return seconds

    def sleep(self) -> None:
        if self._sleeps:
            self._policy.loaded.causal_lm.to("cpu")

    def wake(self) -> None:
        if self._sleeps:
            self._policy.loaded.causal_lm.to(self._policy.device)

    def pid(self) -> int:
        return os.getpid()

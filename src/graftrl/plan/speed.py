"""How long a policy's phases take on its devices: the costs of `policies.costs` over the rates of `devices`."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from graftrl.plan.devices import GRAPH_OVERHEAD_S, Device
from graftrl.policies.config import ModelSettings
from graftrl.policies.costs import (
    WIDTH,
    ModelShape,
    decode_work,
    head_work,
    microbatches,
    optimizer_work,
    read_work,
    trainable_parameters,
    training_work,
)

Lengths = tuple[int, int]  # tokens of a row's prompt and of its response


@dataclass(frozen=True)
class Speed:
    """One policy on one kind of device. sampler: it samples with an engine of its own, in bfloat16 and with recorded
    graphs (vLLM); else with its training weights, one batch of `sample_rows` rows after the other. rows_per_prompt: so
    many rows share their prompt's pass in training, as they do on CPUs."""

    shape: ModelShape
    settings: ModelSettings
    device: Device
    sampler: bool = False
    rows_per_prompt: int = 1

    @property
    def width(self) -> int:
        return WIDTH[self.settings.dtype]

    @property
    def sampling_width(self) -> int:
        return 2 if self.sampler else self.width

    @property
    def _sampling_overhead(self) -> float | None:
        return GRAPH_OVERHEAD_S if self.sampler else None

    # Sampling -----------------------------------------------------------------------------------------------------

    def read_seconds(self, prompts: Sequence[int]) -> float:
        """Reading prompts before the first token."""
        if not prompts:
            return 0.0
        return self.device.seconds(read_work(self.shape, prompts, self.sampling_width), self.sampling_width)

    def token_seconds(self, rows: float, keys: float) -> float:
        """One more token for each of `rows` responses whose contexts hold `keys` tokens together."""
        work = decode_work(self.shape, rows, keys, self.sampling_width)
        return self.device.seconds(work, self.sampling_width, decoding=True, overhead=self._sampling_overhead)

    # Scoring ------------------------------------------------------------------------------------------------------

    def score(self, rows: Sequence[Lengths], devices: int = 1, *, whole: bool = False) -> Part:
        """Log-probabilities of the rows' responses. On several devices the weights are gathered for each microbatch,
        unless each has them `whole`."""
        if not rows:
            return Part(0.0, 0.0, 0.0)
        parts = deal(rows, devices)
        busy = [self._score_one(part) for part in parts]
        gathered = 0.0 if whole else self._rounds(parts) * self._gather(devices)
        return Part(max([*busy, gathered]), sum(busy), max(busy))

    def _score_one(self, rows: Sequence[Lengths]) -> float:
        lengths = [prompt + response for prompt, response in rows]
        passes = microbatches(sum(lengths), self.settings)
        work = read_work(self.shape, lengths, self.width, passes)
        head = head_work(self.shape, sum(response for _, response in rows), self.width, passes)
        return self.device.seconds(work + head, self.width)

    # Training -----------------------------------------------------------------------------------------------------

    def update(self, rows: Sequence[Lengths], devices: int = 1) -> Part:
        """One optimizer step over these rows, split over the devices by length. Gathering weights for a microbatch goes
        on beside its arithmetic; the gradients' sum comes after."""
        if not rows:
            return Part(0.0, 0.0, 0.0)
        parts = deal(rows, devices)
        busy = [self._train_one(part) for part in parts]
        trainable = trainable_parameters(self.shape, self.settings.lora)
        reduced = self.device.collective_seconds(4 * trainable, devices)
        gathered = self._rounds(parts) * 2 * self._gather(devices)  # again on the way back
        step = self.device.seconds(optimizer_work(trainable / devices), self.width)
        return Part(max([*busy, gathered]) + reduced + step, sum(busy) + devices * step, max(busy) + step)

    def _train_one(self, rows: Sequence[Lengths]) -> float:
        count = microbatches(sum(map(sum, rows)), self.settings)
        shared = None
        if self.rows_per_prompt > 1:
            shared = [prompt for prompt, _ in rows[:: self.rows_per_prompt]]
        work = training_work(self.shape, rows, self.settings, microbatches=count, shared_prompts=shared)
        return self.device.seconds(work, self.width)

    def _gather(self, devices: int) -> float:
        return self.device.collective_seconds(self.width * self.shape.parameters, devices)

    def _rounds(self, parts: Sequence[Sequence[Lengths]]) -> int:
        """Microbatches of the device that has most."""
        return max(microbatches(sum(p + r for p, r in part), self.settings) for part in parts)

    # Weights ------------------------------------------------------------------------------------------------------

    def sync_seconds(self, devices: int = 1) -> float:
        """New weights for the sampler; none where sampling uses the training weights."""
        if not self.sampler:
            return 0.0
        size = 2 * self.shape.parameters
        return size / (self.device.bandwidth * self.device.stream) + self.device.collective_seconds(size, devices)


@dataclass(frozen=True)
class Part:
    """A policy's part of a phase. wall: its seconds. busy: device-seconds of arithmetic, over all devices. compute:
    seconds of arithmetic of the device that has most; what the wall has beyond is communication."""

    wall: float
    busy: float
    compute: float


def joined(parts: Sequence[Part]) -> Part:
    """One after the other."""
    return Part(sum(p.wall for p in parts), sum(p.busy for p in parts), sum(p.compute for p in parts))


def deal(rows: Sequence[Lengths], devices: int) -> list[list[Lengths]]:
    """Rows to devices: longest first, each to the device with the fewest tokens. More devices never give the fullest
    one more (see tests)."""
    parts: list[list[Lengths]] = [[] for _ in range(min(devices, max(len(rows), 1)))]
    loads = [(0, i) for i in range(len(parts))]
    for row in sorted(rows, key=lambda r: (-sum(r), r)):
        load, i = heapq.heappop(loads)
        parts[i].append(row)
        heapq.heappush(loads, (load + sum(row), i))
    return parts

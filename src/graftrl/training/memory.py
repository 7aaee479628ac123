"""How much memory a policy will need: counted where it can be counted, estimated (and labelled so) elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from graftrl.policies.config import ModelSettings, SamplingSettings
from graftrl.policies.costs import WIDTH, ModelShape, activation_bytes, shape_of, trainable_parameters


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on each device. weights, gradients and optimizer are exact; activations are an estimate; cache and logits
    are limits.

    casts: copies of the weights in the precision of a pass, there only while the policy works. gathered: weights of
    other devices' shards, while a layer needs them. sampler: a second copy of the weights for a sampler of its own.
    """

    parameters: int
    trainable: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    cache: int
    logits: int
    casts: int = 0
    gathered: int = 0
    sampler: int = 0

    @property
    def resident(self) -> int:
        """There all the time: gradients stay until the next minibatch begins."""
        return self.weights + self.gradients + self.optimizer + self.sampler

    @property
    def training(self) -> int:
        """The peak while training: the sampler's cache is gone by then."""
        return self.resident + self.casts + self.gathered + self.activations + self.logits

    @property
    def sampling(self) -> int:
        """The peak while sampling."""
        return self.resident + (0 if self.sampler else self.casts) + self.cache + self.logits

    @property
    def peak(self) -> int:
        return max(self.training, self.sampling)

    @property
    def peak_apart(self) -> int:
        """Of the fuller device where trainers and samplers have devices of their own."""
        return max(self.training - self.sampler, self.sampler + self.cache + self.logits)


def together(estimates: Iterable[MemoryEstimate]) -> int:
    """The peak of policies that take turns on one device: what stays of all, and the most that one adds at work."""
    found = list(estimates)
    return sum(m.resident for m in found) + max((m.peak - m.resident for m in found), default=0)


def estimate_memory(causal_lm: Any, settings: ModelSettings, sampling: SamplingSettings) -> MemoryEstimate:
    """Memory of one policy on one device; `causal_lm` may live on the meta device."""
    return memory_of(shape_of(causal_lm), settings, sampling)


def memory_of(
    shape: ModelShape,
    settings: ModelSettings,
    sampling: SamplingSettings,
    *,
    devices: int = 1,
    sampler: bool = False,
    rows: int | None = None,
) -> MemoryEstimate:
    """Memory of one policy on each of its devices.

    devices: weights, gradients and optimizer states are split over so many (FSDP); a layer is gathered while it works,
        and the next one ahead of it; embedding and head too.
    sampler: sampling has bfloat16 weights and cache of its own, whole on every device.
    rows: most responses that a device has to sample; None: no limit but `sample_rows`.
    """
    width = WIDTH[settings.dtype]
    trainable = trainable_parameters(shape, settings.lora)
    length = sampling.max_prompt_tokens + sampling.max_response_tokens
    tokens = max(settings.microbatch_tokens, length)
    side_by_side = settings.sample_rows if rows is None else min(rows, settings.sample_rows)
    logits = min(settings.logit_elements, max(tokens, side_by_side) * shape.vocabulary)
    sharded = devices > 1
    of_layers = 2 * (shape.matrices // shape.layers) + shape.head
    return MemoryEstimate(
        parameters=shape.parameters,
        trainable=trainable,
        weights=_share(4 * shape.parameters, devices),
        gradients=_share(4 * trainable, devices),
        optimizer=_share(8 * trainable, devices),
        activations=activation_bytes(shape, tokens, settings),
        cache=side_by_side * length * shape.cached * (2 if sampler else width),
        logits=3 * 4 * logits,
        casts=2 * shape.parameters if width == 2 and not sharded else 0,
        gathered=width * of_layers if sharded else 0,
        sampler=2 * shape.parameters if sampler else 0,
    )


def _share(size: int, devices: int) -> int:
    return -(-size // devices)

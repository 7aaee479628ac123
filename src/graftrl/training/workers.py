"""What a policy's trainers and samplers on the engine `ray` need of their devices, from the model's shape and the
recipe's resources."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from graftrl.engines.config import PolicyResources
from graftrl.policies.config import ModelSettings, SamplingSettings
from graftrl.policies.costs import WIDTH, ModelShape
from graftrl.training.memory import MemoryEstimate, memory_of

GIB = 1024**3
HEADROOM = 0.95  # of a device's memory may be planned; fragments and libraries take the rest
_WORKSPACE = (
    2 * GIB
)  # of vLLM beside weights and cache on a GPU: a pass's activations, logits, recorded graphs. Assumed
_CPU_CACHE = 1 * GIB  # which the engine gives to vLLM on a CPU


@dataclass(frozen=True)
class Workers:
    """Bytes are those of each device.

    trainer: of one trainer. frozen: of scorers and references, whole beside it. chunk: the largest part of the weights
        that is whole during a weight sync. available: of a device. share: what a sampler takes. workspace: of it, for
        neither weights nor cache. token: keys and values of a token. longest: most tokens of a prompt and its response.
    asked: responses that a sampler is asked for in a step. rows: of a minibatch for each trainer, at most.
    """

    trainers: int
    samplers: int
    tensor_parallel: int
    shared: bool
    trainer: MemoryEstimate
    frozen: int
    chunk: int
    available: int
    share: int
    sampler_weights: int
    workspace: int
    token: int
    longest: int
    asked: int
    rows: int

    @property
    def devices(self) -> int:
        return self.trainers + (0 if self.shared else self.samplers * self.tensor_parallel)

    @property
    def cache(self) -> int:
        return max(0, self.share - self.sampler_weights - self.workspace)

    @property
    def held(self) -> int:
        """Responses of the greatest length whose keys and values the cache holds at once."""
        return self.cache // (self.token * self.longest)

    @property
    def trainer_peak(self) -> int:
        """Of a trainer's device, a shared one's sampler included: it sleeps while the policy trains, and is awake when
        new weights come, which are then there twice."""
        syncing = self.trainer.resident + self.frozen + self.chunk
        return max(self.trainer.training + self.frozen, syncing + (self.share + self.chunk if self.shared else 0))

    @property
    def sampler_peak(self) -> int:
        """Of a device of a sampler alone. vLLM fills its share with the cache, so that new weights come beside it."""
        return 0 if self.shared else self.share + self.chunk

    @property
    def together(self) -> int:
        """Of all of them where they share one memory, as on a machine without GPUs."""
        trainers = self.trainers * (max(self.trainer.training, self.trainer.resident + self.chunk) + self.frozen)
        return trainers + self.samplers * self.tensor_parallel * self.share

    @property
    def peak(self) -> int:
        return max(self.trainer_peak, self.sampler_peak)

    def problems(self, name: str) -> list[str]:
        """Why it does not fit, and what would change it."""
        found = []
        most = HEADROOM * self.available
        if self.trainer_peak > most:
            what = "a trainer and the sampler that shares its device need" if self.shared else "a trainer needs"
            found.append(
                f"{name}: {what} about {self.trainer_peak / GIB:.1f} GiB of a device's {self.available / GIB:.1f} GiB"
            )
        if self.held < 1:
            needed = self.sampler_weights + self.workspace + self.token * self.longest
            found.append(
                f"{name}: a sampler's {self.share / GIB:.1f} GiB do not hold its weights and one response of the "
                f"greatest length, about {needed / GIB:.1f} GiB"
            )
        elif self.sampler_peak > most:
            found.append(
                f"{name}: a sampler needs about {self.sampler_peak / GIB:.1f} GiB of a device's "
                f"{self.available / GIB:.1f} GiB; lower ray.resources.{name}.memory_share"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        derived = ("devices", "together", "cache", "held", "trainer_peak", "sampler_peak")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def workers_of(
    shape: ModelShape,
    settings: ModelSettings,
    sampling: SamplingSettings,
    resources: PolicyResources,
    *,
    sampler: Literal["vllm", "transformers"],
    available: int,
    on_cpu: bool,
    responses: int,
    minibatch: int,
    frozen: int = 0,
) -> Workers:
    """available: bytes of a device. responses: of one step. minibatch: rows of one at most. frozen: bytes of models
    that every trainer holds whole."""
    width = WIDTH[settings.dtype]
    trainer = memory_of(shape, settings, sampling, devices=resources.trainers, rows=1)
    split = resources.tensor_parallel
    longest = sampling.max_prompt_tokens + sampling.max_response_tokens
    token = -(-shape.cached * width // min(split, shape.kv_heads))
    asked = -(-responses // resources.samplers)
    if sampler == "transformers":
        own = memory_of(shape, settings, sampling, rows=asked)
        weights, workspace, cache = own.weights, own.casts + own.logits, own.cache
        share = weights + workspace + cache
    else:
        weights = -(-width * shape.parameters // split)
        workspace = 0 if on_cpu else _WORKSPACE
        share = weights + _CPU_CACHE if on_cpu else int(resources.sampler_memory * available)
    return Workers(
        trainers=resources.trainers,
        samplers=resources.samplers,
        tensor_parallel=split,
        shared=resources.devices == "shared",
        trainer=replace(trainer, cache=0),
        frozen=frozen,
        chunk=width * max(shape.head, shape.matrices // shape.layers),
        available=available,
        share=share,
        sampler_weights=weights,
        workspace=workspace,
        token=token,
        longest=longest,
        asked=asked,
        rows=-(-minibatch // resources.trainers),
    )

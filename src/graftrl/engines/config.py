"""Settings of the ray engine: what each policy gets of a cluster, and how far a sampler may be from its trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from graftrl.settings import Settings


class PolicyResources(Settings):
    """What one policy runs on. A device is a GPU where the cluster has any, else a CPU.

    trainers: processes that hold a part of the weights each and train together; a device each.
    samplers: copies of the model that sample; the prompts are spread over them.
    tensor_parallel: devices of one sampler.
    devices: "own" for samplers besides the trainers' devices; "shared" for the same ones: a sampler then sleeps while
        its policy trains. memory_share: of a device's memory for the sampler; none: 0.85 of its own, 0.4 of a shared
        one.
    """

    trainers: int = Field(1, ge=1)
    samplers: int = Field(1, ge=1)
    tensor_parallel: int = Field(1, ge=1)
    devices: Literal["own", "shared"] = "own"
    memory_share: float | None = Field(None, gt=0, le=1)

    @model_validator(mode="after")
    def _shared_devices_are_enough(self) -> PolicyResources:
        if self.devices == "shared" and (self.tensor_parallel > 1 or self.samplers > self.trainers):
            raise ValueError(
                f"devices: shared puts each sampler on one trainer's device, so that tensor_parallel must be 1 (it is "
                f"{self.tensor_parallel}) and samplers ({self.samplers}) at most trainers ({self.trainers}); lower "
                "them, or set devices: own"
            )
        return self

    @property
    def sampler_memory(self) -> float:
        return self.memory_share or (0.85 if self.devices == "own" else 0.4)


class RaySettings(Settings):
    """Read by `engine: ray` alone.

    address: of a running Ray cluster, or "auto" to find it; none: Ray starts on this machine and ends with the run.
    sampler: "vllm"; or "transformers", which samples as the local engine does: slower, and of every model that trains.
    resources: per model; what is not named takes the defaults.
    sync_tolerance: most nats per token, on average over a few sequences, between sampler and trainer after a weight
        sync; none: 0.01 in float32, 0.2 in bfloat16.
    weight_sync: how new weights reach the samplers. "direct": from trainer to sampler, a layer at a time (NCCL between
        GPUs, a GPU's own memory with devices: shared); "host": through the hosts' memory; "auto": direct on GPUs.
    timeout_s: how long one piece of work of a worker may take; beyond it the worker counts as lost.
    restart_s: how long workers that take a lost one's place may take to find devices and to load.
    lost_peer: what follows when a model's workers cannot come back, while other models' can: "alone" goes on without
        the model; "stop" ends the run.
    """

    address: str | None = None
    sampler: Literal["vllm", "transformers"] = "vllm"
    resources: dict[str, PolicyResources] = Field(default_factory=dict)
    sync_tolerance: float | None = Field(None, gt=0)
    weight_sync: Literal["auto", "direct", "host"] = "auto"
    timeout_s: float = Field(3600.0, gt=0)
    restart_s: float = Field(600.0, gt=0)
    lost_peer: Literal["alone", "stop"] = "alone"

    @model_validator(mode="after")
    def _sampler_can(self) -> RaySettings:
        parallel = sorted(name for name, of_one in self.resources.items() if of_one.tensor_parallel > 1)
        if self.sampler == "transformers" and parallel:
            raise ValueError(
                f"sampler: transformers has one device, but resources.{parallel[0]}.tensor_parallel is "
                f"{self.resources[parallel[0]].tensor_parallel}; use vllm"
            )
        return self

    def of(self, model: str) -> PolicyResources:
        return self.resources.get(model, PolicyResources())

    def tolerance(self, dtype: str) -> float:
        return self.sync_tolerance or (0.01 if dtype == "float32" else 0.2)

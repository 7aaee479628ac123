"""A policy whose weights, gradients and optimizer are spread over processes by PyTorch's FSDP2 (`fully_shard`).

A minibatch's gradient is the sum of all ranks' parts, each with the factors of the whole minibatch: the token mean is
over all ranks' tokens, whoever passes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from graftrl.engines.ray.spread import deal
from graftrl.policies.config import ModelSettings
from graftrl.policies.ranks import Microbatch, Ranks

T = TypeVar("T")


class _Pass(nn.Module):
    """The root of the sharded modules: its forward pass is whatever work the policy does with the whole model."""

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, work: Callable[[], T]) -> T:
        return work()


class ShardedRanks(Ranks):
    """One rank of a one-dimensional mesh. The process group must exist."""

    shards = True

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.rank, self.size = mesh, mesh.get_local_rank(), mesh.size()
        self.writes = self.rank == 0
        self._root: Any = None

    def place(self, causal_lm: Any, settings: ModelSettings) -> None:
        """Shard each layer by itself, and embeddings, last norm and head together, whole for the length of a pass.

        In bfloat16 the weights are gathered in that precision, and gradients are added up in float32.
        """
        options: dict[str, Any] = {"mesh": self.mesh}
        if settings.dtype == "bfloat16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        layers = _layers(causal_lm)
        for layer in layers:
            fully_shard(layer, **options)
        self._root = fully_shard(_Pass(causal_lm), reshard_after_forward=False, **options)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # a sum: the rows' factors hold the mean already
                module.set_force_sum_reduction_for_comms(True)

    def deal(self, lengths: Sequence[int], max_tokens: int) -> list[Microbatch]:
        return deal(lengths, self.size, max_tokens)[self.rank]

    def forward(self, work: Callable[[], T]) -> T:
        result: T = self._root(work)
        if not torch.is_grad_enabled():  # no backward pass will do it, and the next pass must not find old weights
            self._root.reshard()
        return result

    def backward(self, loss: Tensor, logprobs: Tensor) -> None:
        """Always a pass, for the other ranks' sake, though this microbatch may add nothing."""
        (loss if loss.requires_grad else loss + 0.0 * logprobs.sum()).backward()

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return float(whole(norm))

    def whole_weights(self, causal_lm: Any) -> dict[str, Tensor]:
        """On every rank, in the memory of its host; layers that share a weight share it here too."""
        known: dict[int, Tensor] = {}
        weights = {}
        for name, value in causal_lm.state_dict(keep_vars=True).items():
            if id(value) not in known:
                known[id(value)] = whole(value.detach()).cpu()
            weights[name] = known[id(value)]
        return weights

    def whole_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = optimizer.state_dict()
        moments = {
            index: {key: whole(value).cpu() if isinstance(value, Tensor) else value for key, value in of_one.items()}
            for index, of_one in state["state"].items()
        }
        return {**state, "state": moments}

    def own_state(self, state: dict[str, Any], parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
        moments = {
            index: {key: _like(value, parameters[index]) for key, value in of_one.items()}
            for index, of_one in state["state"].items()
        }
        return {**state, "state": moments}


def _layers(causal_lm: Any) -> list[nn.Module]:
    """The blocks that transformers says must not be split; the whole model is one where it names none."""
    names = set(causal_lm._no_split_modules or ())
    return [module for module in causal_lm.modules() if type(module).__name__ in names]


def whole(value: Tensor) -> Tensor:
    """All shards together; every rank asks at the same time."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _like(value: Any, parameter: nn.Parameter) -> Any:
    """Sharded as the parameter, where it has the parameter's shape."""
    if isinstance(value, Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value

"""A policy whose weights, gradients and optimizer are spread over processes by PyTorch's FSDP2 (`fully_shard`).

A minibatch's gradient is the sum of all ranks' parts, each with the factors of the whole minibatch: the token mean is
over all ranks' tokens, whoever passes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import empty as empty_dtensor

from graftrl.engines.ray.spread import deal
from graftrl.errors import GraftrlError
from graftrl.policies import shards
from graftrl.policies.config import ModelSettings
from graftrl.policies.loading import Loaded, load, load_skeleton, split_head, switch_off_dropout
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
        self._whole: nn.Module | None = None  # on rank 0, until its weights are spread
        self._parts: Path | None = None  # of a checkpoint, from which the weights come
        self._bare = False  # weights are still to come
        self._group: Any = dist.new_group(backend="gloo")

    @property
    def host_group(self) -> Any:
        return self._group

    def load(self, name: str, settings: ModelSettings, device: torch.device) -> Loaded:
        """The model without weights, which `place` brings, so that no device ever holds it whole.

        Rank 0 alone reads it, into its host's memory, and makes the checks of `loading.load` there. Of a checkpoint in
        parts no rank does: its weights were checked before they were trained.
        """
        skeleton, codec = load_skeleton(name, settings, torch.float32)
        notes: tuple[str, ...] = ()
        if shards.is_sharded(Path(settings.path)):
            self._parts = Path(settings.path)
        else:
            codec.prepend_bos, notes, bare = self._read_whole(name, settings, skeleton)
            if not bare:  # every rank's host holds it; devices get a layer at a time all the same
                return load(name, settings, torch.device("cpu"))
        self._bare = True
        switch_off_dropout(skeleton)
        skeleton.eval()
        return Loaded(skeleton, *split_head(name, settings, skeleton), codec, notes)

    def _read_whole(
        self, name: str, settings: ModelSettings, skeleton: nn.Module
    ) -> tuple[bool, tuple[str, ...], bool]:
        """Whether prompts get a BOS, notes, and whether the skeleton is the model's in all but weights and buffers."""
        told: list[Any] = [None]
        if self.rank == 0:
            try:
                loaded = load(name, settings, torch.device("cpu"))
                bare = _same_tensors(loaded.causal_lm, skeleton)
                self._whole = loaded.causal_lm if bare else None
                told = [(loaded.codec.prepend_bos, loaded.notes, bare)]
            except GraftrlError as error:
                told = [error]
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        if isinstance(told[0], GraftrlError):
            raise told[0]
        found: tuple[bool, tuple[str, ...], bool] = told[0]
        return found

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
        if self._bare:
            self._fill(causal_lm)
            self._whole, self._bare = None, False

    @torch.no_grad()
    def _fill(self, causal_lm: nn.Module) -> None:
        """Give the sharded model its weights and buffers, from rank 0 or a checkpoint's parts, a tensor at a time."""
        saved = {} if self._parts is None else shards.read_buffers(self._parts)
        for name, buffer in list(causal_lm.named_buffers(remove_duplicate=False)):
            owner, leaf = _owner(causal_lm, name)
            value = saved[name].to(self.mesh.device_type) if saved else self._from_rank_0(name, buffer)
            owner._buffers[leaf] = value
        known: dict[int, nn.Parameter] = {}
        for name, old in list(causal_lm.named_parameters(remove_duplicate=False)):
            if id(old) not in known:
                assert isinstance(old, DTensor)
                if self._parts is None:
                    value = distribute_tensor(
                        self._from_rank_0(name, old), self.mesh, old.placements, src_data_rank=None
                    )
                else:
                    value = empty_dtensor(old.shape, dtype=old.dtype, device_mesh=self.mesh, placements=old.placements)
                known[id(old)] = nn.Parameter(value, requires_grad=old.requires_grad)
            owner, leaf = _owner(causal_lm, name)
            setattr(owner, leaf, known[id(old)])  # FSDP takes what it finds before the first pass
        if self._parts is not None:
            shards.read(self._parts, shards.named(causal_lm), self._group)

    def _from_rank_0(self, name: str, like: Tensor) -> Tensor:
        if self._whole is not None:
            owner, leaf = _owner(self._whole, name)
            value = getattr(owner, leaf).detach().to(self.mesh.device_type).contiguous()
        else:
            value = torch.empty(like.shape, dtype=like.dtype, device=self.mesh.device_type)
        dist.broadcast(value, group=self.mesh.get_group(), group_src=0)
        return value

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
        """On rank 0, in the memory of its host; layers that share a weight share it here too. Others have the names."""
        known: dict[int, Tensor] = {}
        weights = {}
        for name, value in causal_lm.state_dict(keep_vars=True).items():
            if id(value) not in known:
                gathered = whole(value.detach())
                known[id(value)] = gathered.cpu() if self.writes else gathered.new_empty(0)
            weights[name] = known[id(value)]
        return weights

    def whole_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = optimizer.state_dict()

        def gathered(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            full = whole(value)
            return full.cpu() if self.writes else None

        moments = {
            index: {key: gathered(value) for key, value in of_one.items()} for index, of_one in state["state"].items()
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
    """This rank's part, where the value has the parameter's shape; every rank has the same value."""
    if isinstance(value, Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _same_tensors(model: nn.Module, skeleton: nn.Module) -> bool:
    """Whether weights and buffers are all that the skeleton lacks, by the same names, shared in the same places."""

    def shape(of: nn.Module) -> dict[str, Any]:
        first: dict[int, str] = {}
        parameters = {
            name: (first.setdefault(id(p), name), p.shape, p.dtype)
            for name, p in of.named_parameters(remove_duplicate=False)
        }
        return parameters | {name: (b.shape, b.dtype) for name, b in of.named_buffers(remove_duplicate=False)}

    others = (value for module in skeleton.modules() for value in vars(module).values() if isinstance(value, Tensor))
    return shape(model) == shape(skeleton) and not any(value.is_meta for value in others)

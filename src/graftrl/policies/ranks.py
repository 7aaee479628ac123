"""The processes that train one policy together, as the policy's code sees them: which rows are whose, and a forward
pass in which the weights are whole. This is the policy of one process; `engines.ray.sharding` has the other case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from graftrl.policies.config import ModelSettings
from graftrl.policies.loading import Loaded, load
from graftrl.policies.microbatch import cut

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Indices of some rows. counts: False for a pass that only keeps step with other processes; it adds nothing."""

    rows: list[int]
    counts: bool = True


class Ranks:
    """One process, which holds all weights and takes all rows.

    writes: whether this process writes checkpoints. shards: whether weights are spread over processes, so that every
        forward and backward pass is one that all of them make.
    """

    writes = True
    shards = False

    def load(self, name: str, settings: ModelSettings, device: torch.device) -> Loaded:
        """The model, as `loading.load`; weights that will be spread may be missing until `place`."""
        return load(name, settings, device)

    def place(self, causal_lm: Any, settings: ModelSettings) -> None:
        """Spread the weights; before the optimizer is made."""

    def deal(self, lengths: Sequence[int], max_tokens: int) -> list[Microbatch]:
        """This process's microbatches of a minibatch whose rows have these lengths."""
        return [Microbatch(rows) for rows in cut(lengths, max_tokens)]

    def forward(self, work: Callable[[], T]) -> T:
        """Do the work of a forward pass of the whole model, head included."""
        return work()

    def backward(self, loss: Tensor, logprobs: Tensor) -> None:
        """Add up the gradient of a microbatch's loss. logprobs: what the pass computed, used by the loss or not."""
        if loss.requires_grad:
            loss.backward()

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Scale all gradients to at most this norm; the norm before, over all weights."""
        return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))

    def whole_weights(self, causal_lm: Any) -> dict[str, Tensor] | None:
        """The whole weights by name where the model holds only parts of them, else None."""
        return None

    def whole_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's `state_dict`, every tensor whole."""
        return optimizer.state_dict()

    def own_state(self, state: dict[str, Any], parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
        """The inverse of `whole_state`: this process's part."""
        return state

    @property
    def host_group(self) -> Any:
        """A process group through the hosts' memory for work beside training; None of one process."""
        return None

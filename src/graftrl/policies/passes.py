"""Forward passes of one model over rows: precision, microbatches, and what rows share.

Shapes: N response tokens of some rows, side by side, H hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftrl.errors import ModelError
from graftrl.policies.config import WeightsSettings
from graftrl.policies.costs import ModelShape, attention_operations, shape_of
from graftrl.policies.loading import Loaded
from graftrl.policies.logprobs import token_logprobs
from graftrl.policies.microbatch import Padded, pad
from graftrl.policies.prefix import (
    PROBE_TOKENS,
    WORTH_IT,
    SharedPrompts,
    common_start,
    hidden_of_responses,
    longest_shared,
    shared_prompts,
    sharing_difference,
)
from graftrl.policies.ranks import Ranks
from graftrl.policies.tree import PrefixTree, hidden_of_tree, prefix_tree, tree_difference
from graftrl.rollout import Row

Shared = SharedPrompts | PrefixTree

SAME_HIDDEN = 1e-4  # relative; float32 rounding stays near 1e-6


@dataclass
class Passes:
    """longest_shared: tokens of a row that may share its prompt's pass with others; 0: none share.
    tree_shape: the model's, where rows may pass as a tree; None: they may not.
    ranks: where there are several, each reads its own of the rows, and all of them are given the same rows.
    """

    loaded: Loaded
    settings: WeightsSettings
    device: torch.device
    longest_shared: int = 0
    tree_shape: ModelShape | None = None
    ranks: Ranks = field(default_factory=Ranks)

    def probe_sharing(self) -> dict[str, float]:
        """Let rows share prompts, and pass as a tree, where that reproduces whole rows on a few ids.

        Returns:
            the relative difference found there, by what was tried; nothing where sharing is not possible, or would not
            pay.
        """
        decoder: Any = self.loaded.decoder
        limit = longest_shared(decoder)
        # On a GPU the attention mask that sharing needs would rule out the fastest attention kernel.
        if self.device.type != "cpu" or limit < PROBE_TOKENS:
            return {}
        found = {"pass over shared prompts": sharing_difference(decoder)}
        self.longest_shared = limit if found["pass over shared prompts"] <= SAME_HIDDEN else 0
        # Without fused attention every layer would keep the scores between all tokens of a tree.
        if self.longest_shared and decoder.config.get_text_config()._attn_implementation == "sdpa":
            found["pass over a tree of rows"] = tree_difference(decoder)
            if found["pass over a tree of rows"] <= SAME_HIDDEN:
                self.tree_shape = shape_of(self.loaded.causal_lm)
        return found

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.settings.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def shared(self, rows: Sequence[Row]) -> Shared | None:
        """What the rows share, in the form that passes fastest; None: they pass whole."""
        prompts = shared_prompts(rows, self.device, self.longest_shared)
        longest = max(map(row_length, rows))
        if self.tree_shape is None or longest > self.longest_shared:
            return prompts
        tree = prefix_tree(rows, self.device)
        if tree is None:
            return prompts
        if prompts is None:
            other = self._operations(len(rows) * longest, longest / 2)
        else:
            other = self._operations(prompts.cells, prompts.longest)
        return tree if self._operations(tree.tokens, tree.tokens) <= WORTH_IT * other else prompts

    def _operations(self, tokens: int, seen: float) -> float:
        """Of a forward pass over the tokens, padding included, each of which sees so many."""
        assert self.tree_shape is not None
        return 2 * self.tree_shape.matrices * tokens + attention_operations(self.tree_shape, tokens * seen)

    def common_start(self, prompts: Sequence[NDArray[np.int64]], new_tokens: int) -> int:
        """Tokens that all prompts begin with and that may be read once before responses of `new_tokens` are sampled."""
        longest = max(len(ids) for ids in prompts) + new_tokens
        return common_start(prompts) if longest <= self.longest_shared else 0

    def hidden(self, padded: Padded, shared: Shared | None) -> Tensor:
        """[N, H]: the final hidden states that predict the padded rows' response tokens; differentiable."""
        if isinstance(shared, PrefixTree):
            return hidden_of_tree(self.loaded.decoder, shared)
        if shared is None:
            hidden = self.loaded.decoder(input_ids=padded.token_ids_BS, use_cache=False).last_hidden_state
            positions_N = padded.positions_N
        else:
            hidden, positions_N = hidden_of_responses(self.loaded.decoder, shared), padded.cells_N
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions_N)

    def logprobs(self, hidden_NH: Tensor, targets_N: Tensor) -> Tensor:
        """float32 [N]: log-probabilities of the targets; differentiable."""
        return token_logprobs(hidden_NH, targets_N, self.loaded.head, self.settings.logit_elements)

    @torch.no_grad()
    def read(self, rows: Sequence[Row]) -> list[Tensor]:
        """[T, H] per row, without gradients."""
        return self._each(rows, lambda hidden_NH, _: hidden_NH)

    @torch.no_grad()
    def score(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """log pi(token) of every response token, float32 [T] per row; of several ranks, empty for the others' rows."""
        scores = self._each(rows, lambda hidden_NH, padded: self.logprobs(hidden_NH, padded.targets_N))
        return [values_T.cpu().numpy() for values_T in scores]

    def _each(self, rows: Sequence[Row], work: Callable[[Tensor, Padded], Tensor]) -> list[Tensor]:
        """What `work` makes of the hidden states of the response tokens, per row; empty for other ranks' rows."""
        found = [torch.empty(0)] * len(rows)
        with self.precision():
            for batch in self.ranks.deal([row_length(row) for row in rows], self.settings.microbatch_tokens):
                members = [rows[i] for i in batch.rows]
                flat = self.ranks.forward(partial(self._work_on, members, work))
                if batch.counts:
                    lengths = [len(row.response_token_ids) for row in members]
                    for i, values in zip(batch.rows, flat.split(lengths), strict=True):
                        found[i] = values
        return found

    def _work_on(self, members: Sequence[Row], work: Callable[[Tensor, Padded], Tensor]) -> Tensor:
        padded = pad(members, self.device)
        return work(self.hidden(padded, self.shared(members)), padded)


def row_length(row: Row) -> int:
    """Tokens of prompt and response."""
    return len(row.prompt_token_ids) + len(row.response_token_ids)


def find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {name!r} is not usable here: {str(error).splitlines()[0]}") from error
    return device

"""The order of prompts: a pure function of the seed, so a resumed run goes on exactly where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from graftrl.errors import ConfigError, DataError
from graftrl.methods.base import CodecLike
from graftrl.rollout import Prompt
from graftrl.seeds import generator


class PromptStream:
    """Batches 0, 1, 2, ... of `size` prompts; every epoch is a new permutation and drops its last partial batch.

    Raises:
        ConfigError: fewer prompts than a batch holds.
    """

    def __init__(self, prompts: Sequence[Prompt], size: int, seed: int) -> None:
        if len(prompts) < size:
            raise ConfigError(
                f"training.prompts_per_step is {size} but the task has only {len(prompts)} usable training prompts"
            )
        self.prompts, self.size, self.seed = prompts, size, seed
        self.batches_per_epoch = len(prompts) // size
        self._epoch = -1
        self._permutation: NDArray[np.int64] = np.empty(0, np.int64)

    def batch(self, index: int) -> list[Prompt]:
        epoch, within = divmod(index, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = generator(self.seed, "prompt order", epoch).permutation(len(self.prompts))
        chosen = self._permutation[within * self.size : (within + 1) * self.size]
        return [self.prompts[int(i)] for i in chosen]


def prompt_length(codec: CodecLike) -> Callable[[Prompt], int]:
    """A prompt's length in one model's tokens."""
    return lambda prompt: len(codec.prompt_token_ids(prompt))


def within_limit(
    prompts: Sequence[Prompt], lengths: Sequence[Callable[[Prompt], int]], limit: int, what: str
) -> tuple[Sequence[Prompt], list[str]]:
    """The prompts that no model finds empty or longer than `limit` tokens, and a note about the others.

    A lazy (procedural) sequence is not read here: its prompts are checked as they come, by `check_lengths`.

    Raises:
        DataError: none is left.
    """
    if not isinstance(prompts, list | tuple):
        return prompts, []
    kept: list[Prompt] = []
    dropped: list[Prompt] = []
    for prompt in prompts:
        fits = all(1 <= length(prompt) <= limit for length in lengths)
        (kept if fits else dropped).append(prompt)
    if not kept:
        raise DataError(
            f"{what}: no prompt has between 1 and sampling.max_prompt_tokens={limit} tokens; raise the limit"
        )
    if not dropped:
        return kept, []
    first = ", ".join(prompt.id for prompt in dropped[:3])
    return kept, [
        f"{what}: {len(dropped)} of {len(prompts)} prompts exceed {limit} tokens and are left out ({first} ...)"
    ]


def check_lengths(prompts: Sequence[Prompt], lengths: Sequence[Callable[[Prompt], int]], limit: int) -> None:
    """Raises DataError for a prompt that a model finds empty or longer than `limit` tokens."""
    for prompt in prompts:
        for length in lengths:
            if not 1 <= length(prompt) <= limit:
                raise DataError(
                    f"prompt {prompt.id!r} has {length(prompt)} tokens; sampling.max_prompt_tokens is {limit}"
                )

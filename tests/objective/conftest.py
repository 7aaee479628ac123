"""Random minibatches of ragged rows in float64, and rows as a receiver trains on them."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings

from graftrl.rollout import Row

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")


@pytest.fixture(scope="session")
def make_row() -> Callable[..., Row]:
    def build(tokens: int, *, advantages=1.0, kind="own", **fields) -> Row:
        return Row(
            prompt_id="q",
            prompt_token_ids=np.array([1]),
            response_token_ids=np.arange(tokens),
            advantages=advantages,
            kind=kind,
            source="A",
            **fields,
        )

    return build


@pytest.fixture(scope="session")
def make_minibatch() -> Callable[..., SimpleNamespace]:
    """logprobs (a leaf), old, ref: [rows, tokens]; advantages: [rows, 1]; mask: bool; ratios lie around the clips."""

    def build(lengths=(5, 1, 7, 3, 2, 6), *, seed=0) -> SimpleNamespace:
        generator = torch.Generator().manual_seed(seed)
        shape = (len(lengths), max(lengths))

        def normal(*size):
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        old = -normal(*shape).abs()
        return SimpleNamespace(
            lengths=np.array(lengths),
            mask=torch.arange(shape[1]) < torch.tensor(lengths)[:, None],
            old=old,
            ref=old + 0.3 * normal(*shape),
            logprobs=(old + 0.4 * normal(*shape)).requires_grad_(),
            advantages=normal(shape[0], 1),
        )

    return build

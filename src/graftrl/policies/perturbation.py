"""Seeded Gaussian directions in weight space, for evolution strategies: regenerated from their seeds, never stored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn


@torch.no_grad()
def add_directions(parameters: Sequence[nn.Parameter], seeds: Sequence[int], coefficients: Sequence[float]) -> None:
    """theta += sum_i coefficients_i * eps_i in place, eps_i standard normal from seeds_i.

    A direction is a function of its seed, the parameters' shapes and the kind of device. Summed in float32; one
    parameter's worth of memory is needed besides.
    """
    if not parameters:
        return
    device = parameters[0].device
    generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]
    for parameter in parameters:
        total = torch.zeros(parameter.shape, dtype=torch.float32, device=device)
        for generator, coefficient in zip(generators, coefficients, strict=True):
            total.add_(torch.randn(parameter.shape, generator=generator, device=device), alpha=coefficient)
        parameter.add_(total)


@contextlib.contextmanager
def perturbed(parameters: Sequence[nn.Parameter], seed: int, scale: float) -> Iterator[None]:
    """The weights moved by scale * eps for as long as the context lasts, and restored bit for bit from a copy.

    Subtracting the direction again would leave a rounding residue that adds up over a population.
    """
    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        add_directions(parameters, [seed], [scale])
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)

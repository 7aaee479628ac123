"""Sampling, and the log-probability of every sampled token.

Each prompt is read once and its cache repeated for the n responses; finished responses leave the batch (decoding.py).
A token is drawn by inverting the cumulative distribution with one uniform number: no random number per vocabulary
entry.
Shapes: R responses under way, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftrl.policies.codec import Codec
from graftrl.policies.config import SamplingSettings
from graftrl.policies.decoding import Sequences
from graftrl.policies.logprobs import Head, compute_dtype
from graftrl.rollout import Response

_BLOCK = 512  # vocabulary entries per block of the two-level search
TILED_ABOVE = 4 * _BLOCK  # larger vocabularies are searched in two levels, on CPUs by tiles
_CACHED = 1 << 18  # elements of a tile in a core's cache (1 MiB)


@dataclass(frozen=True, slots=True)
class Sampled:
    """token_ids int64 [T], logprobs float32 [T]; stopped: the last id is an EOS that the model emitted."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    stopped: bool

    def response(self, codec: Codec) -> Response:
        """Not graded yet. Its arrays can be written to, which those of another process cannot."""
        return Response(
            text=codec.decode_response(self.token_ids, stopped=self.stopped),
            token_ids=np.require(self.token_ids, requirements="W"),
            logprobs=np.require(self.logprobs, requirements="W"),
            finish_reason="stop" if self.stopped else "length",
        )


def draw(logits_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row from softmax(logits), and its log-probability in float32. `logits_RV` is overwritten.

    Two-level inverse transform: block masses, then one block. Sums are accumulated in float64, so every token keeps its
    probability to float32 precision; a token of probability 0 is never drawn.

    Args:
        logits_RV: float32.
        uniform_R: float64 in [0, 1).
    """
    vocabulary = logits_RV.shape[-1]
    mass = logits_RV.sub_(logits_RV.amax(dim=-1, keepdim=True)).exp_()
    if vocabulary <= TILED_ABOVE:
        below = mass.cumsum(-1, dtype=torch.float64)
        total = below[:, -1]
        chosen = _first_above(below, uniform_R * total)
    else:
        whole = vocabulary - vocabulary % _BLOCK
        blocks = mass[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(-1)
        if whole < vocabulary:
            blocks = torch.cat([blocks, mass[:, whole:].sum(-1, keepdim=True)], dim=-1)
        below = blocks.double().cumsum(-1)
        total = below[:, -1]
        block = _first_above(below, uniform_R * total)[:, None]
        rest = uniform_R[:, None] * total[:, None] - below.gather(-1, block) + blocks.double().gather(-1, block)
        columns = block * _BLOCK + torch.arange(_BLOCK, device=mass.device)
        inside = mass.gather(-1, columns.clamp(max=vocabulary - 1)).double()
        inside = inside.masked_fill(columns >= vocabulary, 0.0).cumsum(-1)
        chosen = block.squeeze(-1) * _BLOCK + _first_above(inside, rest.squeeze(-1))
    probability = mass.gather(-1, chosen[:, None]).squeeze(-1).double() / total
    return chosen, probability.log().float()


def draw_tiled(hidden_RH: Tensor, head: Head, uniform_R: Tensor, max_elements: int) -> tuple[Tensor, Tensor]:
    """The same draw as `draw(head.logits(hidden_RH), uniform_R)` without the logits ever being in memory together.

    A first pass over tiles of the vocabulary finds each block's mass, a second one computes the chosen block again. On
    a CPU this is several times faster: a tile stays in the cache.
    """
    vocabulary, rows = head.weight.shape[0], len(hidden_RH)
    width = max(1, min(max_elements, _CACHED) // (rows * _BLOCK)) * _BLOCK
    tops, masses = [], []
    for start in range(0, vocabulary, width):
        logits = head.columns(start, start + width).logits(hidden_RH)
        whole = logits.shape[-1] - logits.shape[-1] % _BLOCK
        for blocks in (logits[:, :whole].unflatten(-1, (-1, _BLOCK)), logits[:, None, whole:]):
            if blocks.numel():
                top = blocks.amax(dim=-1, keepdim=True)
                tops.append(top.squeeze(-1))
                masses.append(blocks.sub_(top).exp_().sum(-1))
    top = torch.cat(tops, dim=-1)
    highest = top.amax(dim=-1, keepdim=True)
    mass = torch.cat(masses, dim=-1).double() * (top - highest).double().exp()
    below = mass.cumsum(-1)
    total = below[:, -1]
    block = _first_above(below, uniform_R * total)
    rest = uniform_R * total - (below - mass).gather(-1, block[:, None]).squeeze(-1)
    inside = torch.full((rows, _BLOCK), -torch.inf, device=hidden_RH.device)
    for row, start in enumerate((block * _BLOCK).tolist()):
        logits = head.columns(start, start + _BLOCK).logits(hidden_RH[row])
        inside[row, : len(logits)] = logits
    inside = (inside - highest).double()
    chosen = _first_above(inside.exp().cumsum(-1), rest)
    logprobs = inside.gather(-1, chosen[:, None]).squeeze(-1) - total.log()
    return block * _BLOCK + chosen, logprobs.float()


def _next_tokens(
    hidden_RH: Tensor, head: Head, settings: SamplingSettings, uniform_R: Tensor, max_elements: int
) -> tuple[Tensor, Tensor]:
    """Draw one token for every row, with at most `max_elements` logits in memory at once."""
    vocabulary = head.weight.shape[0]
    tiled = settings.is_plain and hidden_RH.device.type == "cpu" and vocabulary > TILED_ABOVE
    chunk = max(1, min(max_elements, _CACHED) // _BLOCK if tiled else max_elements // vocabulary)
    drawn = []
    for hidden, uniform in zip(hidden_RH.split(chunk), uniform_R.split(chunk), strict=True):
        if tiled:
            drawn.append(draw_tiled(hidden, head, uniform, max_elements))
        else:
            logits = head.logits(hidden)
            drawn.append(draw(logits if settings.is_plain else truncate(logits, settings), uniform))
    ids, logprobs = zip(*drawn, strict=True)
    return torch.cat(ids), torch.cat(logprobs)


class _Uniforms:
    """The random numbers of n responses to each prompt: of one generator in the order of use, or of one a prompt."""

    def __init__(
        self, generator: torch.Generator | Sequence[torch.Generator], n: int, tokens: int, device: torch.device
    ) -> None:
        self._options: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self._generator = generator if isinstance(generator, torch.Generator) else None
        if not isinstance(generator, torch.Generator):
            self._all_RT = torch.cat([torch.rand(n, tokens, generator=one, **self._options) for one in generator])

    def __call__(self, rows_R: Tensor, token: int) -> Tensor:
        """float64 [R] in [0, 1): for this token of the responses with these indices."""
        if self._generator is None:
            return self._all_RT[rows_R, token]
        return torch.rand(len(rows_R), generator=self._generator, **self._options)


def _first_above(cumulative: Tensor, value: Tensor) -> Tensor:
    """Index of the first entry above value; rounding at the top end falls to the last entry with mass."""
    total = cumulative[:, -1]
    below_total = torch.minimum(value, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, below_total[:, None], right=True).squeeze(-1)


def truncate(logits_RV: Tensor, settings: SamplingSettings) -> Tensor:
    """Temperature, top-k and top-p, for evaluation. A temperature of 0 keeps only the most likely token."""
    if settings.temperature == 0:
        best = logits_RV.argmax(dim=-1, keepdim=True)
        return torch.full_like(logits_RV, -torch.inf).scatter_(-1, best, 0.0)
    logits = logits_RV / settings.temperature
    if 0 < settings.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(settings.top_k).values[:, -1:], -torch.inf)
    if settings.top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.scatter(-1, index, ordered.masked_fill(mass_before >= settings.top_p, -torch.inf))
    return logits


@torch.no_grad()
def sample_responses(
    sequences: Sequences,
    head: Head,
    prompts: int,
    n: int,
    *,
    settings: SamplingSettings,
    eos_ids: Sequence[int],
    generator: torch.Generator | Sequence[torch.Generator],
    max_elements: int,
) -> list[list[Sampled]]:
    """n responses to each of the `prompts` prompts that `sequences` was made of, in prompt order.

    Log-probabilities are those of the distribution sampled from: the model's own when `settings.is_plain`.

    Args:
        generator: of all prompts' random numbers; or one for each prompt, so that whichever prompts are read beside it
            change nothing but rounding.
    """
    hidden_RH = sequences.read_prompts()
    uniforms = _Uniforms(generator, n, settings.max_response_tokens, hidden_RH.device)
    device = hidden_RH.device
    head = head.cast(compute_dtype(hidden_RH))
    sequences.repeat(n)
    hidden_RH = hidden_RH.repeat_interleave(n, dim=0)
    total, limit = prompts * n, settings.max_response_tokens
    tokens = torch.zeros(total, limit, dtype=torch.int64, device=device)
    logprobs = torch.zeros(total, limit, dtype=torch.float32, device=device)
    lengths = torch.full((total,), limit, dtype=torch.int64, device=device)
    stopped = torch.zeros(total, dtype=torch.bool, device=device)
    eos = torch.tensor(sorted(eos_ids), dtype=torch.int64, device=device)
    rows = torch.arange(total, device=device)  # which response each row of the batch is
    alive = torch.ones(total, dtype=torch.bool, device=device)  # rows of the batch not yet finished
    for t in range(limit):
        chosen, chosen_logprobs = _next_tokens(hidden_RH, head, settings, uniforms(rows, t), max_elements)
        tokens[rows, t], logprobs[rows, t] = chosen, chosen_logprobs
        ends = torch.isin(chosen, eos) & alive
        if ends.any():
            lengths[rows[ends]], stopped[rows[ends]] = t + 1, True
            alive &= ~ends
            count = int(alive.sum())
            if count == 0:
                break
            if count <= 0.8 * len(rows):  # finished rows leave; copying the cache at every end would cost more
                index = alive.nonzero().squeeze(-1)
                sequences.keep_rows(index)
                rows, alive, chosen = rows[index], alive[index], chosen[index]
        if t + 1 < limit:
            hidden_RH = sequences.append(chosen)
    tokens_c, logprobs_c = tokens.cpu().numpy(), logprobs.cpu().numpy()
    responses = [
        Sampled(tokens_c[i, :length].copy(), logprobs_c[i, :length].copy(), bool(stop))
        for i, (length, stop) in enumerate(zip(lengths.tolist(), stopped.tolist(), strict=True))
    ]
    return [responses[p * n : (p + 1) * n] for p in range(prompts)]

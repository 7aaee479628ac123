"""Cutting a minibatch into microbatches: rows of similar length together, at most `max_tokens` padded tokens each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graftrl.rollout import Row


def cut(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of the rows of each microbatch; rows times longest row <= max_tokens unless a single row is longer."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        # Lengths fall, so a batch's first row is its longest.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@dataclass(frozen=True, slots=True)
class Padded:
    """Rows side by side, padded on the right: a causal model needs no mask there, and positions are 0, 1, 2, ...

    token_ids_BS: prompt and response. positions_N: flat index into [B * S] of the positions that predict the response
    tokens; targets_N: those tokens; cells_N: flat index of each into [B * T]. mask_BT: True on loss tokens;
    content_mask_BT: the same without a final EOS.
    """

    token_ids_BS: Tensor
    positions_N: Tensor
    targets_N: Tensor
    cells_N: Tensor
    mask_BT: Tensor
    content_mask_BT: Tensor

    def scatter(self, values_N: Tensor) -> Tensor:
        """[N] back to [B, T], 0 on padding; differentiable."""
        flat = torch.zeros(self.mask_BT.numel(), dtype=values_N.dtype, device=values_N.device)
        return flat.index_copy(0, self.cells_N, values_N).view(self.mask_BT.shape)


def pad(rows: Sequence[Row], device: torch.device) -> Padded:
    prompt_B = np.array([len(row.prompt_token_ids) for row in rows])
    response_B = np.array([len(row.response_token_ids) for row in rows])
    width, longest = int((prompt_B + response_B).max()), int(response_B.max())
    token_ids = np.zeros((len(rows), width), dtype=np.int64)
    mask = np.zeros((len(rows), longest), dtype=np.bool_)
    content_mask = np.zeros_like(mask)
    for b, row in enumerate(rows):
        token_ids[b, : prompt_B[b]] = row.prompt_token_ids
        token_ids[b, prompt_B[b] : prompt_B[b] + response_B[b]] = row.response_token_ids
        mask[b, : response_B[b]] = row.loss_mask
        content_mask[b, : response_B[b] - row.ends_with_eos] = row.loss_mask[: response_B[b] - row.ends_with_eos]
    b_N = np.repeat(np.arange(len(rows)), response_B)
    t_N = np.concatenate([np.arange(length) for length in response_B])
    return Padded(
        token_ids_BS=torch.from_numpy(token_ids).to(device),
        positions_N=torch.from_numpy(b_N * width + prompt_B[b_N] + t_N - 1).to(device),
        targets_N=torch.from_numpy(np.concatenate([row.response_token_ids for row in rows])).to(device),
        cells_N=torch.from_numpy(b_N * longest + t_N).to(device),
        mask_BT=torch.from_numpy(mask).to(device),
        content_mask_BT=torch.from_numpy(content_mask).to(device),
    )


def pad_values(values: Sequence[np.ndarray], longest: int, device: torch.device) -> Tensor:
    """Per-row float arrays (or scalars) as float32 [B, T], 0 on padding."""
    out = np.zeros((len(values), longest), dtype=np.float32)
    for b, value in enumerate(values):
        out[b, : len(value)] = value
    return torch.from_numpy(out).to(device)

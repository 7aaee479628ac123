"""Rows as a tree: tokens that follow the same tokens pass through the model once, in one pass without padding.

A group's rows share their prompt, prompts often begin alike, and short answers repeat. One sequence holds every
different beginning once; its attention mask lets a token see those before it in its own row, and no others. Scores are
computed between all tokens of the tree, so that it pays where little else would pass: for short responses.
Shapes: S nodes of the tree (a token and what it follows), N response tokens of the rows, side by side, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graftrl.policies.prefix import difference_to_whole, probe_rows
from graftrl.rollout import Row

MOST_NODES = 2048  # the mask has their square


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """token_ids_S and positions_S: the nodes, each after those it follows. mask_SS: 0 where a node sees another, else
    -inf. predicting_N: the node whose hidden state predicts each response token."""

    token_ids_S: Tensor
    positions_S: Tensor
    mask_SS: Tensor
    predicting_N: Tensor

    @property
    def tokens(self) -> int:
        """Those that pass through the model."""
        return len(self.token_ids_S)


def prefix_tree(rows: Sequence[Row], device: torch.device, most_nodes: int = MOST_NODES) -> PrefixTree | None:
    """None where there are more nodes than `most_nodes`. A response's last token is left out: it predicts nothing."""
    children: dict[tuple[int, int], int] = {}  # by parent and token; a parent of -1: none
    ends: dict[bytes, int] = {}  # node of the last token of each different prompt
    predicting: list[int] = []

    def follow(node: int, token: int) -> int:
        return children.setdefault((node, token), len(children))

    for row in rows:
        key = row.prompt_token_ids.tobytes()
        if key not in ends:
            node = -1
            for token in row.prompt_token_ids.tolist():
                node = follow(node, token)
            ends[key] = node
        node = ends[key]
        predicting.append(node)
        for token in row.response_token_ids[:-1].tolist():
            node = follow(node, token)
            predicting.append(node)
        if len(children) > most_nodes:
            return None
    sees = np.zeros((len(children), len(children)), dtype=np.bool_)
    for node, (parent, _) in enumerate(children):
        if parent >= 0:
            sees[node] = sees[parent]
        sees[node, node] = True
    token_ids = np.fromiter((token for _, token in children), dtype=np.int64, count=len(children))
    return PrefixTree(
        torch.from_numpy(token_ids).to(device),
        torch.from_numpy(sees.sum(axis=1) - 1).to(device),
        torch.from_numpy(np.where(sees, np.float32(0), np.float32(-np.inf))).to(device),
        torch.tensor(predicting, device=device),
    )


def hidden_of_tree(decoder: Any, tree: PrefixTree) -> Tensor:
    """[N, H]: the final hidden states that predict the rows' response tokens; differentiable."""
    hidden_1SH = decoder(
        input_ids=tree.token_ids_S[None],
        attention_mask=tree.mask_SS[None, None],
        position_ids=tree.positions_S[None],
        use_cache=False,
    ).last_hidden_state
    return hidden_1SH[0].index_select(0, tree.predicting_N)


@torch.no_grad()
def tree_difference(decoder: nn.Module) -> float:
    """Largest relative difference of final hidden states between a tree and whole rows, on a few ids."""
    rows = probe_rows(decoder)
    tree = prefix_tree(rows, next(decoder.parameters()).device)
    assert tree is not None
    return difference_to_whole(decoder, rows, hidden_of_tree(decoder, tree))

"""Rows that pass as a tree against whole rows: the same hidden states, log-probabilities and gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import gradients, random_rows

from graftrl.policies.prefix import SharedPrompts
from graftrl.policies.tree import PrefixTree, hidden_of_tree, prefix_tree, tree_difference
from graftrl.rollout import Row

CPU = torch.device("cpu")


def row(prompt: list[int], response: list[int]) -> Row:
    return Row("q", np.array(prompt), np.array(response), 0.0, "own", "")


def rows_of_a_group(n: int = 12):
    """Three prompts that begin alike; some responses begin alike, and two are the same."""
    rows = random_rows(n, seed=4)
    for i, one in enumerate(rows):
        one.prompt_token_ids = np.array([*range(3, 21), *range(20 + i % 3, 21 + 2 * (i % 3))])
    rows[3].response_token_ids[:1] = rows[0].response_token_ids[:1]
    rows[9] = replace(rows[6])
    return rows


def test_a_token_that_follows_the_same_tokens_passes_once():
    tree = prefix_tree([row([5, 6], [7, 8, 9]), row([5, 6], [7, 8, 1]), row([5, 4], [7, 9])], CPU)
    assert tree is not None
    assert tree.token_ids_S.tolist() == [5, 6, 7, 8, 4, 7]  # the last token of a response predicts nothing
    assert tree.positions_S.tolist() == [0, 1, 2, 3, 1, 2]
    assert tree.predicting_N.tolist() == [1, 2, 3, 1, 2, 3, 4, 5]
    seen = [set(np.flatnonzero(of_node == 0)) for of_node in tree.mask_SS.numpy()]
    assert seen == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 4}, {0, 4, 5}]
    assert set(tree.mask_SS.unique().tolist()) == {0.0, -np.inf}


def test_prompts_where_one_begins_the_other_stay_apart():
    tree = prefix_tree([row([5], [6, 7]), row([5, 6], [7, 8])], CPU)
    assert tree is not None
    assert tree.token_ids_S.tolist() == [5, 6, 7]
    assert tree.predicting_N.tolist() == [0, 1, 1, 2]


def test_a_tree_has_at_most_so_many_nodes():
    rows = [row([5, 6], [7, 8, 9])]
    assert prefix_tree(rows, CPU, most_nodes=4) is not None
    assert prefix_tree(rows, CPU, most_nodes=3) is None


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "qwen2", "qwen3", "granite", "gemma3_wide"])
def test_hidden_states_and_gradients_equal_those_of_whole_rows(policy, kind):
    p, rows = policy(kind, microbatch_tokens=1000), rows_of_a_group()
    assert tree_difference(p.decoder) < 5e-6
    assert isinstance(p.passes.shared(rows), PrefixTree)
    tree = p.score(rows), gradients(p, rows)
    p.passes.longest_shared = 0
    assert p.passes.shared(rows) is None
    for a, b in zip(tree[0], p.score(rows), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    for a, b in zip(tree[1], gradients(p, rows), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_large_tree_under_bfloat16_agrees_with_float32(policy):
    """More nodes than attention's kernel takes at once, so that a node may see none of a block."""
    rng = np.random.default_rng(0)
    rows = [row([*range(3, 33)], rng.integers(3, 48, size=20).tolist()) for _ in range(60)]
    p = policy("llama")
    tree = prefix_tree(rows, CPU)
    assert tree is not None and tree.tokens > 1000
    with torch.no_grad():
        exact = hidden_of_tree(p.decoder, tree)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = hidden_of_tree(p.decoder, tree)
    assert rounded.isfinite().all()
    assert float((rounded - exact).norm() / exact.norm()) < 0.02


def test_rows_that_share_little_pass_whole(policy):
    p, rows = policy("llama"), random_rows(6)
    for i, one in enumerate(rows):
        one.prompt_token_ids = np.array([3 + i, 9])
        one.response_token_ids = one.response_token_ids[:1].repeat(30)
    assert p.passes.shared(rows) is None


def test_long_responses_share_only_their_prompts(policy):
    """All pairs of a tree's tokens are computed: too many where most of them see nothing of each other."""
    rng = np.random.default_rng(0)
    rows = [row([*range(3, 33)], rng.integers(3, 48, size=50).tolist()) for _ in range(30)]
    assert isinstance(policy("llama").passes.shared(rows), SharedPrompts)


def test_rows_longer_than_the_sliding_window_are_no_tree(policy):
    p, rows = policy("gemma3_wide"), rows_of_a_group()
    assert p.passes.longest_shared == 32
    assert isinstance(p.passes.shared(rows), PrefixTree)
    rows[0].response_token_ids = np.full(21, 5)  # its prompt has 19 tokens
    assert p.passes.shared(rows) is None


def test_attention_that_is_not_fused_passes_no_trees(policy):
    p, rows = policy("llama"), rows_of_a_group()
    p.decoder.set_attn_implementation("eager")
    p.passes.tree_shape = None
    assert list(p.passes.probe_sharing()) == ["pass over shared prompts"]
    assert isinstance(p.passes.shared(rows), SharedPrompts)


def test_a_model_whose_trees_differ_from_whole_rows_passes_none_and_says_so(policy, monkeypatch):
    monkeypatch.setattr("graftrl.policies.passes.tree_difference", lambda _: 0.5)
    p = policy("llama")
    assert p.passes.tree_shape is None and p.passes.longest_shared
    (note,) = p.notes
    assert "pass over a tree of rows differs by 5.0e-01" in note


def test_passed_tokens_count_a_node_once(policy):
    from tiny_models import grpo_objective

    from graftrl.policies.hf import UpdateStats

    rows = rows_of_a_group()
    for one in rows:
        one.advantages = 1.0
    p, stats = policy("llama", microbatch_tokens=1000), UpdateStats()
    p._accumulate(rows, grpo_objective(), stats)
    read = [(*one.prompt_token_ids, *one.response_token_ids[:-1]) for one in rows]
    assert stats.passed_tokens == len({ids[:t] for ids in read for t in range(1, len(ids) + 1)})

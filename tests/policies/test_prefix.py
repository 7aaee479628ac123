"""Rows that share their prompts against whole rows: the same hidden states, log-probabilities and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import gradients, random_rows

from graftrl.policies.prefix import common_start, hidden_of_responses, shared_prompts, sharing_difference

CPU = torch.device("cpu")


def grouped_rows(n: int = 9):
    """Rows of three prompts of different lengths, in mixed order, with responses of 1 to 9 tokens."""
    rows = random_rows(n, seed=4)
    starts = [np.arange(3, 3 + length) for length in (12, 5, 9)]
    for i, row in enumerate(rows):
        row.prompt_token_ids = starts[i % 3]
    return rows


def rows_with_a_common_start(n: int, prompts: int):
    """The prompts begin with the same 18 tokens and end with 1, 2, ... of their own."""
    rows = random_rows(n, seed=4)
    for i, row in enumerate(rows):
        row.prompt_token_ids = np.array([*range(3, 21), *range(20 + i % prompts, 21 + 2 * (i % prompts))])
    return rows


@pytest.mark.parametrize("rows", [grouped_rows(), rows_with_a_common_start(9, 3), rows_with_a_common_start(4, 4)])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "qwen2", "qwen3", "granite", "gemma3_wide"])
def test_hidden_states_and_gradients_equal_those_of_whole_rows(policy, kind, rows):
    p = policy(kind, microbatch_tokens=1000)
    p.passes.tree_shape = None
    assert p.passes.longest_shared and shared_prompts(rows, CPU, p.passes.longest_shared) is not None
    assert sharing_difference(p.decoder) < 5e-6
    shared = p.score(rows), gradients(p, rows)
    p.passes.longest_shared = 0
    whole = p.score(rows), gradients(p, rows)
    for a, b in zip(shared[0], whole[0], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    for a, b in zip(shared[1], whole[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_each_prompt_is_read_once(policy):
    p = policy("llama")
    rows = grouped_rows()
    shared = shared_prompts(rows, CPU, 10000)
    assert shared is not None
    assert shared.prompt_ids_UW.shape == (3, 12)
    assert shared.prompt_of_B.tolist() == [0, 1, 2] * 3
    longest = max(len(row.response_token_ids) for row in rows)
    assert hidden_of_responses(p.decoder, shared).shape == (9, longest, 16)


def test_a_common_start_is_read_once(policy):
    rows = rows_with_a_common_start(9, 3)
    shared = shared_prompts(rows, CPU, 10000)
    assert shared is not None and shared.common == 18
    assert shared.tokens == 18 + (1 + 2 + 3) + sum(len(row.response_token_ids) - 1 for row in rows)
    read = []
    p = policy("llama")
    p.decoder.register_forward_pre_hook(
        lambda _, __, given: read.append(given["inputs_embeds"].shape[:2]), with_kwargs=True
    )
    hidden_of_responses(p.decoder, shared)
    assert read[:2] == [(1, 18), (3, 3)]


def test_a_common_start_leaves_every_prompt_a_token():
    def common(*prompts: list[int], **options: float) -> int:
        return common_start([np.array(ids) for ids in prompts], **options)

    assert common([1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3, 4, 5]) == 3
    assert common([1, 2, 3, 4], [1, 2, 3, 4]) == 3  # the last one is each prompt's own
    assert common([1], [1, 2, 3]) == 0
    assert common([1, 2, 3]) == 0  # of one prompt there is nothing to spare
    assert common([7, 2, 3, 4], [1, 2, 3, 4]) == 0
    assert common([1, 2, 3, 4], [1, 5, 6, 7]) == 0  # one of eight tokens: not worth a pass
    assert common([1, 2, 3, 4], [1, 5, 6, 7], worth=0.0) == 1
    assert common([1, 2, 3, 4], [1, 2, 3, 5], others=5) == 0


def test_rows_of_different_prompts_stay_whole():
    rows = random_rows(6)
    for i, row in enumerate(rows):
        row.prompt_token_ids = np.array([3 + i, 9])
        row.response_token_ids = row.response_token_ids[:1].repeat(30)
    assert shared_prompts(rows, CPU, 10000) is None


def test_a_mask_that_would_be_too_large_keeps_rows_whole():
    rows = grouped_rows(3)
    for row in rows:
        row.prompt_token_ids = np.arange(3, 3 + 4000)
        row.response_token_ids = np.full(4000, 5)
    assert shared_prompts(rows, CPU, 10000) is None


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "mistral_sliding"])
def test_models_with_sliding_windows_do_not_share(policy, kind):
    assert not policy(kind).passes.longest_shared


def test_rows_longer_than_the_sliding_window_stay_whole(policy):
    p = policy("gemma3_wide")
    assert p.passes.longest_shared == 32
    rows = grouped_rows()
    assert p.passes.shared(rows) is not None
    rows[0].response_token_ids = np.full(21, 5)  # its prompt has 12 tokens
    assert p.passes.shared(rows) is None


def test_gradient_checkpointing_does_not_share(policy):
    assert not policy("llama", gradient_checkpointing=True).passes.longest_shared


def test_adapters_share_too(policy):
    p = policy("llama", lora={"rank": 2}, microbatch_tokens=1000)
    rows = grouped_rows()
    assert p.passes.longest_shared
    shared = gradients(p, rows)
    p.passes.longest_shared = 0
    for a, b in zip(shared, gradients(p, rows), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_passed_tokens_count_a_shared_prompt_once(policy):
    from tiny_models import grpo_objective

    from graftrl.policies.hf import UpdateStats

    rows = grouped_rows()
    for row in rows:
        row.advantages = 1.0
    p, stats = policy("llama", microbatch_tokens=1000), UpdateStats()
    p.passes.tree_shape = None
    p._accumulate(rows, grpo_objective(), stats)
    assert stats.passed_tokens == 12 + 5 + 9 + sum(len(row.response_token_ids) - 1 for row in rows)

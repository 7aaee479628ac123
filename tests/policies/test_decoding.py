"""The one-token pass of Llama-shaped models against the model's own forward pass."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from tiny_models import prompts

from graftrl.policies.decoding import LlamaSequences, TransformersSequences, agreement, llama_shaped

LLAMA_SHAPED = ("llama", "llama_tied", "qwen2", "qwen3", "mistral", "llama3_rope")
SHARING = ("gpt2", "gpt_neox", "gemma3_wide", "cohere", "granite", "dynamic_rope")  # no sliding window in reach
OTHERS = ("gpt2", "gpt_neox", "gemma2", "gemma3", "cohere", "granite", "mistral_sliding", "dynamic_rope")


@pytest.mark.parametrize("kind", LLAMA_SHAPED)
def test_llama_shaped_models_take_the_one_token_pass(policy, kind):
    p = policy(kind)
    assert p.sequences_type is LlamaSequences
    assert agreement(p.decoder) < 5e-6


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_keep_their_own_forward_pass(policy, kind):
    p = policy(kind)
    assert not llama_shaped(p.decoder)
    assert p.sequences_type is TransformersSequences


@pytest.mark.parametrize(
    ("kind", "sequences_type", "common"),
    [(kind, LlamaSequences, common) for kind in LLAMA_SHAPED for common in (0, 4)]
    + [(kind, TransformersSequences, 0) for kind in OTHERS]
    + [(kind, TransformersSequences, 4) for kind in SHARING],
)
def test_every_hidden_state_equals_a_pass_over_the_whole_row(policy, kind, sequences_type, common):
    """Prompts of different lengths, rows that leave in the middle, against full rows without cache or padding."""
    p = policy(kind)
    rng = np.random.default_rng(0)
    begin = rng.integers(3, 40, common)
    starts = [np.concatenate([begin, rng.integers(3, 40, length)]) for length in (3, 7, 5)]
    more = torch.from_numpy(rng.integers(3, 40, (6, 6)))
    sequences = sequences_type(p.decoder, starts, 6, common)

    def expected(row: int, t: int) -> torch.Tensor:
        ids = torch.cat([torch.from_numpy(starts[row // 2]), more[row, :t]])
        return p.decoder(input_ids=ids[None]).last_hidden_state[0, -1]

    with torch.no_grad():
        for prompt, hidden in enumerate(sequences.read_prompts()):
            torch.testing.assert_close(hidden, expected(2 * prompt, 0), rtol=1e-4, atol=1e-5)
        sequences.repeat(2)
        alive = [0, 1, 2, 3, 4, 5]
        for t in range(1, 7):
            for row, hidden in zip(alive, sequences.append(more[alive, t - 1]), strict=True):
                torch.testing.assert_close(hidden, expected(row, t), rtol=1e-4, atol=1e-5)
            if t in (2, 4):
                keep = [0, 2, 3, 4][: 4 - (t == 4)]
                sequences.keep_rows(torch.tensor(keep))
                alive = [alive[i] for i in keep]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_both_ways_sample_the_same_responses(policy, kind):
    p = policy(kind, sampling={"max_response_tokens": 20})
    asked = prompts("abc", "what is 1+1?", "x")
    ours = p.sample(asked, 4, seed=3)
    p.sequences_type = TransformersSequences
    theirs = p.sample(asked, 4, seed=3)
    for group, other in zip(ours, theirs, strict=True):
        for response, expected in zip(group.responses, other.responses, strict=True):
            assert response.token_ids.tolist() == expected.token_ids.tolist()
            np.testing.assert_allclose(response.logprobs, expected.logprobs, atol=2e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gemma3_wide"])
def test_a_common_start_is_read_once_and_changes_no_response(policy, kind):
    p = policy(kind, sampling={"max_response_tokens": 6})
    ids = [np.array([*range(3, 19), *own]) for own in ([5], [6, 7, 8], [9, 4])]
    assert p.passes.common_start(ids, 6) == 16

    def drawn():
        read = []
        hook = p.decoder.register_forward_pre_hook(
            lambda _, __, given: read.append(given["input_ids"].shape), with_kwargs=True
        )
        found = p.draw(ids, 4, torch.Generator().manual_seed(3), p.sampling)
        hook.remove()
        return found, read

    once, read = drawn()
    assert read[:2] == [(1, 16), (3, 3)]
    p.passes.longest_shared = 0
    whole, read = drawn()
    assert read[0] == (3, 19)
    for one, other in zip(chain(*once), chain(*whole), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)


def test_bfloat16_stays_near_the_models_own_pass(policy):
    p = policy("llama", dtype="bfloat16")
    ids = [np.array([5, 6, 7]), np.array([8, 9])]
    found = []
    with torch.no_grad(), p.passes.precision():
        for kind in (TransformersSequences, LlamaSequences):
            sequences = kind(p.decoder, ids, 3)
            sequences.read_prompts()
            sequences.repeat(1)
            found.append(torch.stack([sequences.append(torch.tensor([11, 12])).float() for _ in range(3)]))
    assert (found[0] - found[1]).abs().max() < 0.05 * found[0].abs().max()


def test_adapters_keep_their_own_forward_pass(policy):
    p = policy("llama", lora={"rank": 2})
    assert p.sequences_type is TransformersSequences


def test_a_model_that_computes_otherwise_is_noted_and_keeps_its_own_pass(policy, model_folder, monkeypatch):
    """Right type, other arithmetic: the check on numbers has the last word."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: 1.5 * forward(self, x))
    p = policy(folder=model_folder("llama"))
    assert p.sequences_type is TransformersSequences
    assert any("one-token pass" in note and "slower one is used" in note for note in p.notes)

"""Saving and restoring a policy: the same numbers as without the interruption, and folders that others can load."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tiny_models import character_tokenizer, grpo_objective, prompts, quick, random_rows, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from graftrl.errors import ModelError


def update(p, seed):
    p.update([random_rows(5, seed=seed), random_rows(4, seed=seed + 100)], lambda _: grpo_objective())


LORA = {"lora": {"rank": 2, "alpha": 4}}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        ("gpt2", {}),
        ("gemma3", {}),
        ("llama_tied", {"dtype": "bfloat16"}),
        ("llama", LORA),
        ("gpt2", LORA),
    ],
)
def test_restored_policy_goes_on_bitwise(policy, tmp_path, kind, settings):
    whole = policy(kind, optimizer=quick(), **settings)
    update(whole, 1)
    whole.save(tmp_path / "c")
    resumed = policy(kind, optimizer=quick(), checkpoint=tmp_path / "c", **settings)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))
    assert resumed.optimizer_steps == whole.optimizer_steps == 2
    for p in (whole, resumed):
        update(p, 2)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))
    first, second = (p.sample(prompts("a", "bcd"), 3, seed=4) for p in (whole, resumed))
    assert [r.text for g in first for r in g.responses] == [r.text for g in second for r in g.responses]


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gpt2", "gemma3"])
def test_folder_loads_with_from_pretrained(policy, tmp_path, kind):
    p = policy(kind, optimizer=quick())
    update(p, 1)
    p.save(tmp_path / "c")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "c").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "c")
    rows = random_rows(4)
    for row, scores in zip(rows, p.score(rows), strict=True):
        ids = np.concatenate([row.prompt_token_ids, row.response_token_ids])
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0, len(row.prompt_token_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.from_numpy(row.response_token_ids)[:, None]).squeeze(-1)
        np.testing.assert_allclose(scores, expected.numpy(), atol=1e-5)
    assert tokenizer.encode("what is 7?") == p.codec.tokenizer.encode("what is 7?")


def test_adapter_folder_holds_the_adapter_alone(policy, tmp_path):
    import peft

    p = policy("llama", optimizer=quick(), **LORA)
    trained = sum(parameter.numel() for parameter in p.parameters)
    assert trained < sum(parameter.numel() for parameter in p.loaded.causal_lm.parameters()) / 2
    update(p, 1)
    p.save(tmp_path / "c")
    assert (tmp_path / "c" / "adapter_model.safetensors").exists() and not (
        tmp_path / "c" / "model.safetensors"
    ).exists()
    base = AutoModelForCausalLM.from_pretrained(p.settings.path)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "c").eval()
    ids = torch.tensor([[4, 5, 6, 7]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0]
        ours = p.head.logits(p.decoder(input_ids=ids).last_hidden_state[0])
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_lora_starts_at_the_base_model(policy):
    rows = random_rows(4)
    base, adapted = policy("llama"), policy("llama", **LORA)
    for a, b in zip(base.score(rows), adapted.score(rows), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_lora_with_gradient_checkpointing(policy):
    from tiny_models import gradients

    rows = random_rows(5)
    torch.manual_seed(0)
    plain = policy("llama", **LORA)
    torch.manual_seed(0)
    checkpointing = policy("llama", gradient_checkpointing=True, **LORA)
    for a, b in zip(gradients(plain, rows), gradients(checkpointing, rows), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert max(float(g.abs().max()) for g in gradients(checkpointing, rows)) > 0


def test_sampling_conventions_are_restored(policy, tmp_path):
    p = policy("llama", bos="add")
    p.save(tmp_path / "c")
    resumed = policy("llama", checkpoint=tmp_path / "c")
    assert resumed.codec.prepend_bos and resumed.notes == ()


def test_reference_after_a_restart_is_still_the_start(policy, tmp_path):
    p = policy("llama", optimizer=quick())
    rows = random_rows(3)
    start = p.score(rows)
    update(p, 1)
    p.save(tmp_path / "c")
    resumed = policy("llama", optimizer=quick(), checkpoint=tmp_path / "c")
    for a, b in zip(start, resumed.score_reference(rows), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_another_tokenizer_in_the_checkpoint_is_refused(policy, tmp_path):
    p = policy("llama")
    p.save(tmp_path / "c")
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "c")
    with pytest.raises(ModelError, match="not the one that the run used"):
        policy("llama", checkpoint=tmp_path / "c")


def test_saved_state_is_readable(policy, tmp_path):
    p = policy("llama", optimizer=quick())
    update(p, 1)
    p.save(tmp_path / "c")
    state = json.loads((tmp_path / "c" / "policy.json").read_text())
    assert state["optimizer_steps"] == 2 and state["tokenizer_fingerprint"] == p.codec.fingerprint

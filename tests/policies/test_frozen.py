"""Frozen models: one set of weights per path, adapters on or off, no row read twice in a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import random_rows

from graftrl.errors import DataError, ModelError
from graftrl.policies.config import LoraSettings, OptimizerSettings, ScorerSettings
from graftrl.policies.frozen import FrozenWeights
from graftrl.policies.passes import Passes


def settings(folder, **options):
    return ScorerSettings(path=str(folder), device="cpu", **options)


@pytest.fixture
def rows():
    return random_rows(6)


@pytest.fixture
def read(monkeypatch):
    """The rows that any model's forward passes read."""
    seen = []
    original = Passes._each

    def counting(self, rows, work):
        seen.extend(rows)
        return original(self, rows, work)

    monkeypatch.setattr(Passes, "_each", counting)
    return seen


def plain(model, row):
    ids = torch.from_numpy(np.concatenate([row.prompt_token_ids, row.response_token_ids]))
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0, len(row.prompt_token_ids) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("keep_hidden", [False, True])
def test_logprobs_equal_those_of_a_plain_pass(model_folder, rows, keep_hidden):
    model = FrozenWeights().model("s", settings(model_folder("llama")))
    model.keep_hidden = keep_hidden
    for row, got in zip(rows, model.logprobs(rows), strict=True):
        wanted = plain(model.passes.loaded.causal_lm, row)[torch.arange(len(got)), row.response_token_ids]
        np.testing.assert_allclose(got, wanted.numpy(), atol=2e-5)
        assert got.dtype == np.float32


def test_the_most_likely_tokens_of_every_row(model_folder, rows):
    model = FrozenWeights().model("s", settings(model_folder("gpt2")))
    for row, (tokens, logprobs) in zip(rows, model.top_k(rows, 4), strict=True):
        wanted = plain(model.passes.loaded.causal_lm, row).topk(4, dim=-1)
        assert tokens.tolist() == wanted.indices.tolist()
        np.testing.assert_allclose(logprobs, wanted.values.numpy(), atol=2e-5)


def test_a_row_is_read_once_until_it_is_forgotten(model_folder, rows, read):
    store = FrozenWeights()
    model = store.model("s", settings(model_folder("llama")))
    first = model.logprobs(rows)
    assert len(read) == 6
    again = model.logprobs([*rows[::-1], *random_rows(6)])  # the same tokens in other rows
    assert len(read) == 6 and all(np.array_equal(a, b) for a, b in zip(first, again[5::-1], strict=True))
    store.forget()
    model.logprobs(rows[:2])
    assert len(read) == 8


def test_rows_that_also_need_sums_are_read_once_for_both(model_folder, rows, read):
    model = FrozenWeights().model("s", settings(model_folder("llama")))
    model.keep_hidden = True
    model.logprobs(rows)
    positions = len(model.distribution(rows).hidden_NH)
    model.top_k(rows[:2], 3)
    assert len(read) == 6 and positions == sum(len(row.response_token_ids) for row in rows)


def test_one_path_is_loaded_once_whatever_its_context(model_folder, monkeypatch):
    from graftrl.policies import frozen

    loads = []
    original = frozen.load
    monkeypatch.setattr(frozen, "load", lambda *given: loads.append(given[0]) or original(*given))
    store = FrozenWeights()
    one = store.model("one", settings(model_folder("llama")))
    hinted = store.model("hinted", settings(model_folder("llama"), context="hint"))
    coarse = store.model("coarse", settings(model_folder("llama"), dtype="bfloat16"))
    other = store.model("other", settings(model_folder("gpt2")))
    assert loads == ["one", "other"] and one is hinted
    assert coarse is not one and coarse.passes.loaded is one.passes.loaded
    assert other.passes.loaded is not one.passes.loaded


@pytest.fixture
def adapter(policy, model_folder, tmp_path):
    """Trained LoRA weights on the llama folder, and what that policy says of some rows."""

    def build(name, lr, rows):
        from tiny_models import grpo_objective

        p = policy("llama", lora=LoraSettings(rank=2), optimizer=OptimizerSettings(lr=lr))
        for row, old in zip(rows, p.score(rows), strict=True):
            row.old_logprobs = old
        for _ in range(3):
            p.update([rows], lambda _: grpo_objective())
        p.save(tmp_path / name)
        return str(tmp_path / name), p.score(rows)

    return build


@pytest.mark.parametrize("base_first", [True, False])
def test_an_expert_and_its_base_are_one_set_of_weights(model_folder, adapter, rows, base_first):
    folder = model_folder("llama")
    expected_base = FrozenWeights().model("s", settings(folder)).logprobs(rows)
    (one, of_one), (two, of_two) = adapter("one", 0.05, rows), adapter("two", 0.02, rows)
    wanted = {"base": settings(folder), "one": settings(folder, adapter=one), "two": settings(folder, adapter=two)}
    store = FrozenWeights()
    order = list(wanted) if base_first else list(wanted)[::-1]
    models = {name: store.model(name, wanted[name]) for name in order}
    assert len({id(model.passes.loaded.causal_lm) for model in models.values()}) == 1
    for _ in range(2):  # whichever was switched on last
        for name, expected in {"one": of_one, "base": expected_base, "two": of_two}.items():
            for got, want in zip(models[name].logprobs(rows), expected, strict=True):
                np.testing.assert_allclose(got, want, atol=2e-5)
        store.forget()
    assert not np.allclose(of_one[0], expected_base[0], atol=1e-3)
    assert not any(p.requires_grad for p in models["base"].passes.loaded.causal_lm.parameters())


def test_a_lora_policys_reference_is_its_base(policy, rows):
    p = policy("llama", lora=LoraSettings(rank=2))
    assert p.reference.passes is p.passes
    for got, want in zip(p.score_reference(rows), p.score(rows), strict=True):  # an untrained adapter changes nothing
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_adapters_that_cannot_be_used_are_refused(model_folder, rows, adapter, tmp_path):
    folder = model_folder("llama")
    with pytest.raises(ModelError, match=r"scorers.s.adapter: cannot load .*none"):
        FrozenWeights().model("s", settings(folder, adapter=str(tmp_path / "none")))
    import peft

    loaded = FrozenWeights().model("s", settings(folder)).passes.loaded.causal_lm
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    peft.get_peft_model(loaded, config).save_pretrained(tmp_path / "head")
    with pytest.raises(ModelError, match="output head"):
        FrozenWeights().model("s", settings(folder, adapter=str(tmp_path / "head")))


def test_a_context_that_does_not_fit_names_the_prompt(model_folder):
    row = random_rows(1)[0]
    row.prompt_token_ids = np.full(130, 5)
    with pytest.raises(DataError, match=r"128 positions, but prompt 'p0' .* 13\d tokens"):
        FrozenWeights().model("s", settings(model_folder("llama"))).logprobs([row])

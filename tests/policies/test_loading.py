"""Models and tokenizers as they come: BOS, EOS, heads, and every failure as one line."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from tiny_models import ARCHITECTURES, BOS, EOS, VOCABULARY, character_tokenizer, prompts, tiny_config

from graftrl.errors import ModelError
from graftrl.policies.config import ModelSettings
from graftrl.policies.loading import _check_head, load, split_head

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}:"
PLAIN_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}:"


def failure(path, name="m", **settings) -> str:
    with pytest.raises(ModelError) as caught:
        load(name, ModelSettings(path=str(path), device="cpu", **settings), torch.device("cpu"))
    message = str(caught.value)
    assert "\n" not in message and (f"models.{name}" in message or f"model {name!r}" in message or str(path) in message)
    return message


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_head_reproduces_the_models_logits(policy, kind):
    p = policy(kind)
    ids = torch.tensor([[5, 9, 3, 20, 11]])
    with torch.no_grad():
        own = p.loaded.causal_lm(input_ids=ids).logits[0]
        ours = p.head.logits(p.decoder(input_ids=ids).last_hidden_state[0])
    torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5)


def test_unknown_logit_transformation_is_refused(model_folder):
    model = hf.AutoModelForCausalLM.from_pretrained(model_folder("cohere"))

    class Flipped(type(model)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits.flip(-1)
            return output

    model.__class__ = Flipped
    settings = ModelSettings(path="flipped")
    with pytest.raises(ModelError, match="transforms its logits"):
        _check_head("m", settings, model, *split_head("m", settings, model))


def test_dropout_is_off(model_folder):
    def with_dropout(model):
        model.config.attn_pdrop = model.config.resid_pdrop = model.config.embd_pdrop = 0.5

    folder = model_folder("gpt2", change=with_dropout)
    loaded = load("m", ModelSettings(path=str(folder)), torch.device("cpu"))
    loaded.causal_lm.train()  # as gradient checkpointing needs it
    ids = torch.tensor([[5, 9, 3]])
    with torch.no_grad():
        assert torch.equal(loaded.causal_lm(ids).logits, loaded.causal_lm(ids).logits)


@pytest.mark.parametrize("bos", ["auto", "keep", "add"])
@pytest.mark.parametrize(
    ("tokenizer", "emits"),
    [
        ({"template": TEMPLATE, "adds_bos": True}, True),
        ({"template": TEMPLATE}, True),
        ({"adds_bos": True}, True),
        ({"template": PLAIN_TEMPLATE, "adds_bos": True}, False),
        ({"template": PLAIN_TEMPLATE}, False),
        ({}, False),
    ],
)
def test_at_most_one_bos(policy, model_folder, tokenizer, emits, bos):
    p = policy(folder=model_folder("llama", tokenizer=character_tokenizer(**tokenizer)), bos=bos)
    ids = p.codec.prompt_token_ids(prompts("what is 2+2?")[0]).tolist()
    assert ids.count(BOS) == (1 if emits or bos == "add" else 0)
    assert ids.index(BOS) == 0 if BOS in ids else True
    assert p.notes == ()
    text = p.codec.tokenizer.decode([i for i in ids if i != BOS])
    assert text == "what is 2+2?" + (":" if "template" in tokenizer else "")


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_a_given_beginning_of_the_answer_follows_the_generation_prompt(policy, model_folder, template):
    folder = model_folder("llama", tokenizer=character_tokenizer(template=template))
    codec = policy(folder=folder).codec
    (plain,) = prompts("ab")
    for prefix in ("d", "ef"):  # the same id twice: the second is not what is remembered of the first
        begun = replace(plain, messages=(*plain.messages, {"role": "assistant", "content": prefix}))
        tail = codec.tokenizer.encode(prefix, add_special_tokens=False)
        assert codec.prompt_token_ids(begun).tolist() == [*codec.prompt_token_ids(plain).tolist(), *tail]


def test_prompts_of_two_tasks_may_have_the_same_id(policy):
    codec = policy("llama").codec
    one, other = (replace(prompt, id="1", task=f"task {i}") for i, prompt in enumerate(prompts("ab", "ba")))
    for prompt in (one, other, one):
        assert codec.prompt_token_ids(prompt).tolist() == codec.encode_prompt(prompt)
    assert codec.encode_prompt(one) != codec.encode_prompt(other)


def test_plain_ignores_the_template(policy, model_folder):
    folder = model_folder("llama", tokenizer=character_tokenizer(template=TEMPLATE))
    ids = policy(folder=folder, chat_template="plain").codec.prompt_token_ids(prompts("ab")[0])
    assert ids.tolist() == [3, 4]


def test_options_reach_the_chat_template(policy, model_folder):
    template = "{{ messages[0]['content'] }}{% if thinks is defined and not thinks %}:{% endif %}"
    folder = model_folder("llama", tokenizer=character_tokenizer(template=template))
    p = policy(folder=folder, chat_template_options={"thinks": False})
    decode, (prompt,) = p.codec.tokenizer.decode, prompts("ab")
    assert decode(p.codec.prompt_token_ids(prompt)) == "ab:"
    assert decode(policy(folder=folder).codec.prompt_token_ids(prompt)) == "ab"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template_options": {"think": False}}, "'think' is no variable of .* chat template that can be set"),
        ({"chat_template_options": {"add_generation_prompt": False}}, "no variable of .* that can be set"),
        ({"chat_template_options": {"thinks": False}, "chat_template": "plain"}, "has no chat template in use"),
    ],
)
def test_options_that_would_change_nothing_are_refused(policy, model_folder, options, message):
    template = "{{ messages[0]['content'] }}{{ thinks }}{% if add_generation_prompt %}:{% endif %}"
    folder = model_folder("llama", tokenizer=character_tokenizer(template=template))
    with pytest.raises(ModelError, match=rf"models\.\w+\.chat_template_options: .*{message}"):
        policy(folder=folder, **options)


def test_a_model_that_needs_bos_is_noticed(model_folder, monkeypatch):
    """By measurement: the model predicts far better after a BOS that the tokenizer does not emit."""
    from graftrl.policies import loading

    monkeypatch.setattr(loading, "_PROBE", "the cat sat on the mat. the dog sat on the log")
    with_bos = character_tokenizer()
    ids = [BOS, *with_bos.encode(loading._PROBE)]

    def learn(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.tensor([ids])
        for _ in range(80):
            optimizer.zero_grad()
            good = model(input_ids=tokens, labels=tokens).loss
            bad = model(input_ids=tokens[:, 1:]).logits.log_softmax(-1)[:, :, 5].neg().mean()  # always "c" without BOS
            (good + 0.3 * bad).backward()
            optimizer.step()

    folder = model_folder("llama", change=learn)
    settings = ModelSettings(path=str(folder))
    loaded = load("m", settings, torch.device("cpu"))
    assert loaded.codec.prepend_bos and len(loaded.notes) == 1 and "emits no BOS" in loaded.notes[0]
    assert loaded.codec.prompt_token_ids(prompts("ab")[0]).tolist() == [BOS, 3, 4]
    kept = load("m", settings.model_copy(update={"bos": "keep"}), torch.device("cpu"))
    assert not kept.codec.prepend_bos and kept.notes == ()


def test_an_eos_at_the_end_of_every_text_is_dropped(policy, model_folder):
    from tokenizers.processors import TemplateProcessing

    tokenizer = character_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    p = policy(folder=model_folder("llama", tokenizer=tokenizer))
    assert p.codec.prompt_token_ids(prompts("ab")[0]).tolist() == [BOS, 3, 4]


def test_eos_ids_come_from_tokenizer_config_and_settings(policy, model_folder):
    p = policy(folder=model_folder("llama", generation={"eos_token_id": [7, 8]}))
    assert set(p.codec.eos_ids) == {EOS, 7, 8} and p.codec.eos_id == EOS
    p = policy(extra_stop_tokens=["\n", "z"])
    newline, z = (p.codec.tokenizer.convert_tokens_to_ids(t) for t in ("\n", "z"))
    assert set(p.codec.eos_ids) == {EOS, newline, z} and p.codec.eos_id == newline


def test_a_stop_text_may_be_spelled_otherwise_in_the_vocabulary(policy, model_folder):
    """Byte-level vocabularies write the newline as another character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCABULARY - 4]
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("\n")[0][0]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(["<unk>", "<s>", "</s>", spelled, *alphabet])}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    p = policy(folder=model_folder("llama", tokenizer=tokenizer), extra_stop_tokens=["\n"])
    assert p.codec.eos_id == 3


def test_responses_decode_without_their_eos_only(policy):
    codec = policy("llama").codec
    assert codec.decode_response(np.array([3, BOS, 4, EOS]), stopped=True) == "a<s>b"
    assert codec.decode_response(np.array([3, 4]), stopped=False) == "ab"
    assert codec.decode_response(np.array([EOS]), stopped=True) == ""


# Failures -------------------------------------------------------------------------------------------------------------


def test_unknown_stop_token(model_folder):
    assert "extra_stop_tokens" in failure(model_folder(), extra_stop_tokens=["<|nope|>"])


def test_no_eos_at_all(model_folder):
    def forget(model):
        model.config.eos_token_id = model.generation_config.eos_token_id = None

    folder = model_folder(tokenizer=character_tokenizer(eos=False), change=forget)
    assert "EOS" in failure(folder)
    assert load("m", ModelSettings(path=str(folder), extra_stop_tokens=["."]), torch.device("cpu")).codec.eos_ids


def test_bos_demanded_where_there_is_none(model_folder):
    tokenizer = character_tokenizer()
    tokenizer.bos_token = None
    assert "no BOS token" in failure(model_folder(tokenizer=tokenizer), bos="add")


def test_tokenizer_larger_than_the_embedding(model_folder):
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([f"<{i}>" for i in range(VOCABULARY)])
    assert "do not belong together" in failure(model_folder(tokenizer=tokenizer))


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "nowhere.gguf", "/x/y.gguf"])
def test_missing_local_path(path):
    assert path in failure(path)


def test_hub_id_that_cannot_be_reached(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "not (whole) in the hub's local cache" in failure("nobody/no-such-model")


def _damage(folder, file, content: bytes | None):
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", b"x" * 1000),
        ("model.safetensors", b""),
        ("model.safetensors", None),
        ("config.json", b"{"),
        ("config.json", None),
        ("config.json", b'{"model_type": "nonesuch"}'),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b'{"version": "1.0"}'),
        ("tokenizer.json", None),
    ],
)
def test_damaged_folder(model_folder, file, content):
    folder = model_folder(generation={"max_length": 7})  # of its own
    _damage(folder, file, content)
    assert "cannot load the" in failure(folder)


def test_pickled_weights_are_refused(model_folder):
    folder = model_folder(generation={"max_length": 7})
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "safetensors" in failure(folder)


@pytest.mark.parametrize(
    ("key", "value", "said"), [("num_hidden_layers", 3, "lacks 9"), ("intermediate_size", 32, "cannot load")]
)
def test_weights_that_do_not_fit_the_config(model_folder, key, value, said):
    folder = model_folder(generation={"max_length": 7})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    assert said in failure(folder)


def test_not_a_causal_language_model(model_folder):
    folder = model_folder(generation={"max_length": 7})
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 16, "d_kv": 8}
    hf.T5Config(**sizes).save_pretrained(folder)
    assert "cannot load the model" in failure(folder)


def test_device_that_is_not_there(policy):
    with pytest.raises(ModelError, match="cuda:7"):
        policy("llama", device="cuda:7")
    with pytest.raises(ModelError, match="'nonsense'"):
        policy("llama", device="nonsense")


def test_tied_weights_stay_tied_after_loading(policy):
    p = policy("llama_tied")
    assert p.head.weight is p.loaded.causal_lm.get_input_embeddings().weight
    assert tiny_config("llama_tied").tie_word_embeddings

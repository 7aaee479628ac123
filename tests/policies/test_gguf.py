"""GGUF files become ordinary models: the same numbers as the original, and again after saving."""

from __future__ import annotations

import importlib.util

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from graftrl.errors import ModelError
from graftrl.policies.config import ModelSettings
from graftrl.policies.gguf import load_gguf
from graftrl.policies.loading import load

HEADS, KV_HEADS, HIDDEN = 2, 1, 64
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}:"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of the query and key projections."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_llama(path, model, *, tied: bool, quantised: bool) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    names |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    tops = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for key, tensor in model.state_dict().items():
        stem = key.removesuffix(".weight")
        if stem == "lm_head" and tied:
            continue
        data = tensor.numpy()
        if stem in tops:
            name = tops[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            name = f"blk.{layer}.{names[part]}"
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                data = permuted(data, HEADS if part.endswith("q_proj") else KV_HEADS)
        if quantised and data.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module", params=["tied", "untied", "quantised"])
def original(request, tmp_path_factory):
    """(path of the GGUF file, the model that it was written from, how exact it is)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=request.param == "tied",
    )
    model = LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf"
    write_llama(path, model, tied=request.param == "tied", quantised=request.param == "quantised")
    return path, model, 0.05 if request.param == "quantised" else 1e-5


def test_gguf_equals_its_original_and_survives_saving(original, tmp_path):
    path, model, tolerance = original
    loaded, tokenizer = load_gguf(path)
    ids = torch.tensor([[5, 9, 77, 12, 200]])
    with torch.no_grad():
        logits = loaded(ids).logits
        torch.testing.assert_close(logits, model(ids).logits, rtol=tolerance, atol=tolerance)
    tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert tied == ("untied" not in path.name and "quantised" not in path.name)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in loaded.parameters())
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (2, 1, 2)
    assert tokenizer.chat_template == TEMPLATE
    assert loaded.generation_config.eos_token_id == 2
    text = "ab 12 + b<|im_end|>é\n"
    assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text
    assert TOKENS.index("ab") in tokenizer.encode(text) and 2 in tokenizer.encode(text)

    loaded.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(again.config, "quantization_config")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, logits)
    assert tied == (again.get_output_embeddings().weight is again.get_input_embeddings().weight)
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == tokenizer.encode(text)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == TEMPLATE


def test_policy_trains_and_saves_a_gguf_model(original, policy, tmp_path):
    from tiny_models import grpo_objective, prompts, random_rows, weights

    path, _, _ = original
    p = policy(folder=path)
    assert p.codec.eos_ids == (2,) and p.codec.uses_template and p.notes == ()
    p.sample(prompts("ab"), 2, seed=0)
    p.update([random_rows(3)], lambda _: grpo_objective())
    p.save(tmp_path / "c")
    resumed = policy(folder=path, checkpoint=tmp_path / "c")
    assert all(torch.equal(a, b) for a, b in zip(weights(p), weights(resumed), strict=True))


def test_missing_package(original, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("graftrl.policies.gguf.find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(ModelError, match=r"pip install 'graftrl\[gguf\]'"):
        load_gguf(original[0])


@pytest.mark.parametrize("damage", ["empty", "not gguf", "zeros", "cut header", "cut tensors"])
def test_damaged_file(original, tmp_path, damage):
    content = original[0].read_bytes()
    made = {
        "empty": b"",
        "not gguf": b"PK\x03\x04" + content,
        "zeros": b"GGUF" + bytes(200),
        "cut header": content[:3000],
        "cut tensors": content[: len(content) * 2 // 3],
    }[damage]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(made)
    with pytest.raises(ModelError) as caught:
        load("m", ModelSettings(path=str(path)), torch.device("cpu"))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)

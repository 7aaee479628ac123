"""Operations, bytes and activations of a pass, against counts by hand and against what autograd saves."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from graftrl.plan.shapes import KNOWN
from graftrl.policies.config import LoraSettings, ModelSettings, SamplingSettings
from graftrl.policies.costs import (
    ADAM_BYTES,
    CLIP_BYTES,
    Work,
    activation_bytes,
    decode_work,
    head_work,
    layer_activation_bytes,
    llama_shape,
    optimizer_work,
    pairs,
    read_work,
    sampling_work,
    shape_of,
    trainable_parameters,
    training_work,
)
from graftrl.training.memory import memory_of, together

# Two layers; hidden 8; 2 heads of 4 with 1 key-value head; feed-forward 16; 10 tokens; tied.
SMALL = llama_shape(layers=2, hidden=8, heads=2, kv_heads=1, feed_forward=16, vocabulary=10)
PLAIN = ModelSettings(path="-")


def test_the_small_transformer_by_hand():
    # A layer: queries 8x8, keys 8x4, values 8x4, output 8x8, gate, up and down 8x16: 64 + 32 + 32 + 64 + 3 * 128 = 576.
    assert SMALL.matrices == 2 * 576
    # Two norms of 8 a layer, a last one of 8, and the embedding 10 x 8.
    assert SMALL.parameters == 2 * 576 + 2 * 16 + 8 + 80
    assert SMALL.matrix_sides == 2 * (16 + 12 + 12 + 16 + 3 * 24)
    assert (SMALL.head, SMALL.queries, SMALL.kv, SMALL.cached) == (80, 8, 4, 16)


def test_a_forward_pass_by_hand():
    # Lengths 3 and 2: 5 tokens, 2 operations a weight. Pairs 1 + 2 + 3 and 1 + 2; a pair costs a product of 8 for the
    # score and one for the value, 2 operations each, in 2 layers.
    work = read_work(SMALL, [3, 2], 4)
    assert work.decoder == 5 * 2 * 1152
    assert work.attention == 9 * 2 * (2 * 8 + 2 * 8)
    assert (work.bytes, work.layers, work.head) == (4 * 1152, 2, 0)


def test_a_step_of_decoding_by_hand():
    # Three rows whose contexts hold 12 tokens. A token keeps 16 values, of 2 bytes; the head is 80 values.
    work = decode_work(SMALL, 3, 12, 2)
    assert work.decoder == 3 * 2 * 1152 and work.head == 3 * 2 * 80 and work.exps == 30
    assert work.attention == 12 * 2 * 32
    assert work.bytes == 2 * (1152 + 80) + 2 * 16 * 12


def test_a_training_step_by_hand():
    rows = [(2, 3), (2, 1)]
    work = training_work(SMALL, rows, PLAIN)
    assert work.decoder == 3 * 8 * 2 * 1152  # 8 tokens; forward, and the gradients of input and weight
    assert work.attention == 3.5 * (15 + 6) * 64
    assert work.head == 4 * 4 * 2 * 80 and work.exps == 2 * 40  # 4 response tokens; logits computed again
    once = training_work(SMALL, rows, PLAIN, shared_prompts=[2])
    assert once.decoder == 3 * 6 * 2 * 1152 and once.head == work.head
    assert once.attention == 3.5 * (3 + (3 * 2 + 6) + (2 + 1)) * 64
    again = training_work(SMALL, rows, PLAIN.model_copy(update={"gradient_checkpointing": True}))
    assert again.decoder == 4 * 8 * 2 * 1152
    lora = training_work(SMALL, rows, PLAIN.model_copy(update={"lora": LoraSettings(rank=2)}))
    assert lora.decoder == 2 * 8 * 2 * 1152 and lora.head == 3 * 4 * 2 * 80


def test_adamw_by_hand():
    assert (ADAM_BYTES, CLIP_BYTES) == (28, 12)
    assert optimizer_work(100).traffic == 4000


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=6))
def test_sampling_is_the_sum_of_its_steps(rows):
    """Every token that is drawn is counted once, whichever way it is added up."""
    whole = sampling_work(SMALL, [prompt for prompt, _ in rows], rows, 4)
    parts = read_work(SMALL, [prompt for prompt, _ in rows], 4)
    for step in range(1, max(length for _, length in rows) + 1):
        alive = [prompt + step for prompt, length in rows if length >= step]
        parts = parts + decode_work(SMALL, len(alive), sum(alive), 4)
    for name in ("decoder", "attention", "head", "exps", "bytes", "traffic"):
        assert getattr(whole, name) == pytest.approx(getattr(parts, name), rel=1e-12)


@given(st.integers(0, 30), st.integers(0, 30))
def test_pairs_are_those_of_a_causal_mask(length, before):
    assert pairs(length, before) == sum(1 for q in range(length) for k in range(before + length) if k <= before + q)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_more_work_is_never_less(prompt, response, more):
    for name in ("decoder", "attention", "head", "exps", "traffic"):
        small, large = (
            getattr(training_work(SMALL, [(prompt, length)], PLAIN), name) for length in (response, response + more)
        )
        assert large > small


def test_works_add_up_field_by_field():
    a, b = head_work(SMALL, 3, 4), decode_work(SMALL, 2, 9, 4)
    assert (a + b).operations == a.operations + b.operations
    assert a + Work() == a and (a + b).layers == a.layers + b.layers and (a + b).exps == a.exps + b.exps


# Shapes ---------------------------------------------------------------------------------------------------------------


def _config(kind, **numbers):
    return kind(pad_token_id=None, bos_token_id=None, eos_token_id=None, vocab_size=64, **numbers)


def _llama_like(kind, *, layers=2, hidden=64, heads=4, kv_heads=2, ff=128, head_dim=16):
    return _config(
        kind,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ff,
        num_hidden_layers=layers,
        head_dim=head_dim,
    )


MODELS = {
    "llama": (LlamaForCausalLM, lambda **n: _llama_like(LlamaConfig, **n)),
    "qwen2": (Qwen2ForCausalLM, lambda **n: _llama_like(Qwen2Config, **n)),
    "qwen3": (Qwen3ForCausalLM, lambda **n: _llama_like(Qwen3Config, **n)),
    "gpt2": (
        GPT2LMHeadModel,
        lambda layers=2, hidden=64, heads=4, ff=256, **_: _config(
            GPT2Config, n_embd=hidden, n_layer=layers, n_head=heads, n_inner=ff
        ),
    ),
}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_llama_shape_has_the_weights_of_the_model(name):
    model_type, config = MODELS[name]
    with torch.device("meta"):
        model = model_type(config(layers=3))
    tied = bool(model.config.tie_word_embeddings)
    by_numbers = llama_shape(
        layers=3,
        hidden=64,
        heads=4,
        kv_heads=2,
        feed_forward=128,
        vocabulary=64,
        tied=tied,
        head_norms=name == "qwen3",
        qkv_bias=name == "qwen2",
    )
    assert shape_of(model) == by_numbers


def test_gpt2_is_counted_through_its_own_kind_of_matrix():
    with torch.device("meta"):
        shape = shape_of(GPT2LMHeadModel(MODELS["gpt2"][1]()))
    assert shape.matrices == 2 * (64 * 192 + 64 * 64 + 2 * 64 * 256)
    assert not shape.gated and (shape.kv_heads, shape.feed_forward, shape.vocabulary) == (4, 256, 64)


def test_known_models_have_their_published_number_of_parameters():
    published = {
        "Qwen/Qwen3-0.6B": 596_049_920,
        "Qwen/Qwen3-1.7B": 1_720_574_976,
        "Qwen/Qwen3-4B": 4_022_468_096,
        "Qwen/Qwen3-8B": 8_190_735_360,
        "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
        "meta-llama/Llama-3.2-3B": 3_212_749_824,
        "Qwen/Qwen2.5-7B": 7_615_616_512,
    }
    assert {name: KNOWN[name].parameters for name in published} == published
    assert KNOWN["OctoThinker/OctoThinker-3B-Hybrid"] == KNOWN["meta-llama/Llama-3.2-3B"]


# Activations ----------------------------------------------------------------------------------------------------------


def _saved_bytes(model, tokens, dtype, *, checkpointing=False):
    """Bytes of the tensors that a forward pass of the decoder keeps for its backward pass, weights left out."""
    if checkpointing:
        model.train().gradient_checkpointing_enable()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    precision = torch.autocast("cpu", dtype=torch.bfloat16) if dtype == "bfloat16" else contextlib.nullcontext()
    decoder = getattr(model, model.base_model_prefix)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), precision:
        decoder(input_ids=torch.zeros(2, tokens // 2, dtype=torch.int64), use_cache=False)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_keeps_what_autograd_saves(name, dtype):
    model_type, config = MODELS[name]
    for numbers in ({}, {"hidden": 128, "head_dim": 32}, {"kv_heads": 4}, {"ff": 512}):
        tokens, saved = 256, []
        for layers in (1, 3):  # what does not belong to a layer cancels out
            torch.manual_seed(0)
            model = model_type(config(layers=layers, **numbers))
            casts = 2 * shape_of(model).matrices if dtype == "bfloat16" else 0
            saved.append(_saved_bytes(model, tokens, dtype) - casts)
        width = 4 if dtype == "float32" else 2
        assert (saved[1] - saved[0]) / 2 == tokens * layer_activation_bytes(shape_of(model), width), numbers


def test_checkpointing_keeps_the_input_of_every_layer():
    model_type, config = MODELS["llama"]
    found = [_saved_bytes(model_type(config(layers=n)), 256, "float32", checkpointing=True) for n in (2, 4)]
    settings = PLAIN.model_copy(update={"gradient_checkpointing": True})
    with torch.device("meta"):
        shapes = [shape_of(model_type(config(layers=n))) for n in (2, 4)]
    estimated = [activation_bytes(shape, 256, settings) for shape in shapes]
    assert found[1] - found[0] == estimated[1] - estimated[0] == 2 * 256 * 4 * 64


# Memory ---------------------------------------------------------------------------------------------------------------

SAMPLING = SamplingSettings(max_prompt_tokens=4, max_response_tokens=6)


def test_memory_by_hand():
    settings = ModelSettings(path="-", microbatch_tokens=20, sample_rows=3, logit_elements=150)
    m = memory_of(SMALL, settings, SAMPLING)
    parameters = 1272
    assert (m.weights, m.gradients, m.optimizer) == (4 * parameters, 4 * parameters, 8 * parameters)
    # 3 rows of at most 10 tokens, 16 values of 4 bytes each; 20 tokens x 10 logits would be 200, 150 are allowed.
    assert m.cache == 3 * 10 * 16 * 4 and m.logits == 3 * 4 * 150
    of_layer = 24 * 8 + 8 * (8 + 4) + 16 * 16 + 4 * 2 + 8
    assert m.activations == 20 * 2 * of_layer
    assert m.resident == 16 * parameters and m.casts == m.gathered == m.sampler == 0
    assert m.training == m.resident + m.activations + m.logits and m.sampling == m.resident + m.cache + m.logits
    assert m.peak == max(m.training, m.sampling)


def test_devices_split_weights_gradients_and_states():
    one = memory_of(SMALL, PLAIN, SAMPLING)
    four = memory_of(SMALL, PLAIN, SAMPLING, devices=4, sampler=True, rows=8)
    assert 4 * four.weights == one.weights and 4 * four.optimizer == one.optimizer
    assert four.gathered == 4 * (2 * 576 + 80) and four.sampler == 2 * SMALL.parameters
    assert four.cache == 8 * 10 * 16 * 2 and four.activations == one.activations


def test_lora_and_bfloat16_change_what_they_should():
    lora = memory_of(SMALL, PLAIN.model_copy(update={"lora": LoraSettings(rank=3)}), SAMPLING)
    assert lora.trainable == 3 * SMALL.matrix_sides == trainable_parameters(SMALL, LoraSettings(rank=3))
    assert lora.gradients == 4 * lora.trainable and lora.weights == 4 * SMALL.parameters
    half = memory_of(SMALL, PLAIN.model_copy(update={"dtype": "bfloat16"}), SAMPLING)
    assert half.casts == 2 * SMALL.parameters and half.weights == 4 * SMALL.parameters


def test_policies_that_take_turns_add_what_stays_and_the_greater_of_the_rest():
    a = memory_of(SMALL, PLAIN, SAMPLING)
    b = memory_of(SMALL, PLAIN.model_copy(update={"sample_rows": 1}), SAMPLING)
    assert together([a]) == a.peak and together([]) == 0
    assert together([a, b]) == a.resident + b.resident + max(a.peak - a.resident, b.peak - b.resident)


@pytest.mark.parametrize("field", ["microbatch_tokens", "sample_rows", "logit_elements"])
def test_larger_settings_never_need_less(field):
    sizes = [memory_of(SMALL, PLAIN.model_copy(update={field: 2**k}), SAMPLING).peak for k in range(4, 24, 3)]
    assert all(a <= b for a, b in itertools.pairwise(sizes))

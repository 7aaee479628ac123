"""Memory of a policy's workers on the engine ray, by hand."""

from __future__ import annotations

from graftrl.engines.config import PolicyResources
from graftrl.policies.config import ModelSettings, SamplingSettings
from graftrl.policies.costs import llama_shape
from graftrl.training.workers import GIB, workers_of

# 1,272 parameters, 576 in a layer's matrices, 80 in the tied embedding; 16 cached values a token (see tests/plan).
SMALL = llama_shape(layers=2, hidden=8, heads=2, kv_heads=1, feed_forward=16, vocabulary=10)
SETTINGS = ModelSettings(path="-", microbatch_tokens=20, logit_elements=150, sample_rows=3)
SAMPLING = SamplingSettings(max_prompt_tokens=4, max_response_tokens=6)


def workers(settings=SETTINGS, *, sampler="vllm", on_cpu=False, frozen=0, **resources):
    return workers_of(
        SMALL, settings, SAMPLING, PolicyResources(**resources), sampler=sampler, available=8 * GIB, on_cpu=on_cpu,
        responses=100, minibatch=33, frozen=frozen,
    )  # fmt: skip


def test_trainers_and_samplers_on_devices_of_their_own():
    w = workers(trainers=2, samplers=3, memory_share=0.5)
    assert (w.devices, w.asked, w.rows) == (5, 34, 17)
    # half of 4 + 4 + 8 bytes a parameter; two layers and the head gathered, 40 layer inputs' 560 bytes, 150 logits
    assert w.trainer.resident == 8 * 1272 and w.trainer.gathered == 4 * (2 * 576 + 80)
    training = 8 * 1272 + 4928 + 20 * 2 * 560 + 3 * 4 * 150
    assert w.trainer_peak == training and w.chunk == 4 * 576
    # half of 8 GiB, less 4 bytes a parameter and 2 GiB; 64 bytes a token, 10 tokens a response
    assert w.share == 4 * GIB and w.cache == 2 * GIB - 4 * 1272 and w.token == 64
    assert w.held == (2 * GIB - 5088) // 640 == 3_355_435
    assert w.sampler_peak == 4 * GIB + 2304 == w.peak and w.problems("A") == []


def test_a_shared_device_holds_the_trainers_state_beside_the_samplers_share_when_weights_come():
    w = workers(trainers=2, samplers=2, devices="shared", memory_share=0.5, frozen=1000)
    assert w.devices == 2 and w.sampler_peak == 0
    assert w.trainer_peak == 8 * 1272 + 1000 + 2 * 2304 + 4 * GIB
    assert "that shares its device need" in workers(devices="shared", memory_share=0.96).problems("A")[0]


def test_a_sampler_of_two_devices_splits_weights_but_not_a_single_key_value_head():
    w = workers(tensor_parallel=2)
    assert w.devices == 3 and w.sampler_weights == 2 * 1272 and w.token == 64


def test_bfloat16_halves_what_the_sampler_holds_of_weights_and_tokens():
    w = workers(SETTINGS.model_copy(update={"dtype": "bfloat16"}))
    assert w.sampler_weights == 2 * 1272 and w.token == 32 and w.chunk == 2 * 576


def test_a_transformers_sampler_takes_what_it_needs():
    w = workers(sampler="transformers")
    assert w.share == 4 * 1272 + 3 * 10 * 64 + 3 * 4 * 150
    assert w.cache == 3 * 10 * 64 and w.held == 3


def test_without_gpus_all_workers_share_one_memory():
    w = workers(trainers=2, samplers=3, on_cpu=True)
    assert w.share == GIB + 4 * 1272 and w.workspace == 0
    assert w.together == 2 * w.trainer.training + 3 * w.share


def test_a_share_that_holds_no_response_is_a_problem():
    w = workers(memory_share=0.25)  # 2 GiB, all of it workspace
    assert w.cache == 0 and w.held == 0 and "do not hold its weights and one response" in w.problems("A")[0]

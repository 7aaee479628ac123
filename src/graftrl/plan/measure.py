"""This machine's rates, measured with torch's current threads in a few seconds: products, exponentials, a large copy.

`clock` is `time.perf_counter`; on a busy machine `time.process_time` counts what one thread was given.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graftrl.plan.devices import Device
from graftrl.policies.config import ModelSettings, SamplingSettings
from graftrl.policies.costs import Work, sampling_work, shape_of, training_work
from graftrl.policies.decoding import LlamaSequences
from graftrl.policies.logprobs import Head, token_logprobs
from graftrl.policies.sampling import TILED_ABOVE, sample_responses

Clock = Callable[[], float]


def best_seconds(
    work: Callable[[], object], repeats: int = 7, inner: int = 5, clock: Clock = time.perf_counter
) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        start = clock()
        for _ in range(inner):
            work()
        seconds.append((clock() - start) / inner)
    return min(seconds)


def matmul_rate(m: int, k: int, n: int, dtype: torch.dtype = torch.float32, clock: Clock = time.perf_counter) -> float:
    """Operations per second of [m, k] @ [k, n]."""
    a, b, out = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.empty(m, n, dtype=dtype)
    return 2 * m * k * n / best_seconds(lambda: torch.mm(a, b.t(), out=out), clock=clock)


def exp_rate(clock: Clock = time.perf_counter) -> float:
    """Exponentials per second of an array that fits the cache."""
    x = torch.randn(1 << 17)
    out = torch.empty_like(x)
    return x.numel() / best_seconds(lambda: torch.exp(x, out=out), clock=clock)


def copy_rate(clock: Clock = time.perf_counter) -> float:
    """Bytes read and written per second by a copy far larger than a core's cache."""
    x = torch.randn(1 << 25)
    out = torch.empty_like(x)
    return 2 * 4 * x.numel() / best_seconds(lambda: out.copy_(x), repeats=3, inner=1, clock=clock)


def this_machine(clock: Clock = time.perf_counter) -> Device:
    """This machine's CPU as a device. Shares of 1 are measured rates; the others come from small random Llama models: a
    tiny one for the time that a layer takes however small, a larger one for attention while sampling and for what lies
    between the products in training, one with many tokens for finding the drawn one; each is the time that nothing else
    explains."""
    fp32 = matmul_rate(2048, 256, 1024, clock=clock)
    bandwidth = copy_rate(clock)
    device = Device(
        "here",
        bf16=matmul_rate(2048, 256, 1024, torch.bfloat16, clock),
        fp32=fp32,
        bandwidth=bandwidth,
        memory=float(psutil.virtual_memory().available),
        link=bandwidth,
        network=1e9,
        exps=exp_rate(clock),
        products=1.0,
        decode=matmul_rate(256, 256, 1024, clock=clock) / fp32,
        attention=1.0,
        stream=1.0,
        traffic=1.0,
        overhead=0.0,
    )
    tiny, small = _llama(hidden=16, vocabulary=64), _llama(hidden=64, vocabulary=256)
    settings = ModelSettings(path="-")

    def sampling(model: Any, prompts: int, n: int) -> tuple[float, Work]:
        shape, tokens = shape_of(model), 32
        work = sampling_work(shape, [_PROMPT] * prompts, [(_PROMPT, tokens)] * (prompts * n), 4)
        return best_seconds(lambda: _sample(model, prompts, n, tokens), repeats=3, inner=1, clock=clock), work

    seconds, work = sampling(tiny, 1, 1)
    device = replace(device, overhead=seconds / work.layers)
    seconds, work = sampling(small, 16, 8)
    rest = seconds - device.seconds(replace(work, attention=0.0), 4, decoding=True)
    device = replace(device, attention=work.attention / (fp32 * max(rest, 0.01 * seconds)))
    rows = [(_PROMPT, 64)] * 32
    seconds = best_seconds(lambda: _train(small, rows), repeats=3, inner=1, clock=clock)
    work = training_work(shape_of(small), rows, settings)
    rest = seconds - device.seconds(replace(work, traffic=0.0), 4)
    device = replace(device, traffic=work.traffic / (bandwidth * max(rest, 0.01 * seconds)))
    wide = _llama(hidden=16, vocabulary=2 * TILED_ABOVE)
    seconds, work = sampling(wide, 8, 8)
    return replace(device, search=max(0.0, seconds - device.seconds(work, 4, decoding=True)) / work.searches)


_PROMPT = 16


def _llama(hidden: int, vocabulary: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def _sample(model: Any, prompts: int, n: int, tokens: int) -> None:
    ids = [np.arange(_PROMPT, dtype=np.int64) for _ in range(prompts)]
    sample_responses(
        LlamaSequences(model.model, ids, tokens),
        Head(model.lm_head.weight, None),
        prompts,
        n,
        settings=SamplingSettings(max_response_tokens=tokens),
        eos_ids=(),
        generator=torch.Generator().manual_seed(0),
        max_elements=1 << 24,
    )


def _train(model: Any, rows: list[tuple[int, int]]) -> None:
    prompt, response = rows[0]
    ids = torch.zeros(len(rows), prompt + response, dtype=torch.int64)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, prompt:]
    hidden_NH = hidden.reshape(-1, hidden.shape[-1])
    targets = torch.zeros(len(hidden_NH), dtype=torch.int64)
    token_logprobs(hidden_NH, targets, Head(model.lm_head.weight, None), 1 << 24).sum().backward()

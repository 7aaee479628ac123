"""Chunked log-probabilities against log_softmax + gather."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from graftrl.policies.logprobs import Head, token_logprobs

N, H, V = 13, 6, 37


def tensors(dtype=torch.float32, *, bias=True, seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(N, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, dtype=dtype, requires_grad=True)
    offset = torch.randn(V, dtype=dtype, requires_grad=True) if bias else None
    return hidden, weight, offset, torch.randint(V, (N,))


def reference(hidden, weight, bias, targets, scale, cap):
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits.float().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


@pytest.mark.parametrize("rows_at_once", [1, 4, N, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.25, None), (1.0, 2.0), (3.0, 1.5)])
def test_values_and_gradients_equal_log_softmax(rows_at_once, bias, scale, cap):
    hidden, weight, offset, targets = tensors(bias=bias)
    upstream = torch.randn(N)
    upstream[3] = 0.0
    ours = token_logprobs(hidden, targets, Head(weight, offset, scale, cap), rows_at_once * V)
    expected = reference(hidden, weight, offset, targets, scale, cap)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    inputs = [t for t in (hidden, weight, offset) if t is not None]
    got = torch.autograd.grad(ours, inputs, upstream)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("elements", [1, 700, 13 * 600, 20_000])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.5, 2.0)])
def test_tiles_of_a_large_vocabulary(elements, scale, cap):
    """Whatever tiles the vocabulary is split into, with targets in the first, an inner and the last one."""
    torch.manual_seed(0)
    vocabulary = 1500
    hidden, weight = torch.randn(N, H, requires_grad=True), torch.randn(vocabulary, H, requires_grad=True)
    bias, targets = torch.randn(vocabulary, requires_grad=True), torch.randint(vocabulary, (N,))
    targets[:4] = torch.tensor([0, 599, 600, vocabulary - 1])
    upstream = torch.randn(N)
    ours = token_logprobs(hidden, targets, Head(weight, bias, scale, cap), elements)
    expected = reference(hidden, weight, bias, targets, scale, cap)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    for g, w in zip(
        torch.autograd.grad(ours, [hidden, weight, bias], upstream),
        torch.autograd.grad(expected, [hidden, weight, bias], upstream),
        strict=True,
    ):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def test_frozen_head_gets_no_gradient():
    hidden, weight, _, targets = tensors(bias=False)
    weight.requires_grad_(False)
    token_logprobs(hidden, targets, Head(weight, None), 4 * V).sum().backward()
    assert weight.grad is None and hidden.grad is not None


def test_extreme_logits_stay_finite():
    hidden, weight, _, targets = tensors(bias=False)
    with torch.no_grad():
        hidden.mul_(1e3)
    ours = token_logprobs(hidden, targets, Head(weight, None), 4 * V)
    torch.testing.assert_close(ours, reference(hidden, weight, None, targets, 1.0, None), rtol=1e-5, atol=1e-2)
    ours.sum().backward()
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("rows_at_once", [4, 100])
def test_bfloat16_autocast_is_close(rows_at_once):
    hidden, weight, offset, targets = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = token_logprobs(hidden, targets, Head(weight, offset), rows_at_once * V)
    expected = reference(hidden, weight, offset, targets, 1.0, None)
    torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.1)
    for g, w in zip(
        torch.autograd.grad(ours.sum(), [hidden, weight, offset]),
        torch.autograd.grad(expected.sum(), [hidden, weight, offset]),
        strict=True,
    ):
        assert g.dtype == torch.float32
        torch.testing.assert_close(g, w, rtol=0.05, atol=0.1)


def test_no_targets():
    hidden, weight, _, targets = tensors(bias=False)
    assert token_logprobs(hidden[:0], targets[:0], Head(weight, None), V).shape == (0,)


@pytest.mark.parametrize("cap", [None, 5.0])
def test_never_allocates_all_logits(cap):
    positions, vocabulary, width, chunk = 256, 20_000, 4, 8
    hidden = torch.randn(positions, width, requires_grad=True)
    head = Head(torch.randn(vocabulary, width, requires_grad=True), None, cap=cap)
    targets = torch.randint(vocabulary, (positions,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        token_logprobs(hidden, targets, head, chunk * vocabulary).sum().backward()
    largest = max((event.cpu_memory_usage for event in recorded.events() if event.name == "aten::empty"), default=0)
    every = max(event.cpu_memory_usage for event in recorded.events())
    assert 0 < max(largest, every) <= 2 * chunk * vocabulary * 4 < positions * vocabulary * 4 / 10

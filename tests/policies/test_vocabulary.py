"""Chunked sums over the vocabulary against dense autograd, their memory, and the update that uses them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, gradients, quick, random_rows, weights
from torch.profiler import ProfilerActivity, profile

from graftrl.methods import build_method
from graftrl.objective import Objective, Term
from graftrl.objective.distillation import REFERENCE, LogMixture, transfer_mixture
from graftrl.objective.terms import TokenLoss
from graftrl.policies.config import LoraSettings, ModelSettings, SamplingSettings, ScorerSettings
from graftrl.policies.frozen import FrozenWeights
from graftrl.policies.hf import HFPolicy, UpdateStats
from graftrl.policies.logprobs import Head
from graftrl.policies.vocabulary import Distribution, mixture_signal, top_logprobs
from graftrl.rollout import Row

N, H, V = 13, 6, 37
MIXTURE = LogMixture({"expert": 1.0, "base": -1.0, REFERENCE: 1.5}, 1.5)


def distribution(width=H, vocabulary=V, *, seed, bias=True, scale=1.0, cap=None):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocabulary, width, generator=generator)
    offset = torch.randn(vocabulary, generator=generator) if bias else None
    return Distribution(torch.randn(N, width, generator=generator), Head(weight, offset, scale, cap))


def frozen_models():
    return {
        "expert": distribution(4, seed=1),
        "base": distribution(4, seed=2, cap=3.0),
        REFERENCE: distribution(seed=3),
    }


def dense_logits(model, vocabulary):
    head = model.head
    logits = torch.nn.functional.linear(model.hidden_NH, head.weight, head.bias) * head.scale
    if head.cap is not None:
        logits = torch.tanh(logits / head.cap) * head.cap
    return logits[:, :vocabulary]


def dense(own, frozen, mixture, vocabulary=V):
    """The formula with everything in memory, for autograd."""
    logits, target = dense_logits(own, vocabulary), 0.0
    for name, weight in mixture.weights.items():
        target = target + weight * dense_logits(frozen[name], vocabulary).log_softmax(-1)
    if mixture.support is not None:
        target, tokens = target.topk(mixture.support, dim=-1)
        logits = logits.gather(-1, tokens)
    p = logits.log_softmax(-1)
    return (p.exp() * (target - mixture.own * p)).sum(-1)


def trainable(own):
    inputs = [own.hidden_NH, own.head.weight, *([own.head.bias] if own.head.bias is not None else [])]
    return [tensor.requires_grad_() for tensor in inputs]


@pytest.mark.parametrize("elements", [1, 5 * 4 * V, 10**6])
@pytest.mark.parametrize("support", [None, 5, V])
@pytest.mark.parametrize(("bias", "scale", "cap"), [(True, 1.0, None), (False, 0.5, 2.0)])
def test_values_and_gradients_equal_dense_autograd(elements, support, bias, scale, cap):
    own, frozen = distribution(seed=0, bias=bias, scale=scale, cap=cap), frozen_models()
    inputs, mixture, upstream = trainable(own), replace(MIXTURE, support=support), torch.randn(N)
    signal, entropy = mixture_signal(own, frozen, mixture, elements)
    expected = dense(own, frozen, mixture)
    torch.testing.assert_close(signal, expected, rtol=1e-4, atol=1e-5)
    assert not entropy.requires_grad
    p = dense_logits(own, V).log_softmax(-1)
    torch.testing.assert_close(entropy, -(p.exp() * p).sum(-1).detach(), rtol=1e-4, atol=1e-5)
    for got, wanted in zip(
        torch.autograd.grad(signal, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-5)


def test_heads_padded_to_other_sizes_are_cut_to_the_smallest():
    own, frozen = distribution(vocabulary=V + 11, seed=0), {**frozen_models(), "base": distribution(4, V + 3, seed=2)}
    inputs = trainable(own)
    signal, _ = mixture_signal(own, frozen, MIXTURE, 10**6)
    expected = dense(own, frozen, MIXTURE)
    torch.testing.assert_close(signal, expected, rtol=1e-4, atol=1e-5)
    got, wanted = (torch.autograd.grad(x.sum(), inputs) for x in (signal, expected))
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=2e-5)
    assert not got[1][V:].any()  # entries that only padding has


def test_no_positions():
    own = distribution(seed=0)
    signal, entropy = mixture_signal(Distribution(own.hidden_NH[:0], own.head), {}, MIXTURE, 10)
    assert signal.shape == entropy.shape == (0,)


def test_the_most_likely_tokens():
    model = distribution(seed=4)
    tokens, logprobs = top_logprobs(model, 3, max_elements=2 * V)
    every = dense_logits(model, V).log_softmax(-1)
    assert torch.equal(tokens, every.topk(3, dim=-1).indices)
    torch.testing.assert_close(logprobs, every.topk(3, dim=-1).values)


def test_the_logits_of_all_positions_are_never_held():
    positions, vocabulary, chunk = 256, 20_000, 4
    frozen = {name: Distribution(torch.randn(positions, 4), Head(torch.randn(vocabulary, 4), None)) for name in "ab"}
    own = Distribution(
        torch.randn(positions, 4, requires_grad=True), Head(torch.randn(vocabulary, 4, requires_grad=True), None)
    )
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        signal, _ = mixture_signal(own, frozen, LogMixture({"a": 1.0, "b": -1.0}, 1.0), 3 * chunk * vocabulary)
        signal.sum().backward()
    largest = max(event.cpu_memory_usage for event in recorded.events() if event.name.startswith("aten::"))
    assert 0 < largest <= 2 * chunk * vocabulary * 4 < positions * vocabulary * 4 / 10


# The update -----------------------------------------------------------------------------------------------------------


def full_objective(mixture):
    def loss(tokens):
        return TokenLoss(-tokens.expected_signal_BT * tokens.advantages_BT)

    return Objective((Term(("own",), loss),), mixture=mixture)


@pytest.fixture
def proxies(model_folder):
    """Frozen models of other seeds; the base has another architecture."""
    store = FrozenWeights()
    folders = {"expert": model_folder("llama", seed=7), "base": model_folder("gpt2", seed=8)}
    return {name: store.model(name, ScorerSettings(path=str(folder), device="cpu")) for name, folder in folders.items()}


def rows_with_contexts(n):
    """Half of the rows are read by the scorers after other prompts than the policy's."""
    rows = random_rows(n)
    for i, row in enumerate(rows):
        row.advantages, row.weight = 1.0, 1.0
        prompt = row.prompt_token_ids if i % 2 else np.array([5, 6, 7, 8])
        row.contexts = {"expert": prompt, "base": row.prompt_token_ids}
    return rows


def dense_gradients(policy, rows, proxies, mixture):
    """One row at a time, all logits in memory."""
    policy.optimizer.zero_grad()
    tokens = sum(row.loss_tokens for row in rows)
    total = torch.zeros(())
    for row in rows:
        if not row.contexts:
            continue

        def logprobs(model, prompt, row=row):
            ids = torch.from_numpy(np.concatenate([prompt, row.response_token_ids]))
            return model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)

        models = {name: proxies[name].passes.loaded.causal_lm for name in ("expert", "base")}
        with torch.no_grad():
            target = sum(mixture.weights[name] * logprobs(m, row.contexts[name]) for name, m in models.items())
            reference = policy.reference.passes.loaded.causal_lm
            target = target + mixture.weights[REFERENCE] * logprobs(reference, row.prompt_token_ids)
        p = logprobs(policy.loaded.causal_lm, row.prompt_token_ids)
        total = total - (p.exp() * (target - mixture.own * p)).sum() / tokens
    total.backward()
    return float(total.detach()), [p.grad.clone() for p in policy.parameters]


@pytest.mark.parametrize("microbatch_tokens", [20, 10_000])
@pytest.mark.parametrize("calibration", [0.5, 1.5])
def test_the_full_form_of_a_real_model_equals_dense_autograd(policy, proxies, calibration, microbatch_tokens):
    mixture = transfer_mixture("expert", "base", calibration)
    p = policy("llama", optimizer=quick(), microbatch_tokens=microbatch_tokens, logit_elements=600)
    p.update([random_rows(4)], lambda _: Objective((Term(("own",), lambda t: TokenLoss(-t.logprobs_BT)),)))
    rows = rows_with_contexts(6)
    rows[3].contexts = {}  # counts in the denominator, adds no signal
    expected_loss, expected = dense_gradients(p, rows, proxies, mixture)
    loss = p._accumulate(rows, full_objective(mixture), UpdateStats(), proxies)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    for got, wanted in zip((q.grad for q in p.parameters), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-6)


def test_no_gradient_reaches_proxies_or_reference(policy, proxies):
    mixture = transfer_mixture("expert", "base", 1.0)
    p = policy("llama", optimizer=quick())
    frozen = [*proxies.values(), p.reference]
    before = [weight.clone() for model in frozen for weight in model.passes.loaded.causal_lm.parameters()]
    own = weights(p)
    p.update([rows_with_contexts(5)], lambda _: full_objective(mixture), proxies)
    after = [weight for model in frozen for weight in model.passes.loaded.causal_lm.parameters()]
    assert all(weight.grad is None and not weight.requires_grad for weight in after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(own, weights(p), strict=True))


def test_rows_constants_reach_the_loss_by_name(policy):
    seen = {}

    def loss(tokens):
        seen.update(tokens.constants)
        return TokenLoss(-tokens.logprobs_BT)

    rows = random_rows(2)
    rows[0].prompt_token_ids = np.full(30, 5)  # the longest row comes first
    rows[0].constants = {"expert": np.arange(len(rows[0].response_token_ids), dtype=np.float32)}
    gradients(policy("llama"), rows, Objective((Term(("own",), loss),)))
    length = len(rows[0].response_token_ids)
    assert seen.keys() == {"expert"}
    assert seen["expert"].shape == (2, max(length, len(rows[1].response_token_ids)))
    assert seen["expert"][0, :length].tolist() == list(range(length))
    assert not seen["expert"][1].any()


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)])
def test_a_models_reference_is_shared_with_scorers_of_its_path(model_folder, lora):
    store, folder = FrozenWeights(), str(model_folder("llama"))
    p = HFPolicy("m", ModelSettings(path=folder, device="cpu", lora=lora), SamplingSettings(), frozen=store)
    scorer = store.model("base", ScorerSettings(path=folder, device="cpu"))
    assert p.reference is scorer
    assert (p.reference.passes.loaded.causal_lm is p.loaded.causal_lm) == (lora is not None)


def test_the_sampled_gradient_over_all_tokens_is_the_full_one(policy, proxies):
    """Exactly, through the real update: every token of the vocabulary as a one-token response, weighted by its own
    probability, against one row of the full form."""
    methods = {e: build_method({"name": "p_opd", "estimator": e, "calibration": 1.5}) for e in ("sampled", "full")}
    p = policy("llama", optimizer=quick())
    p.update([random_rows(4)], lambda _: Objective((Term(("own",), lambda t: TokenLoss(-t.logprobs_BT)),)))
    prompt = np.array([5, 9, 12])
    every = [Row("q", prompt, np.array([token]), 1.0, "own", "m") for token in range(VOCABULARY)]
    for row, own in zip(every, p.score(every), strict=True):
        row.old_logprobs, row.advantages = own, float(np.exp(own[0])) * VOCABULARY  # the mean is over all tokens
    for name, proxy in proxies.items():
        for row, values in zip(every, proxy.logprobs(every), strict=True):
            row.constants[name] = values
    one = replace(every[0], advantages=1.0, constants={}, contexts=dict.fromkeys(proxies, prompt))
    p._accumulate(every, methods["sampled"].objective(0), UpdateStats(), proxies)
    sampled = [q.grad.clone() for q in p.parameters]
    p._accumulate([one], methods["full"].objective(0), UpdateStats(), proxies)
    for got, wanted in zip(sampled, (q.grad for q in p.parameters), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-6)

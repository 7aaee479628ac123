"""The distillation core against KL divergences, exact enumeration, and second implementations in float64 NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, logsumexp

from graftrl.objective.distillation import (
    REFERENCE,
    LogMixture,
    agrees,
    drift_gate,
    entropy,
    expected_signal,
    span_sums,
    token_importance,
    top_share,
    transfer_mixture,
    view_consensus,
)

STATES, VOCABULARY = 5, 7
LAMBDAS = [0.5, 1.0, 1.5]


def random_policies(*names: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Log-probabilities, float64 [states, vocabulary], by name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(STATES, VOCABULARY, generator=generator, dtype=torch.float64).log_softmax(-1)
        for name in names
    }


def optimum(policies: dict[str, torch.Tensor], calibration: float) -> np.ndarray:
    """log pi*, pi* proportional to pi_ref * (expert / base)^(1 / lambda): the paper's closed form, in NumPy."""
    ref, expert, base = (policies[name].numpy() for name in (REFERENCE, "expert", "base"))
    return log_softmax(ref + (expert - base) / calibration, axis=-1)


def kl(logits: torch.Tensor, target: np.ndarray) -> torch.Tensor:
    """sum over states of KL(softmax(logits) || target)."""
    p = logits.log_softmax(-1)
    return (p.exp() * (p - torch.from_numpy(target))).sum()


@pytest.mark.parametrize("calibration", LAMBDAS)
def test_the_full_forms_gradient_is_lambda_times_that_of_the_kl_to_the_optimum(calibration):
    policies = random_policies(REFERENCE, "expert", "base")
    mixture = transfer_mixture("expert", "base", calibration)
    logits = torch.randn(STATES, VOCABULARY, dtype=torch.float64, requires_grad=True)
    value, gradient = expected_signal(logits.detach(), mixture.target(policies), mixture.own)
    (of_kl,) = torch.autograd.grad(kl(logits, optimum(policies, calibration)), logits)
    torch.testing.assert_close(-gradient, calibration * of_kl)
    # The values differ by a constant of the state alone: lambda times the log of pi*'s normaliser.
    unnormalised = (policies[REFERENCE] + (policies["expert"] - policies["base"]) / calibration).numpy()
    constant = calibration * logsumexp(unnormalised, axis=-1)
    p = logits.detach().log_softmax(-1)
    of_state = (p.exp() * (p - torch.from_numpy(optimum(policies, calibration)))).sum(-1)
    torch.testing.assert_close(-value, calibration * of_state - torch.from_numpy(constant))


def test_expected_signals_own_gradient_is_that_of_autograd():
    policies = random_policies("a", "b", seed=3)
    mixture = LogMixture({"a": 0.7, "b": -1.3}, 0.4)
    logits = torch.randn(STATES, VOCABULARY, dtype=torch.float64, requires_grad=True)
    p = logits.log_softmax(-1)
    plain = (p.exp() * (0.7 * policies["a"] - 1.3 * policies["b"] - 0.4 * p)).sum(-1)
    value, gradient = expected_signal(logits.detach(), mixture.target(policies), mixture.own)
    torch.testing.assert_close(value, plain.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(plain.sum(), logits)[0])


@pytest.mark.parametrize("calibration", [0.0, *LAMBDAS])
def test_the_sampled_forms_expectation_is_the_full_form(calibration):
    """Exactly, by enumeration: E_{a ~ pi}[signal(a) * grad log pi(a)] is the full form's gradient."""
    policies = random_policies(REFERENCE, "expert", "base", seed=1)
    mixture = transfer_mixture("expert", "base", calibration)
    logits = torch.randn(STATES, VOCABULARY, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    surrogate = torch.zeros((), dtype=torch.float64)
    for token in range(VOCABULARY):
        at_token = {name: policy[:, token] for name, policy in policies.items()}
        signal = mixture.signal(at_token, logprobs[:, token]).detach()
        surrogate = surrogate + (logprobs[:, token].detach().exp() * signal * logprobs[:, token]).sum()
    (of_samples,) = torch.autograd.grad(surrogate, logits)
    _, of_all = expected_signal(logits.detach(), mixture.target(policies), mixture.own)
    torch.testing.assert_close(of_samples, of_all)


def test_lambda_one_with_the_proxys_base_as_reference_is_opd_toward_the_expert():
    policies = random_policies("expert", "base", seed=2)
    policies[REFERENCE] = policies["base"]
    own = random_policies("own", seed=9)["own"]
    of_transfer = transfer_mixture("expert", "base", 1.0).signal(policies, own)
    of_opd = LogMixture({"expert": 1.0}, 1.0).signal(policies, own)
    torch.testing.assert_close(of_transfer, of_opd)
    torch.testing.assert_close(of_opd, policies["expert"] - own)


def test_lambda_zero_has_neither_reference_nor_own_part():
    assert transfer_mixture("expert", "base", 0.0) == LogMixture({"expert": 1.0, "base": -1.0}, 0.0)


@pytest.mark.parametrize("calibration", LAMBDAS)
def test_full_steps_reach_the_closed_form_optimum(calibration):
    """Decoding from pi* directly is the oracle: the trained policy decodes as it does, greedily and in distribution."""
    policies = random_policies(REFERENCE, "expert", "base", seed=4)
    mixture = transfer_mixture("expert", "base", calibration)
    logits = policies[REFERENCE].clone()  # training starts at the reference
    for _ in range(60):
        _, gradient = expected_signal(logits, mixture.target(policies), mixture.own)
        logits = logits + 0.5 * gradient / logits.softmax(-1) / calibration  # the natural gradient
    reached, oracle = logits.log_softmax(-1).numpy(), optimum(policies, calibration)
    np.testing.assert_allclose(reached, oracle, atol=1e-6)
    assert (reached.argmax(-1) == oracle.argmax(-1)).all()


def test_sampled_steps_come_close_to_the_closed_form_optimum():
    """Many samples a state and step; what is left is sampling noise, far below the way from the start."""
    policies = random_policies(REFERENCE, "expert", "base", seed=5)
    mixture = transfer_mixture("expert", "base", 1.0)
    generator = torch.Generator().manual_seed(0)
    logits = policies[REFERENCE].clone()
    for _ in range(400):
        p = logits.softmax(-1)
        tokens = torch.multinomial(p, 64, replacement=True, generator=generator)
        at_tokens = {name: policy.gather(-1, tokens) for name, policy in policies.items()}
        signal = mixture.signal(at_tokens, p.log().gather(-1, tokens))
        gradient = torch.zeros_like(p).scatter_add(-1, tokens, signal / 64) - p * signal.mean(-1, keepdim=True)
        logits = logits + 0.5 * gradient
    start, end = (float(kl(x, optimum(policies, 1.0))) for x in (policies[REFERENCE], logits))
    assert end < 0.02 * start


def test_entropy_of_a_known_distribution():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(3.0), 0.0, -torch.inf, -torch.inf]])
    expected = [math.log(4), -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))]
    torch.testing.assert_close(entropy(logits[:1]), torch.tensor(expected[:1]))
    torch.testing.assert_close(entropy(logits[1:, :2]), torch.tensor(expected[1:]))


def test_agreement_needs_the_outcomes_sign():
    signal = torch.tensor([0.3, -0.3, 0.0, 0.3, -0.3])
    outcomes = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    assert agrees(signal, outcomes).tolist() == [True, False, False, False, True]
    assert not agrees(signal, torch.zeros(5)).any()  # half right: no sign to agree with


def consensus_in_numpy(views: np.ndarray, own: np.ndarray) -> np.ndarray:
    out = np.zeros_like(own)
    for i in np.ndindex(own.shape):
        q = np.exp(views[(slice(None), *i)])
        d = np.log(q) - own[i]
        a = d.mean()
        j = math.log(q.mean()) - np.log(q).mean()
        if np.abs(d).mean() > 0 and abs(a) + j > 0:
            a = a + (abs(a) / np.abs(d).mean()) * (abs(a) / (abs(a) + j)) * j
        out[i] = a
    return out


@given(st.integers(1, 4), st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_consensus_of_views_equals_the_formula(count, seed):
    rng = np.random.default_rng(seed)
    views, own = -rng.exponential(2.0, (count, 2, 3)), -rng.exponential(2.0, (2, 3))
    got = view_consensus(torch.from_numpy(views), torch.from_numpy(own)).numpy()
    np.testing.assert_allclose(got, consensus_in_numpy(views, own), rtol=1e-9, atol=1e-12)


def test_consensus_by_hand():
    # Views 0.4 and 0.1, policy 0.2: D = +-log 2, so A = 0 and nothing is left of the disagreement.
    views = torch.tensor([[0.4], [0.1]], dtype=torch.float64).log()
    assert view_consensus(views, torch.tensor([0.2], dtype=torch.float64).log()).abs().item() < 1e-12
    # One view is plain distillation; views that agree with the policy ask for nothing.
    one = torch.tensor([[0.4]], dtype=torch.float64).log()
    assert view_consensus(one, torch.tensor([0.1], dtype=torch.float64).log()).item() == pytest.approx(math.log(4))
    same = torch.full((3, 1), 0.3).log()
    assert view_consensus(same, same[0]).item() == 0.0


def gate_by_loops(logprobs, old, mask, tau, block):
    gates = np.zeros(logprobs.shape)
    for b, row in enumerate(mask):
        for start in range(0, len(row), block):
            inside = [t for t in range(start, min(start + block, len(row))) if row[t]]
            drift = np.mean([old[b, t] - logprobs[b, t] for t in inside]) if inside else 0.0
            gates[b, start : start + block] = math.exp(-tau * abs(drift))
        gates[b] /= gates[b][row].mean()
    return gates


@pytest.mark.parametrize("block", [1, 3, 4, 64])
def test_drift_gates_equal_a_plain_loop(block):
    rng = np.random.default_rng(0)
    logprobs, old = rng.normal(size=(3, 10)), rng.normal(size=(3, 10))
    mask = np.arange(10) < np.array([10, 7, 4])[:, None]
    mask[0, 2] = False
    logprobs[~mask], old[~mask] = 50.0, -50.0  # padding may hold anything
    got = drift_gate(*map(torch.from_numpy, (logprobs, old, mask)), 0.7, block).numpy()
    expected = gate_by_loops(logprobs, old, mask, 0.7, block)
    np.testing.assert_allclose(got[mask], expected[mask], rtol=1e-12)
    np.testing.assert_allclose([got[b][mask[b]].mean() for b in range(3)], 1.0)


def test_without_drift_every_gate_is_one_and_no_gradient_flows():
    logprobs = torch.randn(2, 5, requires_grad=True)
    gate = drift_gate(logprobs, logprobs.detach(), torch.ones(2, 5, dtype=torch.bool), 3.0, 2)
    assert torch.equal(gate, torch.ones(2, 5)) and not gate.requires_grad


def test_importance_is_large_for_either_reason_and_ignores_padding():
    mask = torch.tensor([[True, True, True, True, False]])
    h = torch.tensor([[2.0, 0.0, 1.0, 0.0, 99.0]])
    d = torch.tensor([[0.0, 4.0, 1.0, 0.0, 99.0]])
    expected = [1.0, 1.0, 1 - 0.5 * 0.75, 0.0]
    torch.testing.assert_close(token_importance(h, d, mask)[0, :4], torch.tensor(expected))
    assert not token_importance(0 * h, 0 * d, mask).any()


@pytest.mark.parametrize(("share", "count"), [(0.2, 1), (0.4, 2), (0.41, 3), (1.0, 5), (0.01, 1)])
def test_the_top_share_takes_the_highest_tokens_and_of_equal_ones_the_earlier(share, count):
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.5, 0.2, 7.0]])
    mask = torch.tensor([[True] * 5 + [False]])
    assert top_share(scores, mask, share).nonzero()[:, 1].tolist() == sorted([1, 2, 3, 4, 0][:count])


def test_span_sums_stand_at_every_token_of_the_span():
    values = torch.tensor([[1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 9.0, 9.0]])
    spans = torch.tensor([[0, 0, 1, 2], [0, 1, 0, 0]])
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    assert span_sums(values, spans, mask)[mask].tolist() == [3.0, 3.0, 4.0, 8.0, 1.0, 2.0]

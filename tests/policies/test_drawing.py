"""Drawing tokens: the distribution, truncation, and the log-probability that goes with each token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_models import ARCHITECTURES, EOS, VOCABULARY, prompts

from graftrl.policies.config import SamplingSettings
from graftrl.policies.logprobs import Head
from graftrl.policies.sampling import draw, draw_tiled, truncate
from graftrl.rollout import Row


@pytest.mark.parametrize("vocabulary", [7, 2048, 2049, 5000, 5120])
def test_draw_follows_the_softmax(vocabulary):
    torch.manual_seed(0)
    logits = 2 * torch.randn(vocabulary)
    logits[vocabulary // 3] += 6
    logits[-1] += 6
    n = 40_000
    uniform = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    chosen = torch.cat([draw(logits.repeat(len(u), 1), u)[0] for u in uniform.split(2000)])
    probabilities = logits.double().softmax(-1).numpy()
    counts = np.bincount(chosen.numpy(), minlength=vocabulary)
    order = np.argsort(-probabilities)
    frequent = order[probabilities[order] * n >= 8]
    observed = np.append(counts[frequent], n - counts[frequent].sum())
    expected = np.append(probabilities[frequent], 1 - probabilities[frequent].sum()) * n
    keep = expected > 1
    observed, expected = observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum()
    assert stats.chisquare(observed, expected).pvalue > 1e-3


@pytest.mark.parametrize("vocabulary", [50, 3000])
def test_draw_inverts_the_cumulative_distribution(vocabulary):
    """Exactly: the token is the first whose cumulative probability exceeds u."""
    torch.manual_seed(0)
    logits = torch.randn(300, vocabulary)
    uniform = torch.rand(300, dtype=torch.float64)
    cumulative = logits.double().softmax(-1).cumsum(-1)
    expected = (cumulative > uniform[:, None]).int().argmax(-1)
    chosen, logprobs = draw(logits.clone(), uniform)
    # float32 block sums may shift a boundary by 1e-7; none of these numbers lies that near to one
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(
        logprobs, logits.log_softmax(-1).gather(-1, chosen[:, None]).squeeze(-1), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("vocabulary", [8, 2500])
def test_impossible_tokens_are_never_drawn(vocabulary):
    logits = torch.full((4, vocabulary), -torch.inf)
    possible = [1, vocabulary - 3]
    logits[:, possible] = 0.0  # a tie; first, last and all in between have probability 0
    uniform = torch.tensor([0.0, 0.5 - 1e-12, 0.5, 1 - 2**-53], dtype=torch.float64)
    chosen, logprobs = draw(logits.clone(), uniform)
    assert chosen.tolist() == [1, 1, vocabulary - 3, vocabulary - 3]
    torch.testing.assert_close(logprobs, torch.full((4,), -np.log(2), dtype=torch.float32))


@pytest.mark.parametrize("vocabulary", [64, 4096 + 100])
def test_uniform_at_the_ends(vocabulary):
    logits = torch.zeros(2, vocabulary)
    chosen, _ = draw(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert chosen.tolist() == [0, vocabulary - 1]


@pytest.mark.parametrize("vocabulary", [2049, 5000, 5120])
@pytest.mark.parametrize("elements", [1, 512 * 700, 1 << 24])
def test_tiled_draw_equals_the_draw_from_all_logits(vocabulary, elements):
    torch.manual_seed(0)
    hidden, head = torch.randn(300, 8), Head(torch.randn(vocabulary, 8), torch.randn(vocabulary), scale=0.7)
    uniform = torch.rand(300, dtype=torch.float64)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
    expected, expected_logprobs = draw(head.logits(hidden), uniform)
    chosen, logprobs = draw_tiled(hidden, head, uniform, elements)
    # float32 sums in another order may move a boundary by 1e-7, which none of these numbers is near enough to notice
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)
    whole = head.logits(hidden).log_softmax(-1).gather(-1, chosen[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs, whole, rtol=1e-5, atol=1e-5)


def numpy_truncate(logits, temperature, top_k, top_p):
    """Probabilities of one row: temperature, then the top_k, then the smallest set of mass >= top_p."""
    scaled = np.asarray(logits, np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    if top_k:
        order = order[:top_k]
    p = np.exp(scaled[order] - scaled[order].max())
    p /= p.sum()
    size = int(np.searchsorted(np.cumsum(p), top_p)) + 1 if top_p < 1 else len(order)
    out = np.zeros(len(scaled))
    out[order[:size]] = p[:size] / p[:size].sum()
    return out


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [0.05, 0.8, 1.0])
def test_truncate_against_numpy(temperature, top_k, top_p):
    torch.manual_seed(3)
    logits = 2 * torch.randn(20, 40)
    settings = SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p)
    ours = truncate(logits.clone(), settings).softmax(-1).numpy()
    expected = np.stack([numpy_truncate(row, temperature, top_k, top_p) for row in logits.numpy()])
    np.testing.assert_allclose(ours, expected, atol=1e-6)


def test_temperature_zero_is_greedy():
    torch.manual_seed(0)
    logits = torch.randn(9, 40)
    chosen, logprobs = draw(truncate(logits.clone(), SamplingSettings(temperature=0)), torch.rand(9).double())
    assert torch.equal(chosen, logits.argmax(-1))
    assert torch.equal(logprobs, torch.zeros(9))


MIXED = ("a", "what is 7+5?", "count: banana", "xyz", "hello world 123 hello")


def rows_of(policy, groups):
    return [
        Row(
            group.prompt.id,
            policy.codec.prompt_token_ids(group.prompt),
            response.token_ids,
            1.0,
            "own",
            "m",
            old_logprobs=response.logprobs,
        )
        for group in groups
        for response in group.responses
    ]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_generation_logprobs_equal_a_scoring_pass(policy, kind):
    """Left padding, positions, the cache and dropped rows change nothing: the first ratio is 1."""
    p = policy(kind, sampling={"max_response_tokens": 20})
    groups = p.sample(prompts(*MIXED), 6, seed=1)
    reasons = {r.finish_reason for g in groups for r in g.responses}
    assert reasons == {"stop", "length"}, "the models must end some responses, so that rows leave the batch"
    rows = rows_of(p, groups)
    assert p.generation_gap(rows) < 1e-4
    with torch.no_grad():  # and against transformers itself, each sequence alone
        for row in rows[::7]:
            ids = np.concatenate([row.prompt_token_ids, row.response_token_ids])
            logits = p.loaded.causal_lm(input_ids=torch.from_numpy(ids)[None]).logits[0].float().log_softmax(-1)
            alone = logits[len(row.prompt_token_ids) - 1 : -1].gather(
                -1, torch.from_numpy(row.response_token_ids)[:, None]
            )
            np.testing.assert_allclose(row.old_logprobs, alone.squeeze(-1).numpy(), atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_long_prompts_beyond_the_sliding_window(policy, kind):
    p = policy(kind, sampling={"max_response_tokens": 30})
    groups = p.sample(prompts("a", "abcdefghijklmnopqrstuvwxyz", "0123456789"), 3, seed=5)
    assert p.generation_gap(rows_of(p, groups)) < 1e-4


def test_responses_end_at_eos_or_at_the_limit(policy):
    p = policy("llama")
    for group in p.sample(prompts(*MIXED), 8, seed=0):
        for r in group.responses:
            assert len(r.token_ids) == len(r.logprobs) <= 12
            assert EOS not in r.token_ids[:-1]
            assert (r.finish_reason == "stop") == (r.token_ids[-1] == EOS)
            if r.finish_reason == "length":
                assert len(r.token_ids) == 12
            assert "</s>" not in r.text
            assert r.reward is None


def test_every_listed_eos_stops(policy, model_folder):
    folder = model_folder("llama", generation={"eos_token_id": [5, 9, EOS]})
    p = policy(folder=folder, extra_stop_tokens=["z"])
    z = p.codec.tokenizer.convert_tokens_to_ids("z")
    assert set(p.codec.eos_ids) == {5, 9, EOS, z}
    responses = [r for g in p.sample(prompts(*MIXED), 40, seed=0) for r in g.responses]
    stops = {int(r.token_ids[-1]) for r in responses if r.finish_reason == "stop"}
    assert stops == {5, 9, EOS, z}
    for r in responses:
        assert not set(r.token_ids[:-1].tolist()) & stops
        assert (r.finish_reason == "stop") == (int(r.token_ids[-1]) in stops)


def test_same_seed_same_samples_and_other_seed_others(policy):
    p = policy("llama")

    def texts(seed):
        return [r.text for g in p.sample(prompts(*MIXED), 4, seed=seed) for r in g.responses]

    assert texts(3) == texts(3)
    assert texts(3) != texts(4)


def test_logit_elements_do_not_change_the_samples(policy):
    def ids(p):
        return [r.token_ids.tolist() for g in p.sample(prompts(*MIXED), 4, seed=3) for r in g.responses]

    assert (
        ids(policy("llama"))
        == ids(policy("llama", logit_elements=3 * VOCABULARY))
        == ids(policy("llama", logit_elements=1))
    )


def test_groups_keep_prompt_order_across_chunks(policy):
    p = policy("llama", sample_rows=4)
    groups = p.sample(prompts(*MIXED), 2, seed=0)
    assert [g.prompt.id for g in groups] == [f"p{i}" for i in range(len(MIXED))]
    assert all(g.size == 2 for g in groups)
    assert p.generation_gap(rows_of(p, groups)) < 1e-4


def test_responses_of_one_token(policy):
    p = policy("llama", sampling={"max_response_tokens": 1})
    groups = p.sample(prompts("a", "bcd"), 5, seed=0)
    assert all(len(r.token_ids) == 1 for g in groups for r in g.responses)
    assert p.generation_gap(rows_of(p, groups)) < 1e-4


def test_sampled_first_tokens_follow_the_model(policy):
    p = policy("llama", sampling={"max_response_tokens": 1}, sample_rows=4000)
    (group,) = p.sample(prompts("abc"), 4000, seed=2)
    ids = torch.from_numpy(p.codec.prompt_token_ids(group.prompt))[None]
    with torch.no_grad():
        probabilities = p.loaded.causal_lm(input_ids=ids).logits[0, -1].double().softmax(-1).numpy()
    counts = np.bincount([r.token_ids[0] for r in group.responses], minlength=VOCABULARY)
    keep = probabilities * 4000 >= 5
    observed = np.append(counts[keep], counts[~keep].sum() + 1e-9)
    expected = np.append(probabilities[keep], probabilities[~keep].sum() + 1e-9) * 4000
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


def test_evaluation_settings_are_used(policy):
    p = policy("llama")
    greedy = SamplingSettings(max_response_tokens=6, temperature=0)
    (group,) = p.sample(prompts("abc"), 3, seed=0, sampling=greedy)
    assert len({r.text for r in group.responses}) == 1
    assert all((r.logprobs == 0).all() for r in group.responses)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_with_a_seed_of_its_own_a_prompt_gets_the_same_responses_in_any_company(policy, kind):
    model = policy(kind)
    asked, plain = prompts("2+2=", "hello there, ", "x"), SamplingSettings(max_response_tokens=8)

    def drawn(chosen):
        generators = [torch.Generator().manual_seed(10 + i) for i in chosen]
        return model.draw([model.codec.prompt_token_ids(asked[i]) for i in chosen], 4, generators, plain)

    together = drawn([0, 1, 2])
    for i in range(3):
        (alone,) = drawn([i])
        for ours, theirs in zip(together[i], alone, strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist() and ours.stopped == theirs.stopped
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    assert len({tuple(response.token_ids.tolist()) for response in together[0]}) > 1

"""Losses and gradients against verl's own functions, where verl is installed (0.9.1 when this was written)."""

import numpy as np
import pytest
import torch

from graftrl.objective import (
    clipped,
    clipped_surrogate,
    dual_clipped_surrogate,
    group_advantages,
    k3_kl,
    sequence_log_ratio,
    sequence_mean,
    token_mean,
)
from graftrl.objective.reduction import response_limit
from graftrl.objective.terms import weighted_sum

core = pytest.importorskip("verl.trainer.ppo.core_algos")
ActorConfig = pytest.importorskip("verl.workers.config").ActorConfig

LOW, HIGH = 0.2, 0.28
LIMIT = 20


@pytest.fixture(params=[0, 1, 2])
def batch(request, make_minibatch):
    return make_minibatch(seed=request.param)


def verl_loss(batch, *, mode="vanilla", aggregation="token-mean", dual_clip=3.0, limit=None):
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=dual_clip,
        loss_agg_mode=aggregation,
        loss_scale_factor=limit,
    )
    config.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=int(batch.mask.sum()),
        global_batch_size=len(batch.mask),
        loss_scale_factor=limit,
    )
    logprobs = batch.logprobs.detach().clone().requires_grad_()
    loss, metrics = core.get_policy_loss_fn(mode)(
        old_log_prob=batch.old,
        log_prob=logprobs,
        advantages=batch.advantages.expand_as(batch.old),
        response_mask=batch.mask.long(),
        loss_agg_mode=aggregation,
        config=config,
    )
    loss.backward()
    return loss.item(), logprobs.grad, metrics


def our_loss(batch, reduction, token_loss):
    logprobs = batch.logprobs.detach().clone().requires_grad_()
    loss = weighted_sum(token_loss(logprobs), batch.mask, torch.from_numpy(reduction(batch.lengths)))
    loss.backward()
    return loss.item(), logprobs.grad


def assert_same(ours, theirs):
    assert ours[0] == pytest.approx(theirs[0], rel=1e-7)  # its mean over tokens divides by the count + 1e-8
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("aggregation", "reduction", "limit"),
    [
        ("token-mean", token_mean, None),
        ("seq-mean-token-mean", sequence_mean, None),
        ("seq-mean-token-sum-norm", response_limit(LIMIT), LIMIT),
        ("seq-mean-token-sum", response_limit(1), None),
    ],
)
@pytest.mark.parametrize("dual_clip", [3.0, 1.2])
def test_clipped_surrogate_under_each_aggregation(batch, aggregation, reduction, limit, dual_clip):
    def token_loss(logprobs):
        return -dual_clipped_surrogate(logprobs, batch.old, batch.advantages, LOW, HIGH, dual_clip)

    theirs = verl_loss(batch, aggregation=aggregation, limit=limit, dual_clip=dual_clip)
    assert_same(our_loss(batch, reduction, token_loss), theirs)
    outside = clipped(batch.logprobs, batch.old, batch.advantages, LOW, HIGH) & batch.mask
    assert theirs[2]["actor/pg_clipfrac"] == pytest.approx(float(outside.sum() / batch.mask.sum()), rel=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "reduction"), [("token-mean", token_mean), ("seq-mean-token-mean", sequence_mean)]
)
def test_sequence_ratio(batch, aggregation, reduction):
    def token_loss(logprobs):
        log_ratio = sequence_log_ratio(logprobs, batch.old, batch.mask)
        return -clipped_surrogate(log_ratio, torch.zeros_like(log_ratio), batch.advantages, LOW, HIGH)

    assert_same(our_loss(batch, reduction, token_loss), verl_loss(batch, mode="gspo", aggregation=aggregation))


def test_k3_is_its_low_variance_kl(batch):
    torch.testing.assert_close(
        k3_kl(batch.logprobs, batch.ref), core.kl_penalty(batch.logprobs, batch.ref, "low_var_kl")
    )


@pytest.mark.parametrize("normalize", [True, False])
def test_group_advantages(normalize):
    rewards = np.random.default_rng(0).integers(2, size=(6, 8)).astype(np.float64)
    rewards[1] = 1.0
    advantages, _ = core.compute_grpo_outcome_advantage(
        token_level_rewards=torch.from_numpy(rewards.reshape(-1, 1)),
        response_mask=torch.ones(48, 1),
        index=np.repeat(np.arange(6), 8),
        norm_adv_by_std_in_grpo=normalize,
    )
    ours = group_advantages(rewards, normalize_std=normalize)
    torch.testing.assert_close(advantages.view(6, 8), ours)
    assert not ours[1].any()

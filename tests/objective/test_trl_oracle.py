"""Losses and gradients against TRL's GRPO loss, run on given log-probabilities instead of a model."""

from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from graftrl.objective import (
    clipped,
    clipped_surrogate,
    constant_divisor,
    dual_clipped_surrogate,
    group_advantages,
    importance_ratio,
    k3_kl,
    sequence_log_ratio,
    sequence_mean,
    token_mean,
)
from graftrl.objective.reduction import response_limit
from graftrl.objective.terms import weighted_sum

pytest.importorskip("trl")
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import nanstd

LOW, HIGH = 0.2, 0.28
MAX_LENGTH = 20


def trl_loss(
    batch,
    loss_type,
    *,
    beta=0.0,
    delta=None,
    level="token",
    microbatches=(slice(None),),
    optimizer_steps=1,
    bias_correction_kl=False,
    metrics=None,
):
    """TRL's loss and gradient, added up over microbatches. Its attributes are set by hand, so that its own
    `_compute_loss` runs on the log-probabilities of `batch`.

    optimizer_steps: over which TRL spreads the microbatches of a generation batch.
    """
    steps = len(microbatches)
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    trainer = SimpleNamespace(
        accelerator=accelerator,
        args=SimpleNamespace(delta=delta, steps_per_generation=steps, use_bias_correction_kl=bias_correction_kl),
        aux_loss_enabled=False,
        beta=beta,
        current_gradient_accumulation_steps=steps // optimizer_steps,
        epsilon_low=LOW,
        epsilon_high=HIGH,
        importance_sampling_level=level,
        loss_type=loss_type,
        max_completion_length=MAX_LENGTH,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list) if metrics is None else metrics},
    )
    logprobs = batch.logprobs.detach().clone().requires_grad_()
    total = 0.0
    for part in microbatches:
        given = logprobs[part]
        trainer._get_per_token_logps_and_entropies = lambda *_, given=given, **__: (given, given.detach(), None)
        mask = batch.mask[part].long()
        inputs = {
            "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
            "completion_ids": torch.zeros_like(mask),
            "completion_mask": mask,
            "advantages": batch.advantages[part, 0],
            "old_per_token_logps": batch.old[part],
            "ref_per_token_logps": batch.ref[part],
            "num_items_in_batch": batch.mask.sum(),
        }
        loss = GRPOTrainer._compute_loss(trainer, None, inputs)
        loss.backward()
        total += loss.item()
    return total, logprobs.grad


def our_loss(batch, reduction, token_loss):
    logprobs = batch.logprobs.detach().clone().requires_grad_()
    loss = weighted_sum(token_loss(logprobs), batch.mask, torch.from_numpy(reduction(batch.lengths)))
    loss.backward()
    return loss.item(), logprobs.grad


def assert_same(ours, theirs):
    assert ours[0] == pytest.approx(theirs[0], rel=1e-12)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-10, atol=1e-14)


@pytest.fixture(params=[0, 1, 2])
def batch(request, make_minibatch):
    return make_minibatch(seed=request.param)


def surrogate_of(batch):
    return lambda logprobs: -clipped_surrogate(logprobs, batch.old, batch.advantages, LOW, HIGH)


@pytest.mark.parametrize(
    ("loss_type", "reduction"),
    [
        ("dapo", token_mean),
        ("bnpo", token_mean),
        ("grpo", sequence_mean),
        ("dr_grpo", constant_divisor(6 * MAX_LENGTH)),
        ("dr_grpo", response_limit(MAX_LENGTH)),
    ],
)
def test_clipped_surrogate_under_each_reduction(batch, loss_type, reduction):
    assert_same(our_loss(batch, reduction, surrogate_of(batch)), trl_loss(batch, loss_type))


@pytest.mark.parametrize("cuts", [(3,), (1, 2), (1, 2, 3, 4, 5)])
def test_token_mean_over_accumulated_microbatches(batch, cuts):
    bounds = [0, *cuts, 6]
    microbatches = [slice(a, b) for a, b in pairwise(bounds)]
    theirs = trl_loss(batch, "dapo", microbatches=microbatches)
    assert_same(our_loss(batch, token_mean, surrogate_of(batch)), theirs)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_k3_penalty(batch, loss_type):
    def token_loss(logprobs):
        return surrogate_of(batch)(logprobs) + 0.04 * k3_kl(logprobs, batch.ref)

    reduction = token_mean if loss_type == "dapo" else sequence_mean
    assert_same(our_loss(batch, reduction, token_loss), trl_loss(batch, loss_type, beta=0.04))


def test_trls_default_penalty_is_the_ratio_times_k3(batch):
    def token_loss(logprobs):
        return surrogate_of(batch)(logprobs) + 0.04 * importance_ratio(logprobs, batch.old) * k3_kl(logprobs, batch.ref)

    theirs = trl_loss(batch, "dapo", beta=0.04, bias_correction_kl=True)
    assert_same(our_loss(batch, token_mean, token_loss), theirs)
    assert not torch.allclose(theirs[1], trl_loss(batch, "dapo", beta=0.04)[1])


def test_trl_spreads_the_tokens_of_a_generation_batch_evenly_over_its_optimizer_steps(batch):
    """So its loss of one optimizer step is ours times that step's tokens over the mean of all steps."""
    parts = (slice(0, 3), slice(3, 6))
    theirs = trl_loss(batch, "dapo", microbatches=parts, optimizer_steps=2)
    ours = [our_loss(part_of(batch, part), token_mean, surrogate_of(part_of(batch, part))) for part in parts]
    shares = [batch.lengths[part].sum() / batch.lengths.sum() * 2 for part in parts]
    assert shares[0] != pytest.approx(1.0)
    assert theirs[0] == pytest.approx(sum(loss * share for (loss, _), share in zip(ours, shares, strict=True)))
    gradient = torch.cat([grad * share for (_, grad), share in zip(ours, shares, strict=True)])
    torch.testing.assert_close(gradient, theirs[1])


def part_of(batch, rows):
    return SimpleNamespace(**{name: value[rows] for name, value in vars(batch).items()})


def test_the_share_of_clipped_tokens_is_trls_region_mean(batch):
    metrics = defaultdict(list)
    trl_loss(batch, "dapo", metrics=metrics)
    outside = clipped(batch.logprobs, batch.old, batch.advantages, LOW, HIGH) & batch.mask
    assert 0 < outside.sum() < batch.mask.sum()
    assert metrics["clip_ratio/region_mean"] == [pytest.approx(float(outside.sum() / batch.mask.sum()))]


def test_dual_clip(batch):
    def token_loss(logprobs):
        return -dual_clipped_surrogate(logprobs, batch.old, batch.advantages, LOW, HIGH, 1.5)

    ours = our_loss(batch, token_mean, token_loss)
    assert_same(ours, trl_loss(batch, "dapo", delta=1.5))
    assert ours[0] != our_loss(batch, token_mean, surrogate_of(batch))[0]  # the bound was reached


def test_a_delta_below_the_upper_clip_is_another_bound_in_trl(batch):
    def token_loss(logprobs):
        return -dual_clipped_surrogate(logprobs, batch.old, batch.advantages, LOW, HIGH, 1.1)

    ours, theirs = our_loss(batch, token_mean, token_loss), trl_loss(batch, "dapo", delta=1.1)
    assert ours[0] != pytest.approx(theirs[0], rel=1e-6)


@pytest.mark.parametrize(("loss_type", "reduction"), [("grpo", sequence_mean), ("dapo", token_mean)])
def test_sequence_ratio(batch, loss_type, reduction):
    def token_loss(logprobs):
        log_ratio = sequence_log_ratio(logprobs, batch.old, batch.mask)
        return -clipped_surrogate(log_ratio, torch.zeros_like(log_ratio), batch.advantages, LOW, HIGH)

    assert_same(our_loss(batch, reduction, token_loss), trl_loss(batch, loss_type, level="sequence"))


def test_group_advantages_use_the_same_standard_deviation():
    rewards = torch.from_numpy(np.random.default_rng(0).random((5, 8)))
    theirs = (rewards - rewards.mean(dim=1, keepdim=True)) / (nanstd(rewards, dim=1)[:, None] + 1e-4)
    torch.testing.assert_close(group_advantages(rewards, eps=1e-4), theirs)

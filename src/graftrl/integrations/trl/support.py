"""Which versions and settings of TRL the adapter stands on. Whatever else could bend a number is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from graftrl.errors import ConfigError

OLDEST, TOO_NEW = "1.14.2", "1.17"  # tests passed with 1.14.2 and 1.16.0; 1.15.0 itself needs a GPU
HARMLESS_GENERATION = {"eos_token_id", "pad_token_id", "bos_token_id", "max_new_tokens", "use_cache"}


def check_version() -> None:
    """Raises ConfigError unless a TRL is installed whose inner parts the adapter knows."""
    try:
        found = version("trl")
    except PackageNotFoundError as error:
        raise ConfigError("this needs TRL: pip install 'graftrl[trl]'") from error
    if not Version(OLDEST) <= Version(found) < Version(TOO_NEW):
        raise ConfigError(
            f"TRL {found} is installed; the adapter replaces inner parts of GRPOTrainer, which it knows in versions "
            f"{OLDEST} to below {TOO_NEW}: pip install 'trl>={OLDEST},<{TOO_NEW}'"
        )


def refuse_unrecordable(args: Any) -> None:
    """Sampling settings that a rollout log has no column for. Raises ConfigError."""
    for line in _odd_sampling(args):
        raise ConfigError(f"{line}; a rollout log cannot say so")


def refuse_unsupported(args: Any, others: dict[str, Any]) -> None:
    """Settings under which grafted rows would be wrong, or were never tried.

    Args:
        args: a GRPOConfig. others: further arguments of the trainer.

    Raises:
        ConfigError: the first one, and what to set instead.
    """
    for line in (*_odd_sampling(args), *_unsupported(args)):
        raise ConfigError(line)
    for name in ("tools", "rollout_func", "environment_factory"):
        if others.get(name):
            raise ConfigError(f"{name} is not supported: a graft replaces one plain response a row")


def _odd_sampling(args: Any) -> Iterator[str]:
    if args.min_p:
        yield f"min_p={args.min_p:g} is not supported: leave it out"
    if args.repetition_penalty != 1.0:
        yield f"repetition_penalty={args.repetition_penalty:g} is not supported: set 1.0"
    for key in sorted({*(args.generation_kwargs or {})} - HARMLESS_GENERATION):
        yield f"generation_kwargs[{key!r}] is not supported: it may change the distribution that is sampled from"


def _unsupported(args: Any) -> Iterator[str]:
    plain = args.temperature == 1.0 and args.top_p == 1.0 and not args.top_k
    if not plain:
        yield (
            f"temperature={args.temperature:g}, top_p={args.top_p:g}, top_k={args.top_k}: importance ratios and "
            "compatibility scores need samples of the unmodified distribution; set temperature=1.0, top_p=1.0, top_k=0"
        )
    if args.world_size > 1:
        yield f"{args.world_size} processes: GraftTrainer trains in one; start the script without a launcher"
    if args.use_vllm:
        yield "use_vllm=True is not supported: responses must come from the weights in this process; set use_vllm=False"
    if args.use_transformers_continuous_batching:
        yield "use_transformers_continuous_batching=True is not supported; leave it out"
    if args.use_liger_kernel or getattr(args, "use_liger_loss", False):
        yield "the liger kernels are not supported: their loss knows no weights per row; set use_liger_kernel=False"
    if args.loss_type != "dapo":
        yield (
            f"loss_type={args.loss_type!r} is not supported: grafted rows need one denominator for all tokens of a "
            "minibatch; set loss_type='dapo'"
        )
    if args.scale_rewards not in ("group", "none"):
        yield (
            f"scale_rewards={args.scale_rewards!r} is not supported: a peer's advantages are those of its own group; "
            "set 'group' or 'none'"
        )
    if args.multi_objective_aggregation != "sum_then_normalize":
        found = args.multi_objective_aggregation
        yield f"multi_objective_aggregation={found!r} is not supported: set 'sum_then_normalize'"
    if args.beta:
        yield f"beta={args.beta:g} is not supported: TRL would hold grafted rows to the reference as well; set beta=0.0"
    off: dict[str, Any] = {
        "mask_truncated_completions": False,
        "top_entropy_quantile": 1.0,
        "entropy_coef": 0.0,
        "use_adaptive_entropy": False,
        "off_policy_mask_threshold": None,
    }
    for name, value in off.items():
        if getattr(args, name) != value:
            yield f"{name}={getattr(args, name)!r} is not supported: set {value!r}"
    yield from _uneven(args)


def _uneven(args: Any) -> Iterator[str]:
    if args.steps_per_generation % args.gradient_accumulation_steps:
        yield (
            f"steps_per_generation={args.steps_per_generation} is no multiple of gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}: an optimizer step would mix two generations"
        )
        return
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if rows % args.num_generations:
        yield (
            f"an optimizer step has {rows} rows (per_device_train_batch_size x gradient_accumulation_steps), no "
            f"multiple of num_generations={args.num_generations}: minibatches are cut by prompt, not by row"
        )

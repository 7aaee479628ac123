"""What a response in a rollout log must satisfy: one list of rules, for readers and for `graftrl logs validate`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

import polars as pl

from graftrl.rollout import FinishReason

NEVER_NULL = ("step", "model", "prompt_id", "task", "messages", "response_index", "text", "finish_reason", "reward")
SAMPLING = ("temperature", "top_p", "top_k")
PLAIN = (1.0, 1.0, 0)  # temperature, top_p, top_k of the model's own distribution
POSITIVE_NATS = 1e-6  # a log-probability above 0 by more than this is no rounding

MISSING_LOGPROBS = "has no log-probabilities; `graftrl logs score` adds them"


@dataclass(frozen=True)
class Rule:
    """broken: true for rows that break it. message: what to print about such a row. blocks: the row cannot be used."""

    broken: pl.Expr
    message: pl.Expr
    blocks: bool = True


def _rules() -> list[Rule]:
    reasons = get_args(FinishReason)
    tokens, logprobs = pl.col("token_ids"), pl.col("logprobs")
    reason, reward = pl.col("finish_reason"), pl.col("reward")
    not_finite = logprobs.list.eval(~pl.element().is_finite()).list.sum()
    positive = logprobs.list.max() > POSITIVE_NATS
    return [
        *(Rule(pl.col(name).is_null(), pl.lit(f"has no {name}")) for name in NEVER_NULL),
        Rule(pl.col("messages").list.len() == 0, pl.lit("has a prompt without messages")),
        Rule(pl.col("response_index") < 0, pl.format("has response_index {}", "response_index")),
        Rule(~reason.is_in(reasons), pl.format(f"has finish_reason '{{}}', not {' or '.join(reasons)}", reason)),
        Rule(~reward.is_between(0, 1), pl.format("has reward {}, not a number in [0, 1]", reward)),
        Rule(
            (tokens.list.len() == 0) & (reason == "stop"),
            pl.lit("has finish_reason 'stop' but no token, not even the EOS"),
        ),
        Rule((tokens.list.len() == 0) & (reason != "stop"), pl.lit("has no token")),
        Rule(
            tokens.list.len() != logprobs.list.len(),
            pl.format("has {} token ids but {} log-probabilities", tokens.list.len(), logprobs.list.len()),
        ),
        Rule(tokens.list.eval(pl.element().is_null()).list.any(), pl.lit("has a null among its token_ids")),
        Rule(logprobs.list.eval(pl.element().is_null()).list.any(), pl.lit("has a null among its logprobs")),
        Rule(tokens.is_null() & logprobs.is_not_null(), pl.lit("has log-probabilities but no token ids")),
        Rule(not_finite > 0, pl.format("has {} log-probabilities that are not finite", not_finite), blocks=False),
        Rule(
            positive,
            pl.format("has a log-probability above 0 ({})", logprobs.list.max().round(4)),
            blocks=False,
        ),
        Rule(logprobs.is_null(), pl.lit(MISSING_LOGPROBS)),
        Rule(
            pl.any_horizontal(pl.col(name).is_null() for name in SAMPLING),
            pl.lit("does not say how it was sampled (temperature, top_p, top_k)"),
            blocks=False,
        ),
    ]


RULES = _rules()
COLUMNS = ("response_index", "text", "token_ids", "logprobs", *NEVER_NULL, *SAMPLING)


def broken_rules(frame: pl.DataFrame, *, blocking_only: bool = False) -> pl.DataFrame:
    """Every broken rule of every row: the frame's column `row`, and `message`; in the order of rows.

    Args:
        frame: the columns of a rollout log in their right types, and `row`.
        blocking_only: leave out what does not keep a response from being used.
    """
    rules = [rule for rule in RULES if rule.blocks or not blocking_only]
    found = [
        frame.filter(rule.broken.fill_null(value=False)).select("row", rule.message.alias("message")) for rule in rules
    ]
    return pl.concat(found).sort("row", maintain_order=True)


def any_blocked(frame: pl.DataFrame) -> bool:
    """Whether any row breaks a rule that keeps it from being used; far cheaper than to say which."""
    broken = [rule.broken.fill_null(value=False).any() for rule in RULES if rule.blocks]
    return bool(frame.select(pl.any_horizontal(broken)).item())


def biased_sampling(found: Iterable[tuple[float | None, float | None, int | None]]) -> str | None:
    """What makes responses of a peer useless for scores and ratios; None where all are of the plain distribution.

    found: (temperature, top_p, top_k) of its responses; None where unknown.
    """
    odd = next((settings for settings in found if settings != PLAIN), None)
    if odd is None:
        return None
    said = ", ".join(
        f"{name} {'unknown' if value is None else format(value, 'g')}"
        for name, value in zip(SAMPLING, odd, strict=True)
    )
    return (
        f"were sampled with {said}; a peer's must come from its unmodified distribution (temperature 1, top_p 1, top_k "
        "0), else compatibility scores and importance ratios are biased"
    )

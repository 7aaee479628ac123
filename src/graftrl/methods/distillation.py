"""What the methods of on-policy distillation share: a model's own responses, and what frozen scorers say of each token.

    signal(a) = sum_i weight_i * log q_i(a)  -  own * log pi(a)

Every response is trained on with a dense signal instead of its reward. `sampled` is the policy gradient of the signal
at the sampled tokens; `full` maximises the signal's expectation over the vocabulary, state by state; `top_k` over the
tokens that the target holds most likely. There are no returns-to-go. In `sampled`, models of different tokenizers are
compared over spans of bytes: a span is one action, whose log-probability is the sum over its tokens on either side.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from graftrl.errors import ConfigError
from graftrl.exchange import Rejected, Retokenized, retokenize
from graftrl.exchange.spans import common_ends, spans_of, sum_spans, token_ends
from graftrl.methods.base import CodecLike, Exchange, Groups, StepContext, cut_by_prompt, receiving, rows_of
from graftrl.objective import Objective, Term, TokenBatch, importance_ratio
from graftrl.objective.distillation import REFERENCE, LogMixture, drift_gate, span_sums
from graftrl.objective.terms import TokenLoss
from graftrl.rollout import Group, Prompt, Row
from graftrl.settings import Settings

ScorerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
SPAN = "@span"  # in a row's constants: which byte span each token belongs to


class DistillationSettings(Settings):
    """estimator: "sampled": the policy gradient of the signal at the sampled tokens. "full": its expectation over the
    vocabulary. "top_k": over the tokens that the target holds most likely. top_k: how many these are.
    single_minibatch: a step's rows make one minibatch, whatever `training.minibatch_prompts` is; with more, the signal
    is that of the current weights. drift_tau: strength of blockwise drift gating, which damps positions where the
    policy has left the one that sampled; 0 is off. drift_block: tokens of a block."""

    estimator: Literal["sampled", "full", "top_k"] = "sampled"
    top_k: int = Field(64, ge=1)
    single_minibatch: bool = True
    drift_tau: float = Field(0.0, ge=0)
    drift_block: int = Field(64, ge=1)

    @property
    def support(self) -> int | None:
        return self.top_k if self.estimator == "top_k" else None


@dataclass(frozen=True)
class Candidate:
    """One of a model's own responses, as a row whose weight in the loss is its advantage."""

    prompt: Prompt
    reward: float
    row: Row


class Distillation:
    """A method of the family: its mixture, and by the hooks below which responses and tokens it learns from.

    reads_logprobs: the hooks need the scorers' log-probabilities of the sampled tokens, whatever the estimator.
    """

    settings_type: ClassVar[type[Settings]] = DistillationSettings
    fewest_models: ClassVar[int] = 1
    fewest_responses: ClassVar[int] = 1
    reads_logprobs: ClassVar[bool] = False
    filter: Callable[[Group], bool] | None = None
    sampling_rounds = 1

    def __init__(self, settings: DistillationSettings, mixture: LogMixture) -> None:
        self.settings: Any = settings
        self.mixture = replace(mixture, support=settings.support)
        self._sampled = settings.estimator == "sampled"
        self._objective = Objective(
            (Term(("own",), self.loss, policy_gradient=True),),
            needs_reference=self._sampled and REFERENCE in mixture.weights,
            mixture=None if self._sampled else self.mixture,
        )

    # What a method of the family may change

    def learns_from(self, group: Group) -> bool:
        """Whether a group's responses enter the update at all."""
        return True

    def admits(self, candidate: Candidate) -> bool:
        """Whether one response does, its scorers' log-probabilities known."""
        return True

    def signal(self, tokens: TokenBatch) -> Tensor:
        """The signal at the sampled tokens under the current weights, a constant."""
        return sampled_signal(tokens, self.mixture)

    def keeps(self, tokens: TokenBatch, signal: Tensor) -> Tensor | None:
        """bool: the tokens that are learnt from; None for all."""
        return None

    # The rest of the protocol

    @property
    def scorers(self) -> tuple[str, ...]:
        return tuple(name for name in self.mixture.weights if name != REFERENCE)

    def check_scorers(self, codecs: Mapping[str, CodecLike], scorers: Mapping[str, CodecLike]) -> list[str]:
        return check_tokenizers(self.scorers, codecs, scorers, None if self._sampled else self._one_vocabulary())

    def _one_vocabulary(self) -> str:
        return (
            f"estimator {self.settings.estimator!r} sums over one vocabulary; use estimator: sampled, which compares "
            "them over the bytes of the text"
        )

    def exchange(self, groups: Groups, context: StepContext) -> Exchange:
        exchange = Exchange({})
        for model, of_model in receiving(groups, context).items():
            candidates = [
                Candidate(group.prompt, reward, row)
                for group in of_model
                if self.learns_from(group)
                for row, reward in zip(distilled_rows(group, context.codecs[model]), group.rewards, strict=True)
            ]
            read, rejected = read_by(self.scorers, model, candidates, context, contexts=not self._sampled)
            exchange.rows[model] = [candidate.row for candidate in read if self.admits(candidate)]
            exchange.diagnostics[model] = {
                "distilled": len(exchange.rows[model]),
                "left_out": sum(group.size for group in of_model) - len(exchange.rows[model]) - rejected.total(),
                "rejected": dict(rejected),
            }
        return exchange

    def usable(self, own: Group, successes: int, size: int) -> bool:
        return False

    def order(self, rows: Sequence[Row], minibatch_prompts: int, rng: np.random.Generator) -> list[list[Row]]:
        if self.settings.single_minibatch:
            return [list(rows)] if rows else []
        return cut_by_prompt(rows, minibatch_prompts)

    def objective(self, minibatch_index: int) -> Objective:
        return self._objective

    def loss(self, tokens: TokenBatch) -> TokenLoss:
        means: dict[str, Tensor] = {}
        weights = tokens.advantages_BT
        signal = self.signal(tokens) if self._sampled or self.reads_logprobs else None
        if signal is not None:
            kept = self.keeps(tokens, signal)
            if kept is not None:
                weights = weights * kept
                means["kept"] = kept.float()
        weights, of_gate = gated(weights, tokens, self.settings)
        means |= of_gate
        if tokens.ref_logprobs_BT is not None:
            means["from_reference"] = (tokens.logprobs_BT - tokens.ref_logprobs_BT).detach()
        surrogate = policy_gradient(tokens, signal) if self._sampled else tokens.expected_signal_BT
        assert surrogate is not None
        means["signal"] = surrogate.detach()
        return TokenLoss(-weights * surrogate, means_BT=means)


def distilled_rows(group: Group, codec: CodecLike) -> list[Row]:
    """A model's own group as rows of weight 1, whatever their rewards."""
    return rows_of(group, codec, [1.0] * group.size)


def gated(weights: Tensor, tokens: TokenBatch, settings: DistillationSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Position weights with drift gating where it is on, and what there is to log of it."""
    if settings.drift_tau == 0:
        return weights, {}
    gate = drift_gate(
        tokens.logprobs_BT, tokens.old_logprobs_BT, tokens.mask_BT, settings.drift_tau, settings.drift_block
    )
    return weights * gate, {"drift_gate": gate}


def policy_gradient(tokens: TokenBatch, signal: Tensor | None) -> Tensor:
    """rho * signal: its gradient is the policy gradient of the signal, corrected for who sampled."""
    assert signal is not None
    return importance_ratio(tokens.logprobs_BT, tokens.old_logprobs_BT) * signal


def sampled_signal(tokens: TokenBatch, mixture: LogMixture) -> Tensor:
    """The mixture's signal at the sampled tokens, or over the spans that they belong to; a constant [B, T]."""
    own, reference = tokens.logprobs_BT.detach(), tokens.ref_logprobs_BT
    if SPAN in tokens.constants:
        spans = tokens.constants[SPAN].long()
        own = span_sums(own, spans, tokens.mask_BT)
        reference = None if reference is None else span_sums(reference, spans, tokens.mask_BT)
    known = tokens.constants if reference is None else {**tokens.constants, REFERENCE: reference}
    return mixture.signal(known, own)


def in_tokens_of(scorer: CodecLike, row: Row, codec: CodecLike) -> Retokenized | Rejected:
    """A row's response in a scorer's tokens; the very tokens of the row where both have one tokenizer."""
    if scorer.fingerprint == codec.fingerprint:
        return Retokenized(row.response_token_ids, row.ends_with_eos)
    return retokenize(
        row.response_token_ids, "stop" if row.ends_with_eos else "length", codec.tokenizer, scorer.tokenizer,
        receiver_eos_id=scorer.eos_id, max_tokens=sys.maxsize, same_vocabulary=False,
    )  # fmt: skip


def in_tokens_of_each(
    scorers: Mapping[str, CodecLike], row: Row, codec: CodecLike
) -> dict[str, Retokenized] | Rejected:
    """The same for several, or why the first that cannot read the response cannot."""
    said: dict[str, Retokenized] = {}
    for name, scorer in scorers.items():
        response = in_tokens_of(scorer, row, codec)
        if isinstance(response, Rejected):
            return response
        said[name] = response
    return said


def read_by(
    scorers: Sequence[str],
    model: str,
    candidates: Sequence[Candidate],
    context: StepContext,
    *,
    contexts: bool = False,
) -> tuple[list[Candidate], Counter[str]]:
    """Give each row what the scorers hold of it, under their names.

    With one tokenizer for all, constants are log-probabilities of the row's tokens. Else the row is cut into the spans
    at whose ends all tokenisations have a boundary, a constant is the log-probability of the whole span at each of its
    tokens, and the constant `SPAN` numbers the spans. Sums over the vocabulary do not read the constants, but must not
    hold a response of which a scorer says NaN either.

    Args:
        contexts: put the scorers' prompts into `contexts`, for sums over the vocabulary.

    Returns:
        the candidates that every scorer can read, and why the others cannot be, counted.
    """
    codec, rejected = context.codecs[model], Counter[str]()
    of_tokenizer = {context.scorers[name].fingerprint: context.scorers[name] for name in scorers}
    read: list[tuple[Candidate, dict[str, Retokenized]]] = []  # with the response by tokenizer
    for candidate in candidates:
        in_each = in_tokens_of_each(of_tokenizer, candidate.row, codec)
        if isinstance(in_each, Rejected):
            rejected[in_each.reason] += 1
        else:
            read.append((candidate, in_each))
    for name in scorers:
        scorer, rows = context.scorers[name], []
        for candidate, said in read:
            prompt_ids, response = scorer.prompt_token_ids(candidate.prompt), said[scorer.fingerprint]
            if contexts:
                candidate.row.contexts[name] = prompt_ids
            rows.append(
                Row(candidate.prompt.id, prompt_ids, response.token_ids, 0.0, candidate.row.kind, candidate.row.source)
            )
        for (candidate, _), values in zip(read, context.score(name, rows), strict=True):
            candidate.row.constants[name] = values
    whole: list[Candidate] = []
    for candidate, said in read:
        if not all(np.isfinite(candidate.row.constants[name]).all() for name in scorers):
            rejected["not finite"] += 1
        elif of_tokenizer.keys() != {codec.fingerprint} and not align(
            candidate.row, {name: said[context.scorers[name].fingerprint] for name in scorers}, codec, context.scorers
        ):
            rejected["not aligned"] += 1
        else:
            whole.append(candidate)
    return whole, rejected


def align(row: Row, said: Mapping[str, Retokenized], codec: CodecLike, scorers: Mapping[str, CodecLike]) -> bool:
    """Turn the row's constants, one per token of each scorer, into those of common spans, one per token of the row.

    False, and nothing done, where a tokenizer decodes the response piece by piece to another text than at once.
    """
    own = token_ends(row.response_token_ids, codec.tokenizer, ends_with_eos=row.ends_with_eos)
    ends = {codec.fingerprint: own}
    for name, response in said.items():
        scorer = scorers[name]
        if scorer.fingerprint not in ends:
            ends[scorer.fingerprint] = token_ends(
                response.token_ids, scorer.tokenizer, ends_with_eos=response.ends_with_eos
            )
    if len({int(of_one[-1]) for of_one in ends.values()}) > 1:
        return False
    common = common_ends(list(ends.values()))
    spans = spans_of(own, common)
    for name in said:
        theirs = spans_of(ends[scorers[name].fingerprint], common)
        row.constants[name] = sum_spans(row.constants[name], theirs, len(common))[spans].astype(np.float32)
    row.constants[SPAN] = spans
    return True


def check_tokenizers(
    names: Sequence[str], codecs: Mapping[str, CodecLike], scorers: Mapping[str, CodecLike], refused: str | None
) -> list[str]:
    """A note for each scorer that does not share a model's tokenizer.

    Args:
        refused: why that cannot be, and how to mend it; None: it can.

    Raises:
        ConfigError: it cannot be, and there are two tokenizers.
    """
    pairs = [(n, m) for n in names for m, codec in codecs.items() if scorers[n].fingerprint != codec.fingerprint]
    different = [f"scorer {name!r} and model {model!r} have different tokenizers" for name, model in pairs]
    if different and refused is not None:
        raise ConfigError(f"method: {different[0]}, but {refused}")
    return [f"{text}: they are compared over spans of bytes" for text in different]

"""A policy on torch + transformers: sample, score, update, save. CPU or one GPU; full weights or LoRA."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftrl.errors import ModelError, NumericsError
from graftrl.objective.distillation import REFERENCE, LogMixture
from graftrl.objective.terms import Objective, TokenBatch, weighted_sum
from graftrl.policies import shards
from graftrl.policies.config import ModelSettings, SamplingSettings
from graftrl.policies.decoding import LlamaSequences, TransformersSequences, agreement, llama_shaped
from graftrl.policies.frozen import FrozenModel, FrozenWeights
from graftrl.policies.loading import Loaded, import_peft
from graftrl.policies.logprobs import Head
from graftrl.policies.microbatch import Padded, pad, pad_values
from graftrl.policies.passes import SAME_HIDDEN, Passes, Shared, find_device, row_length
from graftrl.policies.ranks import Ranks
from graftrl.policies.sampling import Sampled, sample_responses
from graftrl.policies.vocabulary import Distribution, mixture_signal
from graftrl.rollout import Group, Prompt, Row

_NOTHING = np.empty(0, np.float32)
_MOST_SKIPPED_UPDATES = 10  # in a row; more is no passing overflow


@dataclass
class UpdateStats:
    """What one step's update did. Token counts are loss tokens of the receiver, per row kind."""

    optimizer_steps: int = 0
    skipped_empty: int = 0
    skipped_nonfinite: int = 0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rate: float = 0.0
    tokens: Counter[str] = field(default_factory=Counter)
    clipped_tokens: Counter[str] = field(default_factory=Counter)
    token_sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # the token losses' diagnostics
    token_counts: Counter[str] = field(default_factory=Counter)
    passed_tokens: int = 0  # prompt and response tokens that went through a forward and backward pass

    def summary(self) -> dict[str, Any]:
        kinds = sorted(self.tokens)
        return {
            "loss": float(np.mean(self.losses)) if self.losses else None,
            "grad_norm": float(np.mean(self.grad_norms)) if self.grad_norms else None,
            "learning_rate": self.learning_rate,
            "optimizer_steps": self.optimizer_steps,
            "skipped_empty": self.skipped_empty,
            "skipped_nonfinite": self.skipped_nonfinite,
            "trained_tokens": dict(self.tokens),
            "clipped_tokens": {kind: self.clipped_tokens[kind] for kind in kinds},
            "clip_fraction": {kind: self.clipped_tokens[kind] / max(self.tokens[kind], 1) for kind in kinds},
            "token_means": {name: self.token_sums[name] / count for name, count in self.token_counts.items()},
            "passed_tokens": self.passed_tokens,
        }


class HFPolicy:
    """One model with its tokenizer and optimizer.

    Args:
        name: the model's name in the recipe.
        settings: see `ModelSettings`.
        sampling: the training distribution; its length limits hold for scoring too.
        checkpoint: a folder that `save` wrote; weights, optimizer and conventions come from there.
        frozen: where the reference's weights come from, so that scorers of the same path share them. Who gives it makes
            it forget between steps.
        ranks: the processes that train this policy together; each makes its own `HFPolicy` and is given the same rows.
    """

    def __init__(
        self,
        name: str,
        settings: ModelSettings,
        sampling: SamplingSettings,
        checkpoint: Path | None = None,
        frozen: FrozenWeights | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.name, self.settings, self.sampling = name, settings, sampling
        self.ranks = ranks or Ranks()
        self.device = find_device(settings.device)
        resumed = checkpoint is not None
        source = settings.model_copy(update={"path": str(checkpoint)}) if resumed and not settings.lora else settings
        self.loaded: Loaded = self.ranks.load(name, source, self.device)
        self.codec = self.loaded.codec
        self.notes = self.loaded.notes
        self.decoder = self.loaded.decoder
        self.saver: Any = self.loaded.causal_lm
        if settings.lora is not None:
            self.saver = _with_lora(self.loaded.causal_lm, settings, checkpoint)
        if settings.gradient_checkpointing:
            self.loaded.causal_lm.train().gradient_checkpointing_enable()
            if settings.lora is not None:
                self.loaded.causal_lm.enable_input_require_grads()
        self.ranks.place(self.loaded.causal_lm, settings)
        self.parameters = [p for p in self.loaded.causal_lm.parameters() if p.requires_grad]
        o = settings.optimizer
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=True
        )
        self.optimizer_steps = 0
        self.skipped_in_a_row = 0
        self._frozen, self._forgets = frozen or FrozenWeights(), frozen is None
        self._reference: FrozenModel | None = None
        if checkpoint is not None:
            self._restore(checkpoint)
        self.sequences_type: type[TransformersSequences] | type[LlamaSequences] = TransformersSequences
        self.passes = Passes(self.loaded, settings, self.device, ranks=self.ranks)
        if settings.lora is not None:  # no copy, and scorers of this path can read it too
            self._reference = FrozenModel(self.passes, self.saver.disable_adapter)
            self._frozen.adopt(self._reference, name, settings)
        if not self.ranks.shards:
            with self._evaluating():
                self._choose_faster_passes()

    @property
    def head(self) -> Head:
        return self.loaded.head

    def _choose_faster_passes(self) -> None:
        """Each must reproduce the model's own forward pass on a few ids, else it is left out and that is noted."""
        faster: dict[str, float] = {}
        if llama_shaped(self.decoder):
            difference = agreement(self.decoder)
            faster["one-token pass for sampling"] = difference
            self.sequences_type = LlamaSequences if difference <= SAME_HIDDEN else TransformersSequences
        if not self.settings.gradient_checkpointing:
            faster |= self.passes.probe_sharing()
        for what, difference in faster.items():
            if not difference <= SAME_HIDDEN:
                note = (
                    f"model {self.name!r}: the faster {what} differs by {difference:.1e} from transformers' forward "
                    "pass on this model, so that the slower one is used"
                )
                self.notes = (*self.notes, note)

    # Sampling -------------------------------------------------------------------------------------------------------

    def sample(
        self, prompts: Sequence[Prompt], n: int, seed: int, sampling: SamplingSettings | None = None
    ) -> list[Group]:
        """n responses to each prompt, with the log-probability of each sampled token (float32, in nats)."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        ids = [self.codec.prompt_token_ids(prompt) for prompt in prompts]
        drawn = self.draw(ids, n, generator, sampling or self.sampling)
        return [
            Group(self.name, prompt, [one.response(self.codec) for one in of_prompt])
            for prompt, of_prompt in zip(prompts, drawn, strict=True)
        ]

    def draw(
        self,
        prompts: Sequence[NDArray[np.int64]],
        n: int,
        generator: torch.Generator | Sequence[torch.Generator],
        sampling: SamplingSettings,
    ) -> list[list[Sampled]]:
        """n responses to each prompt of token ids, `sample_rows` side by side. generator: as of `sample_responses`."""
        drawn: list[list[Sampled]] = []
        at_once = max(1, self.settings.sample_rows // n)
        for start in range(0, len(prompts), at_once):
            part = slice(start, start + at_once)
            with self._evaluating(), self.passes.precision():
                drawn += sample_responses(
                    self.sequences_type(
                        self.decoder,
                        prompts[part],
                        sampling.max_response_tokens,
                        self.passes.common_start(prompts[part], sampling.max_response_tokens),
                    ),
                    self.head,
                    len(prompts[part]),
                    n,
                    settings=sampling,
                    eos_ids=self.codec.eos_ids,
                    generator=generator if isinstance(generator, torch.Generator) else generator[part],
                    max_elements=self.settings.logit_elements,
                )
        return drawn

    # Scoring --------------------------------------------------------------------------------------------------------

    def score(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """log pi(token) of every response token under the current weights, float32 [T] per row."""
        return self.passes.score(rows)

    def score_reference(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """The same under the model as it was before training (LoRA: the base without its adapter)."""
        return self.reference.logprobs(rows)

    @property
    def reference(self) -> FrozenModel:
        """The model as it was before training; loaded when it is first asked for."""
        if self._reference is None:
            self._reference = self._frozen.model(self.name, self.settings)
        return self._reference

    def generation_gap(self, rows: Sequence[Row]) -> float:
        """Largest |generation log-probability - fresh scoring pass| in nats over the rows (0 without rows)."""
        gaps = [
            float(np.abs(row.old_logprobs - fresh).max())
            for row, fresh in zip(rows, self.score(rows), strict=True)
            if row.old_logprobs is not None
        ]
        return max(gaps, default=0.0)

    # Training -------------------------------------------------------------------------------------------------------

    def update(
        self,
        minibatches: Sequence[Sequence[Row]],
        objective_of: Callable[[int], Objective],
        scorers: Mapping[str, FrozenModel] | None = None,
    ) -> UpdateStats:
        """One optimizer step per minibatch, in the order given.

        Args:
            minibatches: rows with `old_logprobs` set.
            objective_of: the objective of minibatch 0, 1, ...
            scorers: the frozen models of the objectives' mixtures.

        Raises:
            NumericsError: too many non-finite gradients in a row.
        """
        stats = UpdateStats()
        for index, rows in enumerate(minibatches):
            objective = objective_of(index)
            if not any(row.loss_tokens for row in rows):
                stats.skipped_empty += 1
                continue
            for row in rows:
                stats.tokens[row.kind] += row.loss_tokens
            stats.losses.append(self._accumulate(rows, objective, stats, scorers or {}))
            self._step(stats)
        stats.learning_rate = self.optimizer.param_groups[0]["lr"]
        if self._forgets:
            self._frozen.forget()
        return stats

    def _accumulate(
        self,
        rows: Sequence[Row],
        objective: Objective,
        stats: UpdateStats,
        scorers: Mapping[str, FrozenModel] = MappingProxyType({}),
    ) -> float:
        """Add up the gradient of the whole minibatch; returns its loss (rows without a pass add 0).

        Of several ranks each passes its own rows, with the factors of the whole minibatch, and returns its part.
        """
        self.optimizer.zero_grad(set_to_none=True)
        scales = [term.scales(rows) for term in objective.terms]
        active = [i for i, row in enumerate(rows) if any(term.needs_pass(row) for term in objective.terms)]
        batches = self.ranks.deal([row_length(rows[i]) for i in active], self.settings.microbatch_tokens)
        mine = sorted(j for batch in batches if batch.counts for j in batch.rows)
        reference: dict[int, NDArray[np.float32]] | None = None
        if objective.needs_reference:
            reference = dict(zip(mine, self.score_reference([rows[active[j]] for j in mine]), strict=True))
        total = 0.0
        for batch in batches:
            members = [rows[active[j]] for j in batch.rows]
            padded, shared = pad(members, self.device), self.passes.shared(members)
            longest = padded.mask_BT.shape[1]
            with self.passes.precision():
                logprobs_N, *sums_N = self.ranks.forward(
                    partial(self._pass, members, padded, shared, objective.mixture, scorers)
                )
            if not batch.counts:
                self.ranks.backward(torch.zeros((), device=self.device), logprobs_N)
                continue
            logprobs_BT = padded.scatter(logprobs_N)
            stats.passed_tokens += sum(row_length(row) for row in members) if shared is None else shared.tokens
            tokens = TokenBatch(
                logprobs_BT=logprobs_BT,
                old_logprobs_BT=pad_values([_old(row) for row in members], longest, self.device),
                advantages_BT=pad_values([_weighted_advantages(row) for row in members], longest, self.device),
                mask_BT=padded.mask_BT,
                content_mask_BT=padded.content_mask_BT,
                source_logprobs_B=torch.tensor([row.source_logprob for row in members], device=self.device),
                ref_logprobs_BT=None
                if reference is None
                else pad_values([reference[j] for j in batch.rows], longest, self.device),
                clip_high_B=None
                if all(math.isnan(row.clip_high) for row in members)
                else torch.tensor([row.clip_high for row in members], device=self.device),
                constants={
                    name: pad_values([row.constants.get(name, _NOTHING) for row in members], longest, self.device)
                    for name in {name for row in members for name in row.constants}
                },
                expected_signal_BT=None if sums_N[0] is None else padded.scatter(sums_N[0]),
                entropy_BT=None if sums_N[1] is None else padded.scatter(sums_N[1]),
            )
            loss = torch.zeros((), device=self.device)
            for term, of_rows in zip(objective.terms, scales, strict=True):
                scales_B = torch.tensor(
                    [of_rows[active[j]] for j in batch.rows], dtype=torch.float32, device=self.device
                )
                if not scales_B.any():
                    continue
                result = term.token_loss(tokens)
                loss = loss + weighted_sum(result.loss_BT, padded.mask_BT, scales_B)
                if result.clipped_BT is not None:
                    count = (result.clipped_BT & padded.mask_BT).sum(dim=-1).tolist()
                    for row, clipped in zip(members, count, strict=True):
                        if row.kind in term.kinds:
                            stats.clipped_tokens[row.kind] += clipped
                for name, values_BT in result.means_BT.items():
                    inside_BT = padded.mask_BT & (scales_B != 0)[:, None]
                    stats.token_sums[name] += float(values_BT[inside_BT].sum())
                    stats.token_counts[name] += int(inside_BT.sum())
            self.ranks.backward(loss, logprobs_BT)
            total += float(loss.detach())
        return total

    def _pass(
        self,
        members: Sequence[Row],
        padded: Padded,
        shared: Shared | None,
        mixture: LogMixture | None,
        scorers: Mapping[str, FrozenModel],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities, expected signal and entropy at all response tokens, [N] each."""
        hidden_NH = self.passes.hidden(padded, shared)
        logprobs_N = self.passes.logprobs(hidden_NH, padded.targets_N)
        return logprobs_N, *self._vocabulary_sums(members, hidden_NH, mixture, scorers)

    def _vocabulary_sums(
        self,
        members: Sequence[Row],
        hidden_NH: Tensor,
        mixture: LogMixture | None,
        scorers: Mapping[str, FrozenModel],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Expected signal and entropy, [N], at the tokens of the rows that have contexts; 0 on others."""
        if mixture is None:
            return None, None
        lengths = [len(row.response_token_ids) for row in members]
        inside_N = torch.tensor([bool(row.contexts) for row in members]).repeat_interleave(torch.tensor(lengths))
        chosen_N = inside_N.nonzero().squeeze(-1).to(self.device)
        asked = [row for row in members if row.contexts]
        frozen = {
            name: (self.reference if name == REFERENCE else scorers[name]).distribution(
                [row if name == REFERENCE else replace(row, prompt_token_ids=row.contexts[name]) for row in asked]
            )
            for name in (mixture.weights if asked else ())
        }
        own = Distribution(hidden_NH.index_select(0, chosen_N), self.head)
        parts = mixture_signal(own, frozen, mixture, self.settings.logit_elements)
        return tuple(  # type: ignore[return-value]
            torch.zeros(len(hidden_NH), device=self.device).index_copy(0, chosen_N, part) for part in parts
        )

    def _step(self, stats: UpdateStats) -> None:
        o = self.settings.optimizer
        for parameter in self.parameters:  # a zero gradient still moves by momentum, as if all rows had passed
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = self.ranks.clip(self.parameters, o.max_grad_norm)
        if not math.isfinite(norm):
            stats.skipped_nonfinite += 1
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row >= _MOST_SKIPPED_UPDATES:
                raise NumericsError(
                    f"model {self.name!r}: {self.skipped_in_a_row} updates in a row had a non-finite gradient; lower "
                    f"models.{self.name}.optimizer.lr or use dtype float32, then resume"
                )
            return
        self.skipped_in_a_row = 0
        warm = 1.0 if not o.warmup_steps else min(1.0, (self.optimizer_steps + 1) / o.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = o.lr * warm
        self.optimizer.step()
        self.optimizer_steps += 1
        stats.optimizer_steps += 1
        stats.grad_norms.append(norm)

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Weights and tokenizer loadable with `from_pretrained`, plus the optimizer and this policy's conventions."""
        weights, optimizer = self.ranks.whole_weights(self.loaded.causal_lm), self.ranks.whole_state(self.optimizer)
        if not self.ranks.writes:
            return
        self._save_description(folder, weights)
        torch.save(optimizer, folder / "optimizer.pt")

    def save_shards(self, folder: Path) -> Future[Any]:
        """The same in parts (see `shards`), beside whatever follows: every rank copies its own and goes on.

        Returns:
            what ends when the parts of all ranks are on the disk.
        """
        state = self.optimizer.state_dict()
        trained = [name for name, p in self.loaded.causal_lm.named_parameters() if p.requires_grad]
        moments: dict[str, Tensor] = {}
        steps: list[float] = []
        for index, of_one in sorted(state["state"].items()):
            steps.append(float(of_one["step"]))
            moments |= {shards.moment(key, trained[index]): of_one[key] for key in shards.MOMENTS}
        if self.ranks.writes:
            self._save_description(folder, {}, adamw={"lr": state["param_groups"][0]["lr"], "steps": steps})
            (folder / "model.safetensors").unlink(missing_ok=True)  # of no weights
            shards.write_buffers(folder, self.loaded.causal_lm)
        return shards.write(folder, shards.named(self.loaded.causal_lm), moments, self.ranks.host_group)

    def _save_description(self, folder: Path, weights: dict[str, Tensor] | None, **more: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.saver.save_pretrained(folder, safe_serialization=True, state_dict=weights)
        self.codec.tokenizer.save_pretrained(folder)
        state = {
            "optimizer_steps": self.optimizer_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            "prepend_bos": self.codec.prepend_bos,
            "tokenizer_fingerprint": self.codec.fingerprint,
            **more,
        }
        (folder / "policy.json").write_text(json.dumps(state))

    def _restore(self, folder: Path) -> None:
        state = json.loads((folder / "policy.json").read_text())
        if state["tokenizer_fingerprint"] != self.codec.fingerprint:
            raise ModelError(f"model {self.name!r}: the tokenizer in {folder} is not the one that the run used")
        if shards.is_sharded(folder):
            self._restore_moments(folder, state["adamw"])
        else:
            spread = self.ranks.shards  # then no device has room for the whole state
            optimizer = torch.load(
                folder / "optimizer.pt", weights_only=True, map_location="cpu" if spread else self.device, mmap=spread
            )
            self.optimizer.load_state_dict(self.ranks.own_state(optimizer, self.parameters))
        self.optimizer_steps, self.skipped_in_a_row = state["optimizer_steps"], state["skipped_in_a_row"]
        self.codec.prepend_bos = state["prepend_bos"]
        self.notes = ()

    def _restore_moments(self, folder: Path, adamw: dict[str, Any]) -> None:
        groups = [{**group, "lr": adamw["lr"]} for group in self.optimizer.state_dict()["param_groups"]]
        trained = [(name, p.detach()) for name, p in self.loaded.causal_lm.named_parameters() if p.requires_grad]
        state: dict[int, dict[str, Any]] = {
            index: {"step": torch.tensor(step), **{key: torch.empty_like(trained[index][1]) for key in shards.MOMENTS}}
            for index, step in enumerate(adamw["steps"])
        }
        rooms = {
            shards.moment(key, trained[i][0]): of_one[key] for i, of_one in state.items() for key in shards.MOMENTS
        }
        if rooms:  # none before the first optimizer step
            shards.read(folder, rooms, self.ranks.host_group)
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    # Modes ----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Gradient checkpointing forbids a KV cache in training mode; dropout is off in either mode."""
        model = self.loaded.causal_lm
        was_training = model.training
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)


def _with_lora(causal_lm: Any, settings: ModelSettings, checkpoint: Path | None) -> Any:
    peft = import_peft()
    assert settings.lora is not None
    if checkpoint is not None:
        return peft.PeftModel.from_pretrained(causal_lm, checkpoint, is_trainable=True)
    lora = settings.lora
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(causal_lm, config)


def _old(row: Row) -> NDArray[np.float32]:
    if row.old_logprobs is None:
        raise ValueError(f"row of prompt {row.prompt_id!r} ({row.kind}) reached the update without old_logprobs")
    return row.old_logprobs


def _weighted_advantages(row: Row) -> NDArray[np.float32]:
    weighted = np.asarray(row.advantages, dtype=np.float32) * np.float32(row.weight)
    return np.broadcast_to(weighted, (len(row.response_token_ids),))

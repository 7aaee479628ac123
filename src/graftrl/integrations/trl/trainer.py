"""GRAFT as a subclass of TRL's GRPOTrainer: between sampling and the loss, groups are replaced by peers' groups.

TRL samples, grades and steps the optimizer. The exchange (which groups, in whose tokens, how strongly) and the order of
prompts are graftrl's own method, so that the rules stand in one place. TRL's loss then reads the rows it gives.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from graftrl.config import parse_method, parse_peers
from graftrl.errors import ConfigError, DataError
from graftrl.exchange import Rejected, encode_response
from graftrl.integrations.folder_exchange import FolderExchange
from graftrl.integrations.trl.batch import (
    Fields,
    Graded,
    ScriptCodec,
    add_logprobs,
    loss_inputs,
    read_groups,
    score_rows,
    with_positions,
)
from graftrl.integrations.trl.rollout_log import RolloutWriter, generation_number
from graftrl.integrations.trl.support import refuse_unsupported
from graftrl.logs.config import PeerSettings
from graftrl.logs.folders import writing
from graftrl.logs.rollouts import step_file_name, write_transfers
from graftrl.methods import GRAFT, PRESETS, StepContext
from graftrl.methods.base import Exchange
from graftrl.objective import clipped
from graftrl.policies.loading import switch_off_dropout
from graftrl.rollout import Group, Prompt, Response, Row
from graftrl.seeds import derive_seed, generator
from graftrl.training.peers import Remembered, StoredPeer, peer_metrics

OPTIONS = ("threshold", "weighting", "balanced", "admit_all_success", "peer_position")


@dataclass
class GraftConfig(GRPOConfig):  # type: ignore[misc]
    """GRPOConfig and what GRAFT adds. Clipping, learning rate and batch sizes are TRL's own arguments.

    An optimizer step is a minibatch: with `steps_per_generation` twice `gradient_accumulation_steps` a generation batch
    makes two, and grafted prompts stand in the last.

    Args:
        epsilon_high: 0.28 as in the paper, where GRPOConfig takes `epsilon`.
        graft_method: `graft`, or one of its presets and designs that keep the clipped loss.
        graft_options: options of the method: threshold, weighting, balanced, admit_all_success, peer_position.
        graft_id_field: column of the data set with the prompts' ids; without it an id is a hash of the prompt's text.
        graft_reference_field: column with reference answers; where a peer's log has others, it is of another task.
        graft_log_dir: folder for a rollout log of the run and for what became of every peer response.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*GRPOConfig._VALID_DICT_FIELDS, "graft_options"]

    epsilon_high: float | None = field(default=0.28, metadata={"help": "Upper bound of the ratio is 1 + epsilon_high."})
    graft_method: str = field(default="graft", metadata={"help": "graft, or a preset of it."})
    graft_options: dict[str, Any] | str | None = field(default=None, metadata={"help": "Options of the method."})
    graft_id_field: str = field(default="id", metadata={"help": "Column with the prompts' ids."})
    graft_reference_field: str | None = field(default=None, metadata={"help": "Column with reference answers."})
    graft_log_dir: str | None = field(default=None, metadata={"help": "Folder for rollouts and exchange."})


class GraftTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer whose failed groups are replaced by a peer's groups (GRAFT; Park et al., 2026).

    Peers are rollout logs, another process, or both. Without any it trains by GRPO. Advantages are graftrl's (standard
    deviation + 1e-6; TRL adds 1e-4), the denominator is the exact token count of an optimizer step's admitted rows,
    dropout is off, and positions are counted from each row's first token.

    Args:
        model, reward_funcs, args, train_dataset: as of GRPOTrainer; `args` is a GraftConfig. The weighted sum of the
            reward functions must be 0 or 1. Groups in which they leave a response ungraded take no part.
        peers: stored peers by name, as in a recipe's `peers` section: `{"B": {"log": "runs/first", "model": "B"}}`.
        exchange: a live peer; see `FolderExchange`. Both processes need the same prompts in the same order: the same
            data set, seed, and prompts in a generation batch.
        name: of this model in logs and metrics; with `exchange` its name there.
        others: further keyword arguments of GRPOTrainer.

    Raises:
        ConfigError: arguments of TRL under which grafted rows would be wrong or were never tried.
        DataError: a peer's log that cannot be used.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "graftrl"]
    _name = "GRAFT"
    _buffered_inputs: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        *,
        peers: Mapping[str, PeerSettings | Mapping[str, Any]] | None = None,
        exchange: FolderExchange | None = None,
        name: str = "model",
        **others: Any,
    ) -> None:
        if not isinstance(args, GraftConfig):
            raise ConfigError(f"args is {type(args).__name__}; GraftTrainer needs a GraftConfig")
        refuse_unsupported(args, others)
        self.method = _method_of(args)
        settings = parse_peers(peers or {}, "GraftTrainer")
        self.name, self.exchange = name if exchange is None else exchange.name, exchange
        taken = [self.name, *([exchange.peer] if exchange else [])]
        for peer in settings:
            if peer in taken:
                raise ConfigError(f"GraftTrainer: the peer {peer!r} has the name of a model that trains; rename it")
        super().__init__(model, reward_funcs, args, train_dataset, **others)
        if self._is_vlm:
            raise ConfigError("models with images are not supported: a graft replaces plain text")
        switch_off_dropout(self.model)
        self._fields = Fields(args.graft_id_field, args.graft_reference_field)
        self._codec = ScriptCodec(self, self.name)
        self._writer = None if args.graft_log_dir is None else RolloutWriter(args.graft_log_dir, self.name, self)
        self._graded: Graded | None = None
        self._logps: Tensor | None = None  # of the microbatch whose loss is being computed
        self._open_old: Tensor | None = None
        self._rows_in_step = 0
        self.peers = [StoredPeer(peer, of, args.seed) for peer, of in settings.items()]
        self._check_data_set()
        self.add_callback(_Hooks(self))

    # Sampling, exchange, minibatches ---------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        generate_every = self.args.steps_per_generation * self.num_iterations
        if self._step % generate_every == 0 or self._buffered_inputs is None:
            self._buffered_inputs = self._graft(generation_batch)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _graft(self, examples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A generation batch as `steps_per_generation` microbatches, in graftrl's order of prompts."""
        output = self._generate_and_score_completions(examples)
        assert self._graded is not None
        prompts = [self._fields.prompt(example) for example in examples]
        rewards = self._graded.total(self.reward_weights)
        groups = read_groups(self.name, prompts, output, self._graded.completion_ids, rewards, self._codec)
        graded = [group for group in groups if all(r.reward is not None for r in group.responses)]
        step = generation_number(self)
        if self.exchange is not None or self._writer is not None:
            add_logprobs(self, graded, self._codec)
        example_of = {prompt.id: example for prompt, example in zip(prompts, examples, strict=True)}
        exchange = self._exchange(step, graded, example_of)
        self._report(exchange)
        if self._writer is not None:
            self._writer.write(step, graded, self._codec.fingerprint, self.state.global_step)
            if exchange.transfers:
                path = self._writer.folder / "exchange" / step_file_name(step)
                with writing(path):
                    write_transfers(path, step, exchange.transfers)
        return self._microbatches(exchange.rows[self.name], len(groups), step)

    def _exchange(self, step: int, groups: list[Group], example_of: Mapping[str, Mapping[str, Any]]) -> Exchange:
        fingerprints = {peer.name: peer.fingerprint for peer in self.peers}
        live = None
        if self.exchange is not None:
            live = self.exchange.swap(step, groups, self._codec.fingerprint, self.state.global_step)
            self._log("alone", float(self.exchange.alone))
            self._log(f"peers/{self.exchange.peer}/waited_s", self.exchange.waited_s)
        everyone: dict[str, list[Group]] = {self.name: groups}
        if self.exchange is not None and live is not None:
            found, fingerprints[self.exchange.peer] = live
            everyone[self.exchange.peer] = self._take(self.exchange.peer, found, len(groups), example_of)

        def score(model: str, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
            return score_rows(self, rows)

        context = StepContext(
            step=step,
            seed=derive_seed(self.args.seed, "exchange", step),
            group_size=self.num_generations,
            max_response_tokens=self.max_completion_length,
            codecs={self.name: self._codec},
            score=Remembered(score) if any(peer.scores for peer in self.peers) else score,
            receivers=(self.name,),
            elsewhere=tuple(model for model in everyone if model != self.name),
            stored=fingerprints,
        )
        for peer in self.peers:
            found = peer.groups({self.name: groups}, self.method, context)
            everyone[peer.name] = self._take(peer.name, found, len(groups), example_of)
        return self.method.exchange(everyone, context)

    def _take(
        self, peer: str, found: Sequence[Group], prompts: int, example_of: Mapping[str, Mapping[str, Any]]
    ) -> list[Group]:
        """A peer's groups as this script grades them, and what there is to report of them."""
        groups, contradicted = self._regrade(found, example_of)
        stats = peer_metrics(groups, prompts, contradicted)
        for key in ("groups", "missing", "contradicted"):
            self._log(f"peers/{peer}/{key}", stats[key])
        return groups

    def _regrade(self, groups: Sequence[Group], example_of: Mapping[str, Mapping[str, Any]]) -> tuple[list[Group], int]:
        """A peer's groups with the rewards that this script gives, and how many contradict the recorded ones.

        Groups in which the reward functions leave a response ungraded are left out.
        """
        responses = [(group, response) for group in groups for response in group.responses]
        if not responses:
            return [], 0
        inputs = [dict(example_of[group.prompt.id]) for group, _ in responses]
        chat = not isinstance(inputs[0]["prompt"], str)
        texts = [response.text for _, response in responses]
        ids = [self._completion_ids(response) for _, response in responses]
        per_function = self._calculate_rewards(
            inputs,
            [example["prompt"] for example in inputs],
            [[{"role": "assistant", "content": text}] for text in texts] if chat else texts,
            ids,
        )
        self._pending_extra_logs.clear()  # what reward functions log is about this step's own completions
        self._pending_metrics.clear()
        rewards = Graded([], per_function).total(self.reward_weights)
        contradicted = 0
        for (_, response), reward in zip(responses, rewards.tolist(), strict=True):
            contradicted += response.reward != reward
            response.reward = None if np.isnan(reward) else reward
        return [group for group in groups if all(r.reward is not None for r in group.responses)], contradicted

    def _completion_ids(self, response: Response) -> list[int]:
        """A peer's response in this model's tokens, as reward functions see their own: with an EOS if it stopped."""
        found = encode_response(response.text, self._codec.tokenizer)
        eos = [self._codec.eos_id] if response.finish_reason == "stop" else []
        return eos if isinstance(found, Rejected) else [*found, *eos]

    def _microbatches(self, rows: Sequence[Row], prompts: int, step: int) -> list[dict[str, Any]]:
        """The method's minibatches, each cut into `gradient_accumulation_steps` parts; some may be empty."""
        accumulation = self.args.gradient_accumulation_steps
        optimizer_steps = self.args.steps_per_generation // accumulation
        per_minibatch = -(-prompts // optimizer_steps)
        rng = generator(self.args.seed, "order", step, self.name, 0)
        minibatches = self.method.order(rows, per_minibatch, rng)
        minibatches += [[]] * (optimizer_steps - len(minibatches))
        inputs = []
        for minibatch in minibatches:
            tokens = sum(row.loss_tokens for row in minibatch)
            # TRL spreads the tokens of a generation batch evenly over its optimizer steps; here each has its own count.
            denominator = tokens * self.args.steps_per_generation / accumulation
            cuts = np.linspace(0, len(minibatch), accumulation + 1).round().astype(int).tolist()
            inputs += [
                loss_inputs(minibatch[start:stop], denominator, self) for start, stop in itertools.pairwise(cuts)
            ]
        return inputs

    # Rewards and loss ------------------------------------------------------------------------------------------------

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._graded = Graded(completion_ids_list, rewards)
        return rewards

    def _get_per_token_logps_and_entropies(self, model: Any, *arguments: Any, **options: Any) -> Any:
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
            with_positions(model), *arguments, **options
        )
        if self._open_old is not None:
            self._logps = logps.detach()
            self._open_old.copy_(torch.where(self._open_old.isnan(), self._logps, self._open_old))
        return logps, entropies, aux_loss

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if "graft_kinds" not in inputs:
            if len(inputs["completion_ids"]):
                return super()._compute_loss(model, inputs)  # evaluation
            return 0.0 * next(p for p in model.parameters() if p.requires_grad).sum()
        self._rows_in_step += len(inputs["graft_kinds"])
        self._open_old = inputs["old_per_token_logps"]
        try:
            loss = super()._compute_loss(model, inputs)
            self._report_clipping(inputs)
        finally:
            self._open_old = self._logps = None
        return loss

    # Reports ---------------------------------------------------------------------------------------------------------

    def _log(self, name: str, value: float) -> None:
        self._metrics["train"][f"graft/{name}"].append(float(value))

    def _report(self, exchange: Exchange) -> None:
        for direction, stats in exchange.directions.items():
            source = direction.partition("->")[0]
            for key in ("candidates", "selected", "responses", "admitted_successes", "admitted_failures", "gated"):
                self._log(f"{source}/{key}", stats[key])
            self._log(f"{source}/rejected", sum(stats["rejected"].values()))
            for key in ("score_mean", "weight_mean"):
                if stats[key] is not None:
                    self._log(f"{source}/{key}", stats[key])
        for note in exchange.notes:
            warnings.warn(note, RuntimeWarning, stacklevel=2)

    def _report_clipping(self, inputs: Mapping[str, Any]) -> None:
        """Share of tokens whose clipped surrogate is strictly smaller, for own and for grafted rows."""
        assert self._logps is not None
        if self.importance_sampling_level != "token":
            return
        mask = inputs["completion_mask"].bool()
        advantages = inputs["advantages"].unsqueeze(1)
        smaller = mask & clipped(
            self._logps, inputs["old_per_token_logps"], advantages, self.epsilon_low, self.epsilon_high
        )
        for kind in sorted(set(inputs["graft_kinds"])):
            rows = [i for i, of in enumerate(inputs["graft_kinds"]) if of == kind]
            self._log(f"clip_ratio/{kind}", float(smaller[rows].sum() / mask[rows].sum().clamp(min=1)))

    # Checks ----------------------------------------------------------------------------------------------------------

    def _check_data_set(self) -> None:
        """Compare stored peers with the prompts of the whole run, and refuse an id of two different prompts.

        A streamed data set cannot be looked through; its prompts are looked up as they come.
        """
        if not hasattr(self.train_dataset, "__len__"):
            return
        prompts = [self._fields.prompt(example) for example in self.train_dataset]
        known: dict[str, Prompt] = {}
        for prompt in prompts:
            if known.setdefault(prompt.id, prompt).messages != prompt.messages:
                raise DataError(
                    f"train_dataset: two different prompts have the id {prompt.id!r} (column {self._fields.id!r})"
                )
        stream = _SampledOrder(self, prompts)
        for peer in self.peers:
            peer.check(stream, stream.steps)
            for note in peer.notes:
                warnings.warn(note, RuntimeWarning, stacklevel=3)


class _SampledOrder:
    """The prompts of generation batches 0, 1, 2, ..., as TRL's sampler will draw them in an uninterrupted run."""

    def __init__(self, trainer: GraftTrainer, prompts: Sequence[Prompt]) -> None:
        args = trainer.args
        size = args.generation_batch_size // trainer.num_generations
        repeats = args.steps_per_generation * trainer.num_iterations
        sampler = trainer._get_train_sampler(trainer.train_dataset)
        epoch_steps = len(prompts) // size
        if not epoch_steps:
            raise ConfigError(f"train_dataset has {len(prompts)} prompts; a generation batch has {size}")
        if args.max_steps > 0:
            microbatches = args.max_steps * args.gradient_accumulation_steps
            self.steps = -(-microbatches // repeats)
        else:
            self.steps = int(np.ceil(args.num_train_epochs * epoch_steps))
        self._batches: list[list[Prompt]] = []
        while len(self._batches) < self.steps:
            indices = list(sampler)[:: trainer.num_generations]  # one per prompt; every batch comes `repeats` times
            batches = [indices[start : start + size] for start in range(0, len(indices), size)][::repeats]
            self._batches += [[prompts[index] for index in batch] for batch in batches]

    def batch(self, index: int) -> list[Prompt]:
        return self._batches[index]


class _Hooks(TrainerCallback):  # type: ignore[misc]
    """What the trainer does at moments of TRL's loop."""

    def __init__(self, trainer: GraftTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer.exchange is not None:
            self._trainer.exchange.begin(state.global_step)
        if self._trainer._writer is not None:
            self._trainer._writer.begin(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """An optimizer step without rows changes nothing: parameters without a gradient are left alone."""
        if not self._trainer._rows_in_step:
            for parameter in others["model"].parameters():
                parameter.grad = None
        self._trainer._rows_in_step = 0


def _method_of(args: GraftConfig) -> GRAFT:
    """The method of these arguments; what TRL's loss does is written into its settings too."""
    options = args.graft_options or {}
    if not isinstance(options, dict):
        raise ConfigError(f"graft_options is {options!r}; give a mapping such as {{'threshold': 0.7}}")
    of_preset = {key for key in PRESETS.get(args.graft_method, {}) if key != "name"}
    for key in sorted({*options} | of_preset):
        if key not in OPTIONS:
            raise ConfigError(
                f"graft_method={args.graft_method!r}, graft_options={options!r}: {key} is not an option here (known: "
                f"{', '.join(OPTIONS)}); how ratios are clipped is said in TRL's own arguments"
            )
    method = parse_method(
        {
            "name": args.graft_method,
            **options,
            "normalize_std": args.scale_rewards == "group",
            "clip_low": args.epsilon,
            "clip_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
            "dual_clip": args.delta,
            "ratio": args.importance_sampling_level,
        },
        "graft_options",
    )
    terms = method.objective(0).terms
    if not isinstance(method, GRAFT) or len(terms) != 1:
        raise ConfigError(
            f"graft_method={args.graft_method!r} does not replace groups under the clipped loss; choose graft or "
            "one of its presets that change what is exchanged"
        )
    return method


__all__ = ["GraftConfig", "GraftTrainer"]

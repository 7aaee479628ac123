"""TRL's generation batches as groups, and rows as the tensors that TRL's loss reads.

Shapes: B rows of a batch, P prompt tokens (padded on the left), C completion tokens (padded on the right).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad

from graftrl.logs.formats import messages_of, reference_of
from graftrl.logs.matching import text_id
from graftrl.policies.codec import Codec
from graftrl.policies.config import ModelSettings
from graftrl.rollout import Group, Prompt, Response, Row

TASK = "trl"  # what prompts of a script's data set are called in logs


@dataclass(frozen=True)
class Fields:
    """Columns of the data set. id: prompts without it get a hash of their text. reference: kept in logs; None: none."""

    id: str = "id"
    reference: str | None = None

    def prompt(self, example: Mapping[str, Any]) -> Prompt:
        """A row of the data set as a prompt. Raises DataError for prompts that are not plain text."""
        messages = messages_of("the data set's column 'prompt'", example["prompt"])
        given = example.get(self.id)
        reference = None if self.reference is None else example.get(self.reference)
        prompt_id = text_id(messages) if given is None else str(given)
        return Prompt(prompt_id, messages, reference_of(reference) or "", TASK)


@dataclass(frozen=True)
class Graded:
    """What TRL hands to the reward functions, and what they say; it keeps neither.

    completion_ids: per row, without padding, EOS included. rewards_per_function: [B, functions], NaN for None.
    """

    completion_ids: Sequence[Sequence[int]]
    rewards_per_function: Tensor

    def total(self, weights: Tensor) -> NDArray[np.float64]:
        """The weighted sum that TRL trains on, float64 [B]; NaN where no function gave a reward."""
        per_function = self.rewards_per_function.double()
        total = (per_function * weights.to(per_function)).nansum(dim=1)
        total[per_function.isnan().all(dim=1)] = torch.nan
        return total.cpu().numpy()


class ScriptCodec(Codec):
    """The codec of a trainer's model. Prompts have the ids that TRL gave them, chat template arguments included."""

    def __init__(self, trainer: Any, name: str) -> None:
        settings = ModelSettings(path=str(trainer._tokenizer.name_or_path or name))
        super().__init__(trainer._tokenizer, name, settings, trainer.eos_token_ids)
        self._given: dict[str, NDArray[np.int64]] = {}

    def remember(self, prompt_ids: Mapping[str, NDArray[np.int64]]) -> None:
        """The prompts of this generation batch, by id."""
        self._given = dict(prompt_ids)

    def prompt_token_ids(self, prompt: Prompt) -> NDArray[np.int64]:
        return self._given[prompt.id]


def read_groups(
    model: str,
    prompts: Sequence[Prompt],
    output: Mapping[str, Any],
    completion_ids: Sequence[Sequence[int]],
    rewards: NDArray[np.float64],
    codec: ScriptCodec,
) -> list[Group]:
    """The rows of a generation batch as groups, found by prompt id, in order of first appearance.

    Log-probabilities are those that TRL computed, and empty where it computed none. A reward of NaN becomes None.

    Args:
        prompts, completion_ids, rewards: per row. output: of `_generate_and_score_completions`.
    """
    known: Tensor | None = output.get("sampling_per_token_logps", output.get("old_per_token_logps"))
    logprobs = None if known is None else known.float().cpu().numpy()
    prompt_ids, prompt_mask = output["prompt_ids"].cpu().numpy(), output["prompt_mask"].cpu().numpy().astype(bool)
    codec.remember({prompt.id: prompt_ids[i][prompt_mask[i]].astype(np.int64) for i, prompt in enumerate(prompts)})
    groups: dict[str, Group] = {}
    for i, prompt in enumerate(prompts):
        ids = np.array(completion_ids[i], dtype=np.int64)
        stopped = bool(len(ids)) and int(ids[-1]) in codec.eos_ids
        groups.setdefault(prompt.id, Group(model, prompt, [])).responses.append(
            Response(
                text=codec.decode_response(ids, stopped=stopped),
                token_ids=ids,
                logprobs=np.empty(0, np.float32) if logprobs is None else logprobs[i, : len(ids)],
                finish_reason="stop" if stopped else "length",
                reward=None if np.isnan(rewards[i]) else float(rewards[i]),
            )
        )
    return list(groups.values())


def row_of(group: Group, response: Response, codec: ScriptCodec) -> Row:
    """A response of the model's own, to be scored."""
    return Row(
        prompt_id=group.prompt.id,
        prompt_token_ids=codec.prompt_token_ids(group.prompt),
        response_token_ids=response.token_ids,
        advantages=0.0,
        kind="own",
        source=group.model,
    )


def add_logprobs(trainer: Any, groups: Sequence[Group], codec: ScriptCodec) -> None:
    """Give every response without log-probabilities those of a forward pass under the current weights."""
    missing = [(group, r) for group in groups for r in group.responses if len(r.logprobs) < len(r.token_ids)]
    scores = score_rows(trainer, [row_of(group, response, codec) for group, response in missing])
    for (_, response), logprobs in zip(missing, scores, strict=True):
        response.logprobs = logprobs


def padded(rows: Sequence[Row], trainer: Any) -> dict[str, Tensor]:
    """prompt_ids, prompt_mask, completion_ids and completion_mask, as TRL lays them out."""

    def tensors(values: Sequence[NDArray[Any]], side: str, fill: int) -> Tensor:
        padded_rows = pad(
            [torch.from_numpy(np.asarray(value, np.int64)) for value in values],
            padding_value=fill,
            padding_side=side,
            pad_to_multiple_of=trainer.pad_to_multiple_of,
        )
        return padded_rows.to(trainer.accelerator.device)

    pad_id = trainer._tokenizer.pad_token_id
    return {
        "prompt_ids": tensors([row.prompt_token_ids for row in rows], "left", pad_id),
        "prompt_mask": tensors([np.ones_like(row.prompt_token_ids) for row in rows], "left", 0),
        "completion_ids": tensors([row.response_token_ids for row in rows], "right", pad_id),
        "completion_mask": tensors([row.loss_mask for row in rows], "right", 0),
    }


def loss_inputs(rows: Sequence[Row], denominator: float, trainer: Any) -> dict[str, Any]:
    """What TRL's loss reads of one microbatch.

    A row's weight is folded into its advantage. Old log-probabilities that are not known are NaN: the trainer puts the
    current ones there, so that these ratios are 1. `graft_kinds` is for the trainer's own diagnostics.

    Args:
        denominator: what TRL divides the sum over tokens by, before its own corrections for accumulation.
    """
    if not rows:
        return {"completion_ids": torch.empty(0, 1, dtype=torch.int64)}
    inputs: dict[str, Any] = padded(rows, trainer)
    width = inputs["completion_ids"].shape[1]
    device = trainer.accelerator.device
    old = np.full((len(rows), width), np.nan, np.float32)
    for i, row in enumerate(rows):
        if row.old_logprobs is not None and len(row.old_logprobs):
            old[i, : len(row.old_logprobs)] = row.old_logprobs
    weighted = np.array([np.float32(row.advantages) * np.float32(row.weight) for row in rows], np.float32)
    return {
        **inputs,
        "advantages": torch.from_numpy(weighted).to(device),
        "old_per_token_logps": torch.from_numpy(old).to(device),
        "num_items_in_batch": torch.tensor(float(denominator), dtype=torch.float64, device=device),
        "graft_kinds": [row.kind for row in rows],
    }


def score_rows(trainer: Any, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
    """log pi(token) of every response token under the current weights, float32 [T] per row, in TRL's own pass."""
    found: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].prompt_token_ids) + len(rows[i].response_token_ids))
    at_once = trainer.args.per_device_train_batch_size
    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        for start in range(0, len(rows), at_once):
            part = order[start : start + at_once]
            inputs = padded([rows[i] for i in part], trainer)
            logps, _, _ = trainer._get_per_token_logps_and_entropies(
                with_positions(trainer.model),
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                inputs["completion_ids"].shape[1],
            )
            values = logps.float().cpu().numpy()
            for place, i in enumerate(part):
                found[i] = values[place, : len(rows[i].response_token_ids)].copy()
    return found


def with_positions(model: Any) -> Callable[..., Any]:
    """The model with positions counted from each row's first token.

    TRL leaves them to the model, which counts the padding on the left too: with learned positions (GPT-2) a row's
    log-probabilities would then depend on the batch that it is in.
    """
    if isinstance(model, _Positioned) or "position_ids" not in signature(type(_innermost(model)).forward).parameters:
        return model
    return _Positioned(model)


@dataclass(frozen=True)
class _Positioned:
    model: Any

    def __call__(self, *, attention_mask: Tensor, **inputs: Any) -> Any:
        positions = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
        return self.model(attention_mask=attention_mask, position_ids=positions, **inputs)


def _innermost(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model

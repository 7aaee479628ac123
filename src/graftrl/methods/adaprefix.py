"""AdaPrefix-GRPO: the model is given the beginning of a reference solution, as long as keeps it near half right.

    L <- clip(L + eta * (1/2 - ema(k / n)), 0, 1)        per prompt, L the share of the solution that is given

The prefix is the beginning of the model's own answer, so it stands in no loss, and the whole answer is graded. The help
is withdrawn to 0 over the run. Formalised from the abstract and public summaries of the paper; constants are options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, model_validator

from graftrl.errors import DataError
from graftrl.methods.base import Exchange, Groups, StepContext, receiving
from graftrl.methods.extensions import PromptContext
from graftrl.methods.grpo import GRPO, GRPOSettings
from graftrl.rollout import Group, Prompt
from graftrl.settings import Settings


class AdaPrefixSettings(GRPOSettings):
    """solution_field: the metadata field with the reference solution. initial: L of a prompt not seen before. target:
    the success rate to hold. eta: gain. smoothing: weight of the newest success rate in the moving average.
    withdraw_from, withdraw_to: shares of the run between which the help falls linearly from L to 0.
    steer_by: a metadata field whose values share one L, for tasks that hardly ever repeat a prompt; None: each prompt
    has its own."""

    name: str = "adaprefix"
    solution_field: str = "solution"
    initial: float = Field(0.5, ge=0, le=1)
    target: float = Field(0.5, ge=0, le=1)
    eta: float = Field(0.5, ge=0)
    smoothing: float = Field(0.5, gt=0, le=1)
    withdraw_from: float = Field(0.5, ge=0, le=1)
    withdraw_to: float = Field(0.9, ge=0, le=1)
    steer_by: str | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> AdaPrefixSettings:
        if self.withdraw_to < self.withdraw_from:
            raise ValueError(f"withdraw_to ({self.withdraw_to:g}) is before withdraw_from ({self.withdraw_from:g})")
        if self.dynamic_sampling:
            raise ValueError(
                "dynamic_sampling hides the groups that fail or succeed entirely, which steer the prefixes"
            )
        return self


Controllers = Mapping[str, Sequence[float]]  # key -> (L, moving average of k / n)


class AdaPrefix(GRPO):
    settings_type: ClassVar[type[Settings]] = AdaPrefixSettings
    settings: AdaPrefixSettings

    def prepare(self, model: str, prompts: Sequence[Prompt], context: PromptContext) -> list[Prompt]:
        controllers: Controllers = context.memory.get(model, {})
        given = help_left(context.progress, self.settings.withdraw_from, self.settings.withdraw_to)
        return [
            with_prefix(prompt, self._solution(prompt), given * self._length(prompt, controllers), context)
            for prompt in prompts
        ]

    def exchange(self, groups: Groups, context: StepContext) -> Exchange:
        exchange = super().exchange(groups, context)
        for model, of_model in receiving(groups, context).items():
            exchange.memory[model] = self._steer(context.memory.get(model, {}), of_model)
            shares = [len(group.prompt.prefix) / len(self._solution(group.prompt)) for group in of_model]
            exchange.diagnostics[model] = {"prefix_share": float(np.mean(shares))}
        return exchange

    def _steer(self, controllers: Controllers, groups: Sequence[Group]) -> dict[str, list[float]]:
        s = self.settings
        rates: dict[str, list[float]] = {}
        for group in groups:
            rates.setdefault(self._key(group.prompt), []).append(group.successes / group.size)
        steered = {key: list(controller) for key, controller in controllers.items()}
        for key, of_key in rates.items():
            rate = float(np.mean(of_key))
            length, average = controllers.get(key, (s.initial, rate))
            average += s.smoothing * (rate - average)
            steered[key] = [float(np.clip(length + s.eta * (s.target - average), 0.0, 1.0)), average]
        return steered

    def _length(self, prompt: Prompt, controllers: Controllers) -> float:
        return controllers.get(self._key(prompt), (self.settings.initial,))[0]

    def _key(self, prompt: Prompt) -> str:
        return prompt.id if self.settings.steer_by is None else str(self._metadata(prompt, self.settings.steer_by))

    def _solution(self, prompt: Prompt) -> str:
        return str(self._metadata(prompt, self.settings.solution_field))

    def _metadata(self, prompt: Prompt, name: str) -> Any:
        if not prompt.metadata.get(name):
            there = ", ".join(prompt.metadata) or "none"
            raise DataError(
                f"prompt {prompt.id!r} has no {name!r} in its metadata (fields: {there}); adaprefix needs a reference "
                "solution for every prompt: name its field with method.solution_field, and one to share with steer_by"
            )
        return prompt.metadata[name]


def help_left(progress: float, start: float, end: float) -> float:
    """1 up to `start`, falling linearly to 0 at `end`, then 0."""
    if progress >= end:
        return 0.0
    return 1.0 if progress <= start else (end - progress) / (end - start)


def with_prefix(prompt: Prompt, solution: str, share: float, context: PromptContext) -> Prompt:
    """The prompt with the first `share` of the solution's tokens as the beginning of the answer; fewer where the prompt
    would exceed its limit."""
    tokenizer = context.codec.tokenizer
    ids = tokenizer.encode(solution, add_special_tokens=False)
    for count in range(round(share * len(ids)), 0, -1):
        # A cut inside a character decodes to U+FFFD.
        text = tokenizer.decode(ids[:count], skip_special_tokens=False, clean_up_tokenization_spaces=False).rstrip(
            "\ufffd"
        )
        begun = replace(prompt, messages=(*prompt.messages, {"role": "assistant", "content": text}))
        if text and len(context.codec.prompt_token_ids(begun)) <= context.max_prompt_tokens:
            return begun
    return prompt

"""Scorers: frozen models that read other models' responses, each after the prompt in a context of its own.

A scorer is a checkpoint and a context. Several may be one checkpoint: a model with a hint is another scorer than the
same model without it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graftrl.errors import DataError, ModelError
from graftrl.policies.codec import Codec
from graftrl.policies.config import CONTEXTS, FIELD, QUESTION, ScorerSettings
from graftrl.policies.frozen import FrozenModel, FrozenWeights
from graftrl.policies.loading import make_codec
from graftrl.rollout import Prompt


@dataclass(frozen=True)
class ScorerCodec:
    """What a method knows of a scorer: a codec, whose prompts come in the context. name: in the recipe."""

    name: str
    template: str
    codec: Codec
    notes: tuple[str, ...] = ()

    @property
    def tokenizer(self) -> Any:
        return self.codec.tokenizer

    @property
    def eos_id(self) -> int:
        return self.codec.eos_id

    @property
    def fingerprint(self) -> str:
        return self.codec.fingerprint

    @property
    def architecture(self) -> str:
        return self.codec.architecture

    def prompt_token_ids(self, prompt: Prompt) -> NDArray[np.int64]:
        """The prompt in the scorer's context and tokens. Raises DataError for a prompt without what it needs."""
        return self.codec.prompt_token_ids(in_context(prompt, self.template, self.name))


@dataclass(frozen=True)
class Scorer(ScorerCodec):
    """A scorer with its weights."""

    model: FrozenModel = field(kw_only=True)


def open_scorer(name: str, settings: ScorerSettings, frozen: FrozenWeights) -> Scorer:
    """Load a scorer, or find its weights loaded already. Raises ModelError as `FrozenWeights.model`."""
    settings = resolved(name, settings)
    model = frozen.model(name, settings)
    loaded = model.passes.loaded
    with model.using():
        codec, notes = make_codec(name, settings, loaded.causal_lm, loaded.codec.tokenizer)
    return Scorer(name, settings.template, codec, notes, model=model)


def resolved(name: str, settings: ScorerSettings) -> ScorerSettings:
    """The settings with what the folders on disk decide: an adapter folder's base model, a checkpoint's BOS convention.

    Raises:
        ModelError: an adapter folder without the name of its base model.
    """
    config = Path(settings.path).expanduser() / "adapter_config.json"
    if settings.adapter is None and config.is_file():
        base = json.loads(config.read_text()).get("base_model_name_or_path")
        if not base:
            raise ModelError(
                f"scorers.{name}.path: {config} does not name the model that it adapts; give that model as path and "
                "this folder as adapter"
            )
        settings = settings.model_copy(update={"path": base, "adapter": settings.path})
    state = Path(settings.adapter or settings.path).expanduser() / "policy.json"
    if settings.bos == "auto" and state.is_file():  # as it was decided before that model trained
        bos = "add" if json.loads(state.read_text())["prepend_bos"] else "keep"
        settings = settings.model_copy(update={"bos": bos})
    return settings


def in_context(prompt: Prompt, template: str, scorer: str) -> Prompt:
    """The prompt with its last user message put into the template.

    Raises:
        DataError: the template names a field that the prompt's metadata lack.
    """
    if template == CONTEXTS["plain"]:
        return prompt
    place = max((i for i, m in enumerate(prompt.messages) if m.get("role") == "user"), default=0)

    def value(match: re.Match[str]) -> str:
        name = match[1]
        known = {QUESTION: prompt.messages[place]["content"], "answer": prompt.reference}
        found = known[name] if name in known else prompt.metadata.get(name)
        if found is None or found == "":
            there = ", ".join(prompt.metadata) or "none"
            raise DataError(
                f"scorers.{scorer}.context needs {name!r}, which prompt {prompt.id!r} does not have; fields of its "
                f"metadata: {there}"
            )
        return str(found)

    message = {**prompt.messages[place], "content": FIELD.sub(value, template)}
    return replace(prompt, messages=(*prompt.messages[:place], message, *prompt.messages[place + 1 :]))

"""The base of every configuration model: unknown keys are refused and values cannot change after loading."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A part of a recipe. Subclasses live beside the code that they configure; `graftrl.config` composes them."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

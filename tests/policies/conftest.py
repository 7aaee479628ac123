"""Fixtures that write tiny model folders and build policies on them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from graftrl.policies.config import ModelSettings, SamplingSettings
from graftrl.policies.hf import HFPolicy

sys.path.insert(0, str(Path(__file__).parent))  # the tests share `tiny_models`
from tiny_models import character_tokenizer, tiny_config


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a model folder; `change` may edit the model, `generation` overrides its generation config."""
    root, known = tmp_path_factory.mktemp("models"), {}

    def build(
        kind: str = "llama",
        *,
        tokenizer: Any = None,
        generation: dict[str, Any] | None = None,
        change: Callable[[Any], None] | None = None,
        seed: int = 0,
    ) -> Path:
        plain = tokenizer is None and generation is None and change is None
        if plain and (kind, seed) in known:
            return known[kind, seed]
        with torch.random.fork_rng(devices=[]):  # so that a test draws the same whether or not it comes first
            torch.manual_seed(seed)
            model = hf.AutoModelForCausalLM.from_config(tiny_config(kind))
            with torch.no_grad():  # norms and biases start at constants; random ones catch a forgotten term
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(0.1 * torch.randn_like(parameter))
            for key, value in (generation or {}).items():
                setattr(model.generation_config, key, value)
            if change is not None:
                change(model)
        folder = root / f"{len(list(root.iterdir()))}-{kind}"
        model.save_pretrained(folder)
        (tokenizer or character_tokenizer()).save_pretrained(folder)
        if plain:
            known[kind, seed] = folder
        return folder

    return build


@pytest.fixture
def policy(model_folder: Callable[..., Path]) -> Callable[..., HFPolicy]:
    """`policy("gpt2", dtype=..., ...)`; `folder`, `sampling` and `checkpoint` are not model settings."""

    def build(kind: str = "llama", *, sampling: dict[str, Any] | None = None, **settings: Any) -> HFPolicy:
        folder = settings.pop("folder", None) or model_folder(kind)
        checkpoint = settings.pop("checkpoint", None)
        limits = SamplingSettings(**{"max_response_tokens": 12, **(sampling or {})})
        model_settings = ModelSettings(**{"path": str(folder), "device": "cpu", **settings})
        return HFPolicy("m", model_settings, limits, checkpoint)

    return build

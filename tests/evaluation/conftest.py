"""Benchmarks in small files, and models that say what a test wants them to say."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from graftrl.evaluation import sampling
from graftrl.policies.config import ModelSettings, SamplingSettings
from graftrl.rollout import Group, Prompt, Response


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """`write_rows("name.jsonl", rows)`."""

    def write(name: str, rows: Sequence[dict[str, Any]]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def sums(n: int) -> list[dict[str, Any]]:
    return [{"id": f"s{i}", "problem": f"{i}+1?", "answer": str(i + 1)} for i in range(n)]


class Speaker:
    """Stands for a policy; `say(model, prompt, index)` is its response number `index` in one group."""

    say: Callable[[str, Prompt, int], str]
    loaded_names: list[str]
    calls: list[tuple[str, list[str], int, int, SamplingSettings]]
    alive: weakref.WeakSet[Speaker]
    context = 100_000
    notes: tuple[str, ...] = ()

    def __init__(
        self, name: str, settings: ModelSettings, sampling: SamplingSettings, checkpoint: Path | None = None
    ) -> None:
        assert not self.alive, "another model is still in memory"
        self.alive.add(self)
        self.loaded_names.append(name)
        self.name = name
        self.codec = codec()
        config = SimpleNamespace(max_position_embeddings=self.context)
        self.loaded = SimpleNamespace(causal_lm=SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config)))

    def sample(self, prompts: Sequence[Prompt], n: int, seed: int, sampling: SamplingSettings) -> list[Group]:
        self.calls.append((self.name, [prompt.id for prompt in prompts], n, seed, sampling))
        return [
            Group(self.name, prompt, [self._response(type(self).say(self.name, prompt, i)) for i in range(n)])
            for prompt in prompts
        ]

    @staticmethod
    def _response(text: str) -> Response:
        cut = text.endswith("...")
        tokens = len(text.split()) + (not cut)
        return Response(text, np.arange(tokens), np.zeros(tokens, np.float32), "length" if cut else "stop")


def codec() -> Any:
    return SimpleNamespace(fingerprint="speaker", prompt_token_ids=lambda prompt: prompt.text.split())


@pytest.fixture
def speaker(monkeypatch) -> type[Speaker]:
    """Every model is one of these; by default they are always right."""

    class Own(Speaker):
        say = staticmethod(lambda model, prompt, index: rf"So \boxed{{{prompt.reference}}}")

    Own.loaded_names, Own.calls, Own.alive = [], [], weakref.WeakSet()

    def skeleton(name: str, settings: ModelSettings) -> tuple[Any, Any]:
        config = SimpleNamespace(max_position_embeddings=Own.context)
        return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config)), codec()

    monkeypatch.setattr(sampling, "HFPolicy", Own)
    monkeypatch.setattr(sampling, "load_skeleton", skeleton)
    return Own

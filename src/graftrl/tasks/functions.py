"""The user's own prompts and verifier, named `module:function`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from graftrl.errors import ConfigError, DataError
from graftrl.own_code import import_named
from graftrl.rollout import FinishReason, Prompt
from graftrl.tasks.base import Grade

_PROMPT_KEYS = {"id", "prompt", "messages", "answer", "metadata"}


@lru_cache
def resolve(name: str) -> Callable[..., Any]:
    """The function called `module:function`; the working directory is importable. Raises ConfigError."""
    found = import_named(name)
    if not callable(found):
        raise ConfigError(f"{name!r} is not a function")
    function: Callable[..., Any] = found
    return function


@dataclass(frozen=True)
class FunctionVerifier:
    """Calls the function `name` as f(prompt, response, finish_reason); what it raises the pool turns into reward 0."""

    name: str

    def __call__(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> Grade:
        result = resolve(self.name)(prompt, response, finish_reason)
        if isinstance(result, Grade):
            return result
        if type(result).__name__ in ("bool", "bool_"):  # Python's and numpy's
            return Grade(1.0, "correct") if result else Grade(0.0, "wrong answer")
        if not isinstance(result, numbers.Real):
            return Grade(0.0, f"verifier returned {type(result).__name__}, not a bool, number or Grade")
        reward = float(result)
        if math.isnan(reward) or not 0.0 <= reward <= 1.0:
            return Grade(0.0, f"verifier returned {reward!r}, outside [0, 1]")
        return Grade(reward, f"score {reward:g}")


def function_prompts(name: str, task: str) -> list[Prompt]:
    """The prompts that the function `name` returns or yields. Raises ConfigError or DataError."""
    produced = resolve(name)()
    if not isinstance(produced, Iterable):
        raise DataError(f"{name}: returned {type(produced).__name__}, not prompts")
    prompts = [_as_prompt(name, number, item, task) for number, item in enumerate(produced, start=1)]
    if not prompts:
        raise DataError(f"{name}: produced no prompts")
    return prompts


def _as_prompt(name: str, number: int, item: object, task: str) -> Prompt:
    if isinstance(item, Prompt):
        return item
    if not isinstance(item, dict):
        raise DataError(f"{name}, item {number}: {type(item).__name__}, neither a dict nor a Prompt")
    if unknown := sorted(str(key) for key in item if key not in _PROMPT_KEYS):
        raise DataError(f"{name}, item {number}: unknown key {unknown[0]!r}; known: {', '.join(sorted(_PROMPT_KEYS))}")
    if ("prompt" in item) == ("messages" in item):
        raise DataError(f"{name}, item {number}: give either 'prompt' or 'messages'")
    messages = item.get("messages") or [{"role": "user", "content": item["prompt"]}]
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(f"{name}, item {number}: a message needs the texts 'role' and 'content'")
    return Prompt(
        id=str(item.get("id", f"{name.partition(':')[2]}-{number}")),
        messages=tuple(messages),
        reference=str(item.get("answer", "")),
        task=task,
        metadata=item.get("metadata") or {},
    )

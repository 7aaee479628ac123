"""The state of the Ray service. Only the standard library: the class travels to clusters without graftrl."""

from __future__ import annotations

import uuid
from collections.abc import Hashable


class Held:
    """The last few steps of every model, as bytes. An instance that was started anew is empty and has a new name."""

    def __init__(self) -> None:
        self._instance = uuid.uuid4().hex
        self._published = 0
        self._steps: dict[str, dict[int, tuple[int, bytes]]] = {}

    def look(self, model: str) -> tuple[str, dict[int, Hashable]]:
        """The instance's name, and the steps held, each with the number of its publication."""
        return self._instance, {step: number for step, (number, _) in self._steps.get(model, {}).items()}

    def fetch(self, model: str, step: int) -> bytes | None:
        found = self._steps.get(model, {}).get(step)
        return None if found is None else found[1]

    def publish(self, model: str, step: int, content: bytes, keep: int) -> str:
        """Returns the instance's name. Of the steps up to this one only the last `keep` stay."""
        self._published += 1
        of_model = self._steps.setdefault(model, {})
        of_model[step] = self._published, content
        self.drop(model, [held for held in of_model if held <= step - keep])
        return self._instance

    def drop(self, model: str, steps: list[int]) -> None:
        for step in steps:
            self._steps.get(model, {}).pop(step, None)

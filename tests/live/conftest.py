"""Groups, a clock that only sleeping moves, and the services that run without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from graftrl.live import sides
from graftrl.live.folder import SharedFolder
from graftrl.live.held import Held
from graftrl.rollout import Group, Prompt, Response


class InMemory:
    """What the Ray service holds, in this process."""

    where = "memory"

    def __init__(self):
        self._held = Held()

    def place(self, model, step):
        return f"memory, {model!r} in step {step}"

    def look(self, model):
        return self._held.look(model)[1]

    def fetch(self, model, step):
        return self._held.fetch(model, step)

    def publish(self, model, step, content, keep):
        self._held.publish(model, step, content, keep)

    def drop(self, model, steps):
        self._held.drop(model, steps)

    def open(self): ...

    def close(self): ...


@pytest.fixture(params=["folder", "memory"])
def service(request, tmp_path):
    found = SharedFolder(tmp_path / "exchange") if request.param == "folder" else InMemory()
    found.open()
    return found


def make_prompt(q: str, asks: str = "B", reference: str = "") -> Prompt:
    return Prompt(q, ({"role": "user", "content": f"{asks} asks {q}"},), reference, "t")


def make_group(q: str, model: str = "B", reward: float = 1.0, **of_prompt: str) -> Group:
    responses = [
        Response(f"{model}{i}", np.array([3, 4, 2]), np.array([-0.5, -1.0, -0.1], np.float32), "stop", r)
        for i, r in enumerate((reward, 0.0))
    ]
    return Group(model, make_prompt(q, model, **of_prompt), responses)


@pytest.fixture
def prompt() -> Callable[..., Prompt]:
    return make_prompt


@pytest.fixture
def group() -> Callable[..., Group]:
    return make_group


class Clock:
    """Seconds pass in `sleep` alone; `at` has things happen then."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, Callable[[], None]]] = []

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        self._events.append((self.now + seconds, event))

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [event for when, event in self._events if when <= self.now]
        self._events = [(when, event) for when, event in self._events if when > self.now]
        for event in due:
            event()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(sides, "time", SimpleNamespace(monotonic=found.monotonic, sleep=found.sleep))
    return found

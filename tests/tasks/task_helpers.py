"""Verifiers and prompts that the tests name as `task_helpers:function` or send to workers."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graftrl.rollout import FinishReason, Prompt
from graftrl.tasks.base import Grade


def prompt(reference: str, identifier: str = "p") -> Prompt:
    return Prompt(identifier, ({"role": "user", "content": "?"},), reference, "test")


def obey(prompt: Prompt, response: str, finish_reason: FinishReason) -> Any:
    """Does what the response says."""
    command, _, argument = response.partition(" ")
    if command == "hang":
        return 10 ** (10**9) > 0  # one C call: no signal handler of Python gets a turn
    if command == "sleep":
        time.sleep(float(argument))
    elif command == "exit":
        os._exit(3)
    elif command == "abort":
        os.abort()
    elif command == "eat":
        return len(bytearray(8 * 1024**3)) > 0
    elif command == "raise":
        raise KeyError("missing")
    elif command == "print":
        print("x" * 100_000)
    elif command == "spawn":
        Path(argument).write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(60)
    elif command == "count":
        with Path(argument).open("a") as file:
            file.write(".")
    elif command == "return":
        return {"none": None, "text": "1", "two": 2, "nan": float("nan"), "half": 0.5, "true": True}[argument]
    return Grade(1.0, f"pid {os.getpid()}")


def prompts() -> Iterator[Any]:
    yield {"prompt": "say one", "answer": 1, "metadata": {"level": 2}}
    yield {"id": "b", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
    yield Prompt("c", ({"role": "user", "content": "q"},), "3", "function")


def twins() -> list[dict[str, str]]:
    return [{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}]


def strange() -> list[dict[str, str]]:
    return [{"id": "a", "question": "x"}]


NOT_A_FUNCTION = 3

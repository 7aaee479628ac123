"""Logs of random groups, and the same as plain values for a second implementation to look through."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graftrl.logs.rollouts import step_file_name, write_rollouts, write_transfers
from graftrl.methods import Transfer
from graftrl.policies.config import SamplingSettings
from graftrl.rollout import Group, Prompt, Response

WORDS = ("Apple", "berry", "Cherry", "date", "Überfluß", "5.0*x", "(a|b)")


@dataclass
class Said:
    """One group: what was said, and what was transferred to it."""

    step: int
    prompt: str
    model: str
    rewards: list[float]
    texts: list[str]
    question: str
    reference: str
    statuses: list[str]


def write_random_log(root: Path, seed: int, models: str = "ABC", steps: int = 4, prompts: int = 6) -> list[Said]:
    """Not every model answers every prompt; half of the groups without success get something from a peer."""
    rng = np.random.default_rng(seed)
    said: list[Said] = []
    for step in range(1, steps + 1):
        groups: dict[str, list[Group]] = {}
        transfers: list[Transfer] = []
        for number in range(prompts):
            prompt_id = f"p{number}"
            question, reference = " ".join(rng.choice(WORDS, 2)), str(rng.choice(WORDS))
            prompt = Prompt(prompt_id, ({"role": "user", "content": question},), reference, "toy")
            for model in models:
                if rng.random() < 0.2:
                    continue
                n = int(rng.integers(2, 5))
                rewards = (rng.random(n) < rng.choice([0.0, 0.5, 1.0])).astype(float).tolist()
                texts = [" ".join(rng.choice(WORDS, 3)) for _ in range(n)]
                responses = [
                    Response(text, np.array([7, 8]), np.array([-0.1, -0.2], np.float32), "stop", reward)
                    for text, reward in zip(texts, rewards, strict=True)
                ]
                groups.setdefault(model, []).append(Group(model, prompt, responses))
                statuses: list[str] = []
                if not any(rewards) and rng.random() < 0.5:
                    statuses = rng.choice(["admitted", "gated", "rejected"], 2, p=[0.3, 0.4, 0.3]).tolist()
                    transfers += [
                        Transfer(model, "Z", prompt_id, i, status, "", 1.0, 0.5, 0.9, 0.9, 3)
                        for i, status in enumerate(statuses)
                    ]
                said.append(Said(step, prompt_id, model, rewards, texts, question, reference, statuses))
        write_rollouts(
            root / "rollouts" / step_file_name(step), run="r", step=step, groups=groups, sampling=SamplingSettings(),
            fingerprints=dict.fromkeys(models, "f"),
        )  # fmt: skip
        if transfers:
            write_transfers(root / "exchange" / step_file_name(step), step, transfers)
    return said

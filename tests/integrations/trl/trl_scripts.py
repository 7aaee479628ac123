"""What the tests of the TRL adapter share: prompts, words, a verifier, and a trainer that says what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from graftrl.logs.matching import text_id
from graftrl.rollout import Prompt

N = 4
TEXTS = ["a1,2>", "b3,4,5>", "c6>", "d7,8,9,1>"]
RIGHT = "E:1"  # a text that holds it is right


def verify(completions: Sequence[Any], **_: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(RIGHT in text) for text in texts]


def prompt(index: int) -> Prompt:
    messages = ({"role": "user", "content": TEXTS[index]},)
    return Prompt(text_id(messages), messages, "", "t")


def words(index: int, successes: int, n: int = N) -> list[str]:
    """n texts of different lengths, the first `successes` of them right."""
    return [f"A:{index},{i},{i + 1};{RIGHT if i < successes else 'E:0'}{',5' * i}" for i in range(n)]


def load(folder: str) -> dict[str, Any]:
    return {
        "model": AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        "processing_class": AutoTokenizer.from_pretrained(folder),
    }


def says(trainer: Any, texts: Sequence[Sequence[str]]) -> None:
    """Have the trainer's model answer its prompts (rows in the order of `TEXTS`) with these words, each with an EOS."""
    tokenizer = trainer._tokenizer
    by_prompt = {
        tuple(tokenizer(text=TEXTS[index])["input_ids"]): [
            [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in of_prompt
        ]
        for index, of_prompt in enumerate(texts)
    }

    def generate(prompt_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        seen: dict[tuple[int, ...], int] = {}
        completions = []
        for ids in prompt_ids:
            key = tuple(ids)
            completions.append(by_prompt[key][seen.get(key, 0)])
            seen[key] = seen.get(key, 0) + 1
        return completions, None

    trainer._generate_single_turn = generate

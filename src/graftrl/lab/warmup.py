"""Supervised warm-up: gives a tiny model the skill of executing programs, and a prior over each family's program.

The loss is the mean negative log-likelihood of response tokens, EOS included. Afterwards a model executes the program
it names almost always, names the right one in about 0.4 of its responses to strong families, and guesses in weak ones.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from graftrl.lab.demonstrations import Demonstrator, table_tokenizers
from graftrl.lab.models import LabModel, build_model, build_tokenizer, save_model
from graftrl.lab.programs import (
    LETTERS,
    HiddenProgramsConfig,
    build_hidden_programs,
    write_demonstration,
)
from graftrl.lab.sampling import sample_fixed_length
from graftrl.settings import Settings

REPORT_FILE = "warmup.json"


class WarmupSettings(Settings):
    """How one model is warmed up.

    Family number i (from 0) is strong iff i mod `strong_period` == `strong_offset`.
    strong_share: share of a strong family's demonstrations that use its program; the rest are uniformly random.
    separator: this model's style of joining the two steps; None: the task's.
    samples: responses per validation prompt for the report.
    """

    steps: int = Field(default=600, ge=1)
    learning_rate: float = Field(default=4e-3, gt=0)
    linear_steps: int = Field(default=50, ge=0)
    batch_size: int = Field(default=128, ge=1)
    weight_decay: float = Field(default=0.01, ge=0)
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = Field(default=1.0, gt=0)
    strong_period: int = Field(default=2, ge=1)
    strong_offset: int = Field(default=0, ge=0)
    strong_share: float = Field(default=0.4, ge=0, le=1)
    separator: str | None = None
    samples: int = Field(default=4, ge=1)


WARMUPS: dict[str, WarmupSettings] = {
    "A": WarmupSettings(),
    "B": WarmupSettings(steps=800, strong_offset=1),
    "C": WarmupSettings(steps=1000, strong_period=3, strong_offset=2),
    "S": WarmupSettings(learning_rate=6e-3),
    "M": WarmupSettings(learning_rate=5e-3),
    "P": WarmupSettings(steps=1000, learning_rate=6e-3, strong_offset=1),
}


class WarmupReport(BaseModel):
    """What a warm-up gave, measured by sampling at temperature 1 on the validation prompts.

    losses: mean nats per response token, one value a step.
    pass_at_1: by family. strong, weak: its means over these families (weak is nan if all are strong).
    execution: share of responses that end by EOS and execute exactly the program that they name.
    cpu_seconds: processor time of training.
    """

    model: str
    fingerprint: str = ""
    losses: list[float]
    pass_at_1: dict[str, float]
    strong: float
    weak: float
    execution: float
    cpu_seconds: float

    @classmethod
    def read(cls, folder: Path) -> WarmupReport:
        return cls.model_validate_json((folder / REPORT_FILE).read_text())


def schedule(step: int, settings: WarmupSettings) -> float:
    """The factor on the learning rate at `step` (from 0): a linear rise, then a cosine to 0."""
    if step < settings.linear_steps:
        return (step + 1) / settings.linear_steps
    rest = max(1, settings.steps - settings.linear_steps)
    return 0.5 * (1 + float(np.cos(np.pi * (step - settings.linear_steps) / rest)))


def _train(
    network: Any,
    draw: Callable[[], tuple[Tensor, int]],
    settings: WarmupSettings,
    progress: Callable[[int, float], None],
) -> list[float]:
    """`draw` gives ids `[batch, P + T]` and P. Returns the loss of every step."""
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, settings))
    losses: list[float] = []
    network.train()
    for step in range(settings.steps):
        ids, prompt_length = draw()
        response = ids[:, prompt_length:]
        logits = network(input_ids=ids[:, :-1], logits_to_keep=response.shape[1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), response.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), settings.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        progress(step, losses[-1])
    network.eval()
    return losses


def executes_named_program(response: str, digits: str, separator: str) -> bool:
    """Whether `response` names two operations and is exactly their execution on `digits` (`d,d,...,d`)."""
    named = re.fullmatch(rf"([{LETTERS}]):[\d,]*{re.escape(separator)}([{LETTERS}]):[\d,]*", response)
    if named is None:
        return False
    values = np.array([int(digit) for digit in digits.split(",")])
    return response == write_demonstration((named[1], named[2]), values, separator)


def measure(
    network: Any, tokenizer: Any, config: HiddenProgramsConfig, separator: str, samples: int, seed: int
) -> tuple[dict[str, float], float]:
    """pass@1 by family and the share of responses that execute the program they name."""
    task = build_hidden_programs(config)
    prompts = [prompt.text for prompt in task.validation]
    ids = torch.tensor(tokenizer(prompts, add_special_tokens=False)["input_ids"])
    _, response_table = table_tokenizers(tokenizer, config, separator)
    eos = tokenizer.eos_token_id
    generator = torch.Generator().manual_seed(seed)
    # As in reinforcement learning runs, a third more than a response needs.
    sampled = sample_fixed_length(network, ids, samples, response_table.length * 4 // 3 + 1, eos, generator)
    ended = (sampled == eos).any(1).tolist()
    texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    rewards: dict[str, list[float]] = {letter: [] for letter in config.family_letters}
    executed = 0
    for i, (text, stop) in enumerate(zip(texts, ended, strict=True)):
        prompt = task.validation[i // samples]
        rewards[prompt.metadata["family"]].append(task.verifier(prompt, text, "stop" if stop else "length").reward)
        executed += stop and executes_named_program(text, prompt.text[1:-1], separator)
    return {letter: float(np.mean(values)) for letter, values in rewards.items()}, executed / len(texts)


def warm_up(
    model: LabModel,
    config: HiddenProgramsConfig,
    seed: int,
    folder: Path,
    settings: WarmupSettings | None = None,
    *,
    fingerprint: str = "",
    progress: Callable[[str], None] | None = None,
) -> WarmupReport:
    """Builds a model from `seed`, warms it up, measures it and writes weights, tokenizer and report into `folder`.

    settings: by default the preset of the model's name. progress: gets a line every 100 steps. Bitwise reproducible for
    a given number of torch threads, which is left as it is.

    Raises ConfigError if the task's lists are too short for its families.
    """
    settings = settings or WARMUPS.get(model.name, WarmupSettings())
    separator = settings.separator or config.separator
    tokenizer = build_tokenizer(model)
    prompt_table, response_table = table_tokenizers(tokenizer, config, separator)
    strong = np.arange(config.families) % settings.strong_period == settings.strong_offset
    demonstrator = Demonstrator(config, strong, settings.strong_share, separator)
    generator = np.random.default_rng(seed)
    eos = np.full((settings.batch_size, 1), tokenizer.eos_token_id)

    def draw() -> tuple[Tensor, int]:
        prompts, responses = demonstrator.draw(settings.batch_size, generator)
        ids = np.concatenate([prompt_table(prompts), response_table(responses), eos], axis=1)
        return torch.from_numpy(ids), prompt_table.length

    def tell(step: int, loss: float) -> None:
        if progress is not None and ((step + 1) % 100 == 0 or step + 1 == settings.steps):
            progress(f"warm-up of {model.name}: step {step + 1}/{settings.steps}, loss {loss:.3f} nats per token")

    network = build_model(model, seed)
    start = time.process_time()
    losses = _train(network, draw, settings, tell)
    cpu_seconds = time.process_time() - start
    pass_at_1, execution = measure(network, tokenizer, config, separator, settings.samples, seed)
    by_family = np.array(list(pass_at_1.values()))
    report = WarmupReport(
        model=model.name,
        fingerprint=fingerprint,
        losses=[round(loss, 5) for loss in losses],
        pass_at_1=pass_at_1,
        strong=float(by_family[strong].mean()) if strong.any() else float("nan"),
        weak=float(by_family[~strong].mean()) if not strong.all() else float("nan"),
        execution=execution,
        cpu_seconds=cpu_seconds,
    )
    save_model(network, model, folder)
    (folder / REPORT_FILE).write_text(report.model_dump_json(indent=1))
    return report

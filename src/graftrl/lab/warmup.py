"""Supervised warm-up: gives a tiny model the skill of executing programs, and a prior over each family's program.

The loss is the mean negative log-likelihood of response tokens, EOS included. Afterwards a model executes the program
it names almost always, names the right one in about 0.4 of its responses to strong families, and guesses in weak ones.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, Field, field_validator
from torch import Tensor
from torch.nn.functional import cross_entropy

from graftrl.lab.demonstrations import Demonstrator, Phrasing, table_tokenizers
from graftrl.lab.models import LabModel, build_model, build_tokenizer, save_model
from graftrl.lab.programs import (
    LETTERS,
    PROGRAMS,
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
    weak_share: the same of a weak family, for tasks other than hidden programs.
    separator: this model's style of joining the two steps; None: the task's.
    samples: responses per validation prompt for the report.
    phrasings: this model's ways to word a response, instead of the separator: what stands before the first step and
        between both. Every batch is worded in one of them, drawn uniformly.
    slips: share of demonstrations with a wrong digit in the first list, though not in the answer.
    misled: families whose program this model takes for another, such as {"j": "DG"}.
    rare: letters of operations that this model is hardly ever shown; families whose program needs one are weak.
    rare_share: share of demonstrations with such a letter.
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
    phrasings: tuple[tuple[str, str], ...] = ()
    slips: float = Field(default=0.0, ge=0, le=1)
    misled: dict[str, str] = Field(default_factory=dict)
    weak_share: float = Field(default=0.0, ge=0, le=1)
    rare: str = Field(default="", max_length=len(LETTERS) - 2)
    rare_share: float = Field(default=0.01, ge=0, le=1)

    @field_validator("misled")
    @classmethod
    def _known_programs(cls, misled: dict[str, str]) -> dict[str, str]:
        for family, program in misled.items():
            if tuple(program) not in PROGRAMS:
                raise ValueError(f"{family!r} is misled to {program!r}, which is no pair of two of {LETTERS}")
        return misled

    @field_validator("rare")
    @classmethod
    def _known_letters(cls, rare: str) -> str:
        if not set(rare) <= set(LETTERS):
            raise ValueError(f"rare is {rare!r}, and the letters of operations are {LETTERS}")
        return rare

    def specification(self) -> dict[str, Any]:
        """As JSON. The last six fields came later: left out where they are not set, so that folders of models which
        were built before keep their names."""
        later = ("phrasings", "slips", "misled", "weak_share", "rare")
        unset = {name for name in later if not getattr(self, name)}
        return self.model_dump(mode="json", exclude=unset | ({"rare_share"} if "rare" in unset else set()))


WARMUPS: dict[str, WarmupSettings] = {
    "A": WarmupSettings(),
    "B": WarmupSettings(steps=800, strong_offset=1),
    "C": WarmupSettings(steps=1000, strong_period=3, strong_offset=2),
    "S": WarmupSettings(learning_rate=6e-3),
    "M": WarmupSettings(learning_rate=5e-3),
    "P": WarmupSettings(steps=1000, learning_rate=6e-3, strong_offset=1),
    "D": WarmupSettings(steps=400, learning_rate=3e-3),
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

    @field_validator("strong", "weak", mode="before")
    @classmethod
    def _null_is_nan(cls, value: float | None) -> float:
        return float("nan") if value is None else value  # JSON has no nan

    @classmethod
    def read(cls, folder: Path) -> WarmupReport:
        return cls.model_validate_json((folder / REPORT_FILE).read_text())


def schedule(step: int, settings: WarmupSettings) -> float:
    """The factor on the learning rate at `step` (from 0): a linear rise, then a cosine to 0."""
    if step < settings.linear_steps:
        return (step + 1) / settings.linear_steps
    rest = max(1, settings.steps - settings.linear_steps)
    return 0.5 * (1 + float(np.cos(np.pi * (step - settings.linear_steps) / rest)))


def train_supervised(
    network: Any,
    draw: Callable[[], tuple[Tensor, Tensor]],
    settings: WarmupSettings,
    progress: Callable[[int, float], None],
) -> list[float]:
    """`draw` gives input ids `[batch, N]` and what follows the last K of them, `[batch, K]`, -100 where that does not
    count. Returns the loss of every step."""
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
        ids, targets = draw()
        logits = network(input_ids=ids, logits_to_keep=targets.shape[1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), settings.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        progress(step, losses[-1])
    network.eval()
    return losses


def tell_progress(
    name: str, settings: WarmupSettings, progress: Callable[[str], None] | None
) -> Callable[[int, float], None]:
    """A line every 100 steps and at the end."""

    def tell(step: int, loss: float) -> None:
        if progress is not None and ((step + 1) % 100 == 0 or step + 1 == settings.steps):
            progress(f"warm-up of {name}: step {step + 1}/{settings.steps}, loss {loss:.3f} nats per token")

    return tell


def executes_named_program(response: str, digits: str, separator: str, opening: str = "") -> bool:
    """Whether `response` names two operations and is exactly their execution on `digits` (`d,d,...,d`)."""
    step = rf"([{LETTERS}]):[\d,]*"
    named = re.fullmatch(f"{re.escape(opening)}{step}{re.escape(separator)}{step}", response)
    if named is None:
        return False
    values = np.array([int(digit) for digit in digits.split(",")])
    return response == write_demonstration((named[1], named[2]), values, separator, opening)


def measure(
    network: Any,
    tokenizer: Any,
    config: HiddenProgramsConfig,
    phrasings: Sequence[Phrasing],
    samples: int,
    seed: int,
) -> tuple[dict[str, float], float]:
    """pass@1 by family and the share of responses that execute the program they name."""
    task = build_hidden_programs(config)
    prompts = [prompt.text for prompt in task.validation]
    ids = torch.tensor(tokenizer(prompts, add_special_tokens=False)["input_ids"])
    longest = max(table_tokenizers(tokenizer, config, joiner, opening)[1].length for opening, joiner in phrasings)
    eos = tokenizer.eos_token_id
    generator = torch.Generator().manual_seed(seed)
    # As in reinforcement learning runs, a third more than a response needs.
    sampled = sample_fixed_length(network, ids, samples, longest * 4 // 3 + 1, eos, generator)
    ended = (sampled == eos).any(1).tolist()
    texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    rewards: dict[str, list[float]] = {letter: [] for letter in config.family_letters}
    executed = 0
    for i, (text, stop) in enumerate(zip(texts, ended, strict=True)):
        prompt = task.validation[i // samples]
        rewards[prompt.metadata["family"]].append(task.verifier(prompt, text, "stop" if stop else "length").reward)
        executed += stop and any(
            executes_named_program(text, prompt.text[1:-1], joiner, opening) for opening, joiner in phrasings
        )
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
    phrasings = settings.phrasings or (("", separator),)
    tokenizer = build_tokenizer(model)
    tables = [table_tokenizers(tokenizer, config, joiner, opening) for opening, joiner in phrasings]
    strong = np.arange(config.families) % settings.strong_period == settings.strong_offset
    demonstrator = Demonstrator(
        config, strong, settings.strong_share, separator, settings.misled, settings.slips, settings.rare,
        settings.rare_share,
    )  # fmt: skip
    generator = np.random.default_rng(seed)
    eos = np.full((settings.batch_size, 1), tokenizer.eos_token_id)

    def draw() -> tuple[Tensor, Tensor]:
        which = int(generator.integers(len(phrasings))) if len(phrasings) > 1 else 0
        prompt_table, response_table = tables[which]
        prompts, responses = demonstrator.draw(settings.batch_size, generator, phrasings[which])
        ids = torch.from_numpy(np.concatenate([prompt_table(prompts), response_table(responses), eos], axis=1))
        return ids[:, :-1], ids[:, prompt_table.length :]

    tell = tell_progress(model.name, settings, progress)
    network = build_model(model, seed)
    start = time.process_time()
    losses = train_supervised(network, draw, settings, tell)
    cpu_seconds = time.process_time() - start
    pass_at_1, execution = measure(network, tokenizer, config, phrasings, settings.samples, seed)
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

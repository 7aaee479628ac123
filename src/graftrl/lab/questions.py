"""Warm-up on questions of reasoning-gym: as for hidden programs, but what is learnt in part are facts.

A family is a data set of the task. A share of a strong family's demonstrations answers rightly, and a smaller one of a
weak family's; all others give the answer to another question of the family. Demonstrations may ask what the validation
asks, as a pretrained model's texts may: reinforcement learning, which never does, has to make known answers likely.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from graftrl.lab.models import LabModel, build_model, build_tokenizer, save_model
from graftrl.lab.warmup import REPORT_FILE, WarmupReport, WarmupSettings, tell_progress, train_supervised
from graftrl.policies.config import ModelSettings, SamplingSettings
from graftrl.policies.hf import HFPolicy
from graftrl.rollout import Prompt
from graftrl.tasks import VerificationPool, grade_groups
from graftrl.tasks.config import ReasoningGymConfig
from graftrl.tasks.gym import build_reasoning_gym

DEMONSTRATED = 24_000  # questions that demonstrations are made of
MEASURED = 240  # validation questions of the report
_IGNORED = -100  # a target that does not count


def warm_up_on_questions(
    model: LabModel,
    config: ReasoningGymConfig,
    seed: int,
    folder: Path,
    settings: WarmupSettings,
    *,
    fingerprint: str = "",
    progress: Callable[[str], None] | None = None,
) -> WarmupReport:
    """As `warmup.warm_up`; in the report, execution is the share of responses that end.

    Raises ConfigError or DataError if the task cannot be built.
    """
    tokenizer = build_tokenizer(model)
    families = [dataset.name for dataset in config.datasets]
    strong = [i % settings.strong_period == settings.strong_offset for i in range(len(families))]
    share = np.where(strong, settings.strong_share, settings.weak_share)
    prompts, answers = _questions(config, families)
    generator = np.random.default_rng(seed)

    def draw() -> tuple[Tensor, Tensor]:
        rows = []
        for family in generator.integers(len(families), size=settings.batch_size):
            right = int(generator.integers(len(prompts[family])))
            shown = right if generator.random() < share[family] else int(generator.integers(len(answers[family])))
            rows.append((prompts[family][right], answers[family][shown]))
        return _pad([tokenizer(p)["input_ids"] for p, _ in rows], [tokenizer(a)["input_ids"] for _, a in rows],
                    tokenizer.eos_token_id)  # fmt: skip

    network = build_model(model, seed)
    start = time.process_time()
    losses = train_supervised(network, draw, settings, tell_progress(model.name, settings, progress))
    cpu_seconds = time.process_time() - start
    save_model(network, model, folder)
    rates, ended = _measure(folder, config, settings.samples, seed)
    of_family = np.array([rates[family] for family in families])
    report = WarmupReport(
        model=model.name,
        fingerprint=fingerprint,
        losses=[round(loss, 5) for loss in losses],
        pass_at_1=rates,
        strong=float(of_family[strong].mean()),
        weak=float(of_family[~np.array(strong)].mean()) if not all(strong) else float("nan"),
        execution=ended,
        cpu_seconds=cpu_seconds,
    )
    (folder / REPORT_FILE).write_text(report.model_dump_json(indent=1))
    return report


def _questions(config: ReasoningGymConfig, families: list[str]) -> tuple[list[list[str]], list[list[str]]]:
    """Prompts and right answers by family."""
    more = config.model_copy(update={"seed": config.seed + 1, "train_size": DEMONSTRATED, "validation_size": 0})
    shown: dict[str, list[Prompt]] = {family: [] for family in families}
    for prompt in build_reasoning_gym(more).train:
        shown[prompt.metadata["dataset"]].append(prompt)
    return [[p.text for p in of] for of in shown.values()], [[p.reference for p in of] for of in shown.values()]


def _pad(prompts: list[list[int]], answers: list[list[int]], eos: int) -> tuple[Tensor, Tensor]:
    """Inputs and what follows each of them, padded on the right; only answers and their EOS count."""
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(prompts), longest), eos)
    targets = torch.full((len(prompts), longest), _IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        whole = torch.tensor([*prompt, *answer, eos])
        ids[row, : len(whole) - 1] = whole[:-1]
        targets[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
    return ids, targets


def _measure(folder: Path, config: ReasoningGymConfig, samples: int, seed: int) -> tuple[dict[str, float], float]:
    """pass@1 by family, and the share of responses that end, sampled by the ordinary policy."""
    task = build_reasoning_gym(config)
    limits = SamplingSettings(max_prompt_tokens=112, max_response_tokens=16)
    policy = HFPolicy(folder.name, ModelSettings(path=str(folder)), limits)
    groups = policy.sample(list(task.validation)[:MEASURED], samples, seed)
    with VerificationPool(1, 5.0) as pool:
        grade_groups(task, groups, pool)
    rates: dict[str, list[float]] = {dataset.name: [] for dataset in config.datasets}
    for group in groups:
        rates[group.prompt.metadata["dataset"]].append(group.successes / group.size)
    ended = [response.finish_reason == "stop" for group in groups for response in group.responses]
    return {family: float(np.mean(of)) for family, of in rates.items()}, float(np.mean(ended))

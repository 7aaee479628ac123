"""What a finished run's last weights can do, beyond the score of its validation: several responses to test prompts.

Kept in `measures.json` in the folder of the run, which is not touched: a run that is measured later, or never, is the
same run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from transformers.utils import logging as transformers_logging

from graftrl.config import Recipe
from graftrl.errors import GraftrlError, RunError
from graftrl.evaluation import pass_at_k
from graftrl.lab.plan import SELECTION_PROMPTS, VALIDATION_PROMPTS
from graftrl.methods import build_method
from graftrl.rollout import Group
from graftrl.seeds import derive_seed
from graftrl.training.run_folder import RunFolder

FILE = "measures.json"
SAMPLES = 8  # responses a prompt, at temperature 1
MOST_PROMPTS = 480  # of the test prompts, the first ones
MEASURE_S = 1.5  # processor seconds of one model
_VERSION = 1


@dataclass(frozen=True)
class Measures:
    """Of one model after the run's last step.

    pass1, pass8: unbiased estimates from `SAMPLES` responses a prompt.
    entropy: of the distribution of responses, in nats per response (mean of minus the log-probability of a response).
    families: pass@1 by family of prompts. start: the same before training, as its warm-up measured it.
    """

    pass1: float
    pass8: float
    entropy: float
    families: Mapping[str, float]
    start: Mapping[str, float]

    @property
    def strong(self) -> list[str]:
        """Families in which the model started well: at least half as well as in its best one."""
        best = max(self.start.values(), default=0.0)
        return [family for family, rate in self.start.items() if best > 0 and rate >= best / 2]

    @property
    def forgotten(self) -> float:
        """Mean over the strong families of what was lost there; a gain in one does not make up for a loss in another.
        0 where a model started well nowhere."""
        lost = [max(0.0, self.start[family] - self.families.get(family, 0.0)) for family in self.strong]
        return float(np.mean(lost)) if lost else 0.0

    @property
    def strong_before(self) -> float | None:
        """pass@1 over the strong families before training; None without any."""
        return float(np.mean([self.start[family] for family in self.strong])) if self.strong else None

    def mean(self, strong: bool) -> float | None:
        """pass@1 over the strong families, or over the others; None without any."""
        chosen = [rate for family, rate in self.families.items() if (family in self.strong) == strong]
        return float(np.mean(chosen)) if chosen else None


def family_of(metadata: Mapping[str, object]) -> str:
    """What a prompt's metadata call its family."""
    return str(metadata.get("family", metadata.get("dataset", "all")))


def measured_prompts(total: int) -> slice:
    """Those of the validation prompts that select no checkpoint, `MOST_PROMPTS` at most."""
    first = total * SELECTION_PROMPTS // VALIDATION_PROMPTS
    return slice(first, min(total, first + MOST_PROMPTS))


def summarize(groups: Sequence[Group], start: Mapping[str, float]) -> Measures:
    """Args:
    groups: graded, one per prompt.
    start: pass@1 by family before training.
    """
    rates: dict[str, list[float]] = {}
    for group in groups:
        rates.setdefault(family_of(group.prompt.metadata), []).append(group.successes / group.size)
    entropies = [-float(r.logprobs.sum(dtype=np.float64)) for group in groups for r in group.responses]
    return Measures(
        pass1=float(np.mean([group.successes / group.size for group in groups])),
        pass8=float(np.mean([pass_at_k(group.size, group.successes, SAMPLES) for group in groups])),
        entropy=float(np.mean(entropies)),
        families={family: float(np.mean(of)) for family, of in sorted(rates.items())},
        start=dict(start),
    )


def measure(folder: Path) -> dict[str, Measures]:
    """Sample from the last checkpoint of a finished run, grade, and write `measures.json`.

    Raises RunError without a checkpoint of the last step.
    """
    from graftrl.engines.local import LocalEngine
    from graftrl.tasks import VerificationPool, build_task, grade_groups

    run = RunFolder.open(folder)
    recipe = run.recipe()
    checkpoint = run.latest_checkpoint()
    if checkpoint is None or checkpoint != run.checkpoint(recipe.training.steps or 0):
        raise RunError(f"{folder}: no checkpoint of the last step to measure; remove the folder to run it again")
    task = build_task(recipe.task)
    engine = LocalEngine(_sampling_alone(recipe), checkpoint)
    validation = list(task.validation)[: recipe.evaluation.prompts]
    prompts = validation[measured_prompts(len(validation))]
    seeds = {model: derive_seed(recipe.seed, "measure", model) for model in recipe.models}
    sampled = engine.sample(dict.fromkeys(recipe.models, prompts), SAMPLES, seeds)
    with VerificationPool(1, recipe.verification.limit_s) as pool:
        grade_groups(task, [group for of_model in sampled.values() for group in of_model], pool)
    found = {model: summarize(groups, _start(Path(recipe.models[model].path))) for model, groups in sampled.items()}
    run.write_json(folder / FILE, {"version": _VERSION, "models": {m: asdict(of) for m, of in found.items()}})
    return found


def _sampling_alone(recipe: Recipe) -> Recipe:
    """Without what only training needs."""
    return recipe.model_copy(update={"method": build_method("grpo").settings, "scorers": {}, "peers": {}})


def _start(model: Path) -> dict[str, float]:
    """pass@1 by family, from the report beside a warmed-up model; empty for any other."""
    report = model / "warmup.json"
    if not report.is_file():
        return {}
    return {str(family): float(rate) for family, rate in json.loads(report.read_text())["pass_at_1"].items()}


def read_measures(folder: Path) -> dict[str, Measures] | None:
    """By model; None where the run was not measured, or by another version of this module."""
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if content["version"] != _VERSION:
        return None
    return {model: Measures(**of_model) for model, of_model in content["models"].items()}


def measure_missing(folders: Sequence[Path], workers: int, console: Console) -> None:
    """Measure finished runs that have not been, `workers` at a time with one thread each; a few seconds a run. One that
    cannot be measured is told and left out."""
    todo = [folder for folder in folders if read_measures(folder) is None]
    if not todo:
        return
    console.print(f"measuring {len(todo)} finished runs ({SAMPLES} responses a test prompt)", highlight=False)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(todo)), context, transformers_logging.disable_progress_bar) as pool:
        for done, future in enumerate([pool.submit(measure, folder) for folder in todo], 1):
            try:
                future.result()
            except GraftrlError as error:
                console.print(str(error), highlight=False, style="yellow", soft_wrap=True)
            if done % 20 == 0 or done == len(todo):
                console.print(f"measured {done} of {len(todo)}", highlight=False)

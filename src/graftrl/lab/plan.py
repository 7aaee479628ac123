"""From studies to runs: which runs a table needs, where they lie, and how long they should take."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from graftrl.config import Recipe, load_recipe
from graftrl.errors import ConfigError
from graftrl.lab.cache import CACHE
from graftrl.lab.jobs import Job, finished_steps
from graftrl.lab.pairs import PAIRS, REGIMES, TRANSFERS, Pair, Transfer
from graftrl.lab.programs import HiddenProgramsConfig
from graftrl.lab.studies import BASELINE, Study, calibrated, lab_method
from graftrl.report.data import Run, read_runs
from graftrl.training.run_folder import RunFolder

# Validation prompts are evaluated every few steps. The first ones select a checkpoint; the rest test it.
VALIDATION_PROMPTS = 960
SELECTION_PROMPTS = 240
EVALUATE_EVERY = 5
_BASE = (
    f"task.validation_size={VALIDATION_PROMPTS}",
    f"evaluation.prompts={VALIDATION_PROMPTS}",
    "evaluation.samples=1",
    f"evaluation.every={EVALUATE_EVERY}",
    "checkpoint.every=10",
    "checkpoint.keep=1",
)


@dataclass(frozen=True)
class RunKey:
    """What tells one run of the laboratory from another, besides its number of steps.

    source: the run of the stored peer or of the proxy, which this one reads. start: the run at whose end this one's
        model starts.
    """

    regime: str
    models: tuple[str, ...]
    method: str
    seed: int
    source: RunKey | None = None
    start: RunKey | None = None

    @property
    def who(self) -> str:
        """Models, whether they were trained before, and whom they read."""
        models = "-".join(self.models) + ("_trained" if self.start else "")
        return models + (f"-from-{self.source.who}" if self.source else "")

    @property
    def needs(self) -> list[RunKey]:
        return [key for key in (self.source, self.start) if key is not None]

    @property
    def name(self) -> str:
        regime = "" if self.regime == "base" else f" {self.regime}"
        return f"{self.who}{regime} {self.method} seed {self.seed}"


@dataclass(frozen=True)
class Cell:
    """One method on one pair or transfer with one seed: an entry of a table. runs: one for all models, or one each."""

    pair: Pair | Transfer
    method: str
    seed: int
    runs: tuple[RunKey, ...]

    @property
    def name(self) -> str:
        return f"{self.pair.name} {self.method} seed {self.seed}"


def cell_of(pair: Pair | Transfer, method: str, seed: int) -> Cell:
    trains = lab_method(method).trains
    if isinstance(pair, Transfer):
        start = RunKey(pair.regime, pair.models, BASELINE, seed) if pair.trained else None
        source = _proxy_run(pair, seed) if trains == "transfer" else None
        return Cell(pair, method, seed, (RunKey(pair.regime, pair.models, method, seed, source, start),))
    regime = REGIMES[pair.regime]
    trained = f"{method}-stored" if regime.stored and trains == "pair" else method
    if lab_method(trained).trains == "pair":
        return Cell(pair, method, seed, (RunKey(regime.runs_in, pair.models, method, seed),))
    alone = {m: RunKey(regime.runs_in, (m,), BASELINE, seed) for m in pair.models}
    stored = lab_method(trained).trains == "stored"
    keys = [
        RunKey(regime.runs_in, (m,), trained, seed, alone[pair.peer_of(m)] if stored else None) for m in pair.models
    ]
    return Cell(pair, method, seed, tuple(keys))


def _proxy_run(transfer: Transfer, seed: int) -> RunKey:
    """The run whose change the target takes over."""
    first, *others = transfer.proxies
    run = RunKey(transfer.regime, (first,), BASELINE, seed)
    for model in others:
        run = RunKey(transfer.regime, (model,), calibrated(1.0), seed, run)
    return run


def cells_of(study: Study, pairs: Sequence[Pair | Transfer], seeds: int | None = None) -> list[Cell]:
    """Seeds in the outer loop, of the study or of each of its grids, so that one that is interrupted is balanced.

    seeds: how many; by default the study's.
    """
    seeds = seeds or study.seeds
    if not study.grids:
        return [cell_of(pair, method, seed) for seed in range(seeds) for pair in pairs for method in study.methods]
    named = {pair.name: pair for pair in pairs}
    cells = [
        cell_of(named[grid.transfer], method, seed)
        for grid in study.grids
        if grid.transfer in named
        for seed in range(min(seeds, grid.seeds))
        for method in grid.methods
    ]
    return list(dict.fromkeys(cells))


def pairs_of(study: Study, names: Iterable[str] = ()) -> list[Pair | Transfer]:
    """The study's pairs or transfers, or those named. Raises ConfigError for one that `graftrl.lab.pairs` does not
    define, or not for this kind of study."""
    known: Mapping[str, Pair | Transfer] = TRANSFERS if study.grids else PAIRS
    kind = "transfer" if study.grids else "pair"
    found = []
    for name in list(names) or study.pairs:
        if name not in known:
            raise ConfigError(f"unknown laboratory {kind} {name!r}; there are {', '.join(known)}")
        found.append(known[name])
    return found


@dataclass(frozen=True)
class Laboratory:
    """A recipe and a folder of runs. steps: instead of the recipe's, for reduced runs, which lie in a folder apart.

    Raises ConfigError if the recipe is not about the laboratory's task.
    """

    recipe_path: Path
    root: Path
    steps_wanted: int | None = None

    @cached_property
    def recipe(self) -> Recipe:
        recipe = load_recipe(self.recipe_path)
        if not isinstance(recipe.task, HiddenProgramsConfig):
            raise ConfigError(f"{self.recipe_path}: the laboratory needs task.kind hidden_programs")
        if recipe.training.steps is None:
            raise ConfigError(f"{self.recipe_path}: the laboratory needs training.steps rather than training.epochs")
        return recipe

    @property
    def reduced(self) -> bool:
        return self.steps_wanted is not None and self.steps_wanted != self.recipe.training.steps

    @property
    def steps(self) -> int:
        """Of runs whose method and regime do not say otherwise."""
        return self.steps_wanted or self.recipe.training.steps or 0

    def steps_of(self, key: RunKey) -> int:
        return self.steps_wanted or lab_method(key.method).steps or REGIMES[key.regime].steps or self.steps

    @property
    def cache(self) -> Path:
        return self.root.parent / CACHE

    @cached_property
    def _warm_folders(self) -> dict[str, dict[str, Path]]:
        return {name: regime.model_folders(self.cache) for name, regime in REGIMES.items()}

    def model_folder(self, regime: str, model: str) -> Path:
        return self._warm_folders[regime][model]

    @property
    def base(self) -> Path:
        """Where runs of this number of steps lie."""
        return self.root / f"steps-{self.steps}" if self.reduced else self.root

    def folder(self, key: RunKey) -> Path:
        return self.base / key.regime / key.who / f"{key.method}-seed{key.seed}"

    def is_finished(self, key: RunKey) -> bool:
        return finished_steps(self.folder(key)) >= self.steps_of(key)

    def read(self, key: RunKey) -> Run:
        """A run of this laboratory; its label is the method's name here."""
        (run,) = read_runs([self.folder(key)])
        return Run(run.folder, run.config, key.method)

    def job(self, key: RunKey, expected_s: float) -> Job:
        """The recipe's settings, with the laboratory's, the regime's and the method's on top."""
        regime, method = REGIMES[key.regime], lab_method(key.method)
        template = next(iter(self.recipe.models.values())).model_dump(mode="json")
        models = {m: {**template, "path": str(self._start(key, m))} for m in key.models}
        return Job(
            name=key.name,
            recipe=self.recipe_path,
            overrides=(
                f"name=lab-{key.regime}-{key.who}-{key.method}-seed{key.seed}",
                f"seed={key.seed}",
                f"models={json.dumps(models)}",
                *((f"task={json.dumps(dict(regime.task))}",) if regime.other_task else ()),
                *_BASE,
                f"training.steps={self.steps_of(key)}",
                *self._checkpoints(key),
                *(f"task.{name}={json.dumps(value)}" for name, value in regime.task.items() if not regime.other_task),
                *regime.recipe,
                *method.overrides,
                *self._reads(key),
            ),
            folder=self.folder(key),
            after=tuple(self.folder(needed) for needed in key.needs),
            expected_s=expected_s,
        )

    def _start(self, key: RunKey, model: str) -> Path:
        return self.model_folder(key.regime, model) if key.start is None else self._trained(key.start)

    def _trained(self, key: RunKey, quarters: int = 4) -> Path:
        """The model of a run with one, after so many quarters of it."""
        steps = self.steps_of(key)
        step = steps if quarters == 4 else min(steps, quarters * self._interval(key))
        return RunFolder(self.folder(key)).checkpoint(step) / key.models[0]

    def _interval(self, key: RunKey) -> int:
        return max(1, self.steps_of(key) // (REGIMES[key.regime].checkpoints or 1))

    def _checkpoints(self, key: RunKey) -> tuple[str, ...]:
        if REGIMES[key.regime].checkpoints is None:
            return ()
        return (f"checkpoint.every={self._interval(key)}", f"checkpoint.keep={self.steps_of(key)}")

    def _reads(self, key: RunKey) -> tuple[str, ...]:
        """Overrides: the stored peer and the scorers of a run that reads another."""
        if key.source is None:
            return ()
        source, method = key.source, lab_method(key.method)
        name = method.log if method.trains == "transfer" else source.models[0]
        log = {"log": str(self.folder(source))} | ({"model": source.models[0]} if method.log else {})
        places = {
            scorer: self._trained(source, method.quarters) if who == "after"
            else self._start(source, source.models[0]) if who == "before"
            else self.model_folder(key.regime, who)
            for scorer, who in method.scorers
        }  # fmt: skip
        scorers = {scorer: {"path": str(place)} for scorer, place in places.items()}
        return (
            *((f"peers={json.dumps({name: log})}",) if name else ()),
            *((f"scorers={json.dumps(scorers)}",) if scorers else ()),
        )


def runs_of(cells: Iterable[Cell]) -> list[RunKey]:
    """Every run once, in the order of the cells; what a run reads or starts from comes before it."""
    keys: dict[RunKey, None] = {}

    def add(key: RunKey) -> None:
        for needed in key.needs:
            add(needed)
        keys.setdefault(key)

    for cell in cells:
        for key in cell.runs:
            add(key)
    return list(keys)


# Time -----------------------------------------------------------------------------------------------------------------

# Seconds of one step of GRPO with n = 8 for one model, averaged over 60 steps, and of one evaluation; measured as
# processor time of one thread on a two-core cloud machine (AMD EPYC).
STEP_S = {"A": 0.14, "B": 0.14, "C": 0.19, "S": 0.12, "M": 0.13, "P": 0.12, "D": 0.28}
EVALUATION_S = {"A": 0.32, "B": 0.32, "C": 0.40, "S": 0.28, "M": 0.30, "P": 0.28, "D": 0.75}
START_S = 6.0  # of a process: imports, loading
# A method's step over GRPO's.
RELATIVE_STEP = {"grpo-n16": 2.1, "grpo-n32": 4.5, "dapo": 2.8, "hacpo": 3.2}
_OTHER_RELATIVE_STEP = 1.5  # of GRAFT and SGT
_TRANSFER_RELATIVE_STEP = 2.4  # of a method that reads scorers
WARMUP_S = 75.0  # of one model


def _prior_s(key: RunKey, steps: int) -> float:
    other = _TRANSFER_RELATIVE_STEP if lab_method(key.method).trains == "transfer" else _OTHER_RELATIVE_STEP
    relative = 1.0 if key.method == BASELINE else RELATIVE_STEP.get(key.method, other)
    length = float(REGIMES[key.regime].task.get("length", 8)) / 8
    evaluations = 2 + steps // EVALUATE_EVERY
    per_model = [steps * relative * STEP_S[m] + evaluations * EVALUATION_S[m] for m in key.models]
    return START_S + sum(per_model) * (0.4 + 0.6 * length) * REGIMES[key.regime].effort


def expected_seconds(lab: Laboratory, keys: Sequence[RunKey]) -> dict[RunKey, float]:
    """Wall seconds of each run from nothing. Runs of the same kind (regime, models, method) that have finished here
    tell it; for the rest, what was measured elsewhere, scaled by how the finished runs compare with that."""
    measured: dict[tuple[str, str, str], list[float]] = {}
    ratios: list[float] = []
    for key in keys:
        if lab.is_finished(key):
            seconds = _measured_s(lab.read(key))
            measured.setdefault((key.regime, key.who, key.method), []).append(seconds)
            ratios.append(seconds / _prior_s(key, lab.steps_of(key)))
    scale = float(np.median(ratios)) if ratios else 1.0
    return {
        key: float(np.mean(measured[kind])) if (kind := (key.regime, key.who, key.method)) in measured
        else _prior_s(key, lab.steps_of(key)) * scale
        for key in keys
    }  # fmt: skip


def _measured_s(run: Run) -> float:
    """Steps with their evaluations, the evaluation before training, and the start of the process."""
    evaluations = [line["phase_s"]["evaluation"] for line in run.metrics if "evaluation" in line["phase_s"]]
    return START_S + sum(line["step_s"] for line in run.metrics) + (evaluations[0] if evaluations else 0.0)


def missing_models(lab: Laboratory, keys: Iterable[RunKey]) -> dict[str, list[str]]:
    """`{regime: models}` that the runs start from and that are not warmed up yet."""
    found: dict[str, dict[str, None]] = {}
    for key in keys:
        others = [who for _, who in lab_method(key.method).scorers if who not in ("before", "after")]
        for model in (*key.models, *others):
            if not lab.model_folder(key.regime, model).exists():
                found.setdefault(key.regime, {}).setdefault(model)
    return {regime: list(models) for regime, models in found.items()}


def total_seconds(expected: Mapping[RunKey, float], lab: Laboratory, workers: int) -> float:
    """Wall seconds of what is not finished, `workers` runs side by side."""
    left = [
        seconds * (1 - min(1.0, finished_steps(lab.folder(key)) / lab.steps_of(key)))
        for key, seconds in expected.items()
    ]
    return max(sum(left) / workers, max(left, default=0.0))

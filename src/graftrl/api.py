"""graftrl from Python: train a recipe, watch it, and read a run as tables. `graftrl.train` and the others live here."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import polars as pl
from transformers.utils import logging as transformers_logging

from graftrl.config import Recipe, apply_override, load_recipe, parse_recipe, put
from graftrl.errors import DataError
from graftrl.logs.rollouts import ROLLOUT_SCHEMA, TRANSFER_SCHEMA, read_steps
from graftrl.report.data import read_runs
from graftrl.training import loop
from graftrl.training.progress import Display, Silent, Terminal
from graftrl.training.remote import create_run, is_of_tables, open_run, read_run
from graftrl.training.run_folder import RunFolder, TrainingState
from graftrl.training.trackers import flatten
from graftrl.urls import is_url

_EVALUATION_SCHEMA: dict[str, Any] = {
    "step": pl.Int64,
    "model": pl.String,
    "pass_at_1": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "problems": pl.Int64,
    "samples": pl.Int64,
    "response_tokens_mean": pl.Float64,
    "truncated": pl.Float64,
}


class Callback(Protocol):
    """What is called while a run trains. A class of one's own may inherit from it and have only one of the two.

    Both are called when the step's files and metrics are written, so an exception ends the run and loses nothing:
    `graftrl.resume` goes on from the last checkpoint.
    """

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """metrics: the step's line of metrics.jsonl."""

    def on_evaluation(self, step: int, results: Mapping[str, Mapping[str, Any]]) -> None:
        """results: per model pass_at_1 with its interval. step: 0 before training."""


def train(
    recipe: Recipe | Mapping[str, Any] | Path | str,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    run: Path | str | None = None,
    display: bool | Display = False,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train the models of a recipe to its last step, as `graftrl train` does.

    Args:
        recipe: the path of a YAML file, its content as a mapping, or a `Recipe`.
        overrides: `{"training.steps": 10}`, or `["training.steps=10"]` as on the command line.
        run: folder or URL (s3://, ...) to write; default runs/<name of the recipe>.
        display: True shows progress as on the command line; or a display of one's own.

    Raises:
        ConfigError, DataError, ModelError: what cannot work, in one line.
        RunError: the folder already holds a run.
    """
    chosen = _recipe(recipe, overrides)
    folder = create_run(Path("runs") / chosen.name if run is None else run, chosen)
    return _train_in(folder, display, callbacks)


def resume(run: Path | str, *, display: bool | Display = False, callbacks: Sequence[Callback] = ()) -> Run:
    """Continue an interrupted run from its last whole checkpoint."""
    return _train_in(open_run(run), display, callbacks)


class Run:
    """A run folder as tables (Polars). It may be read while the run trains; of a URL, a copy is made at the start.

    Raises:
        RunError: not a run folder.
    """

    def __init__(self, path: Path | str) -> None:
        self._folder = read_run(str(path), is_of_tables) if is_url(path) else RunFolder.open(Path(path))
        self.path = self._folder.root

    def __repr__(self) -> str:
        last = self.last_step
        return f"graftrl.Run({str(self.path)!r}): {self.config.method.name} on {', '.join(self.models)}, step {last}"

    @property
    def config(self) -> Recipe:
        """The complete recipe of the run."""
        return self._folder.recipe()

    @property
    def models(self) -> list[str]:
        return list(self.config.models)

    @property
    def last_step(self) -> int:
        """Finished steps."""
        lines = self._folder.read_metrics()
        return int(lines[-1]["step"]) if lines else 0

    @property
    def metrics(self) -> pl.DataFrame:
        """One row a step, one column a number: `step`, `models/A/reward_mean`, `exchange/B->A/admitted`, ...

        docs/metrics.md explains them. Null where a step has no such number.
        """
        rows = [dict(flatten(line)) for line in self._folder.read_metrics()]
        if not rows:
            return pl.DataFrame(schema={"step": pl.Int64})
        return pl.DataFrame(rows, infer_schema_length=None).with_columns(pl.col("step").cast(pl.Int64))

    def rollouts(self, step: int) -> pl.DataFrame:
        """Every response of that step, with prompt, text, token ids, log-probabilities and reward.

        Raises:
            DataError: the run has no such step.
        """
        file = self._folder.step_file("rollouts", step)
        if not file.exists():
            raise DataError(f"{self.path}: has no rollouts of step {step}; it has finished {self.last_step} steps")
        return pl.read_parquet(file)

    @property
    def all_rollouts(self) -> pl.LazyFrame:
        """The responses of all steps, read when the query on them is collected."""
        return self._all("rollouts", ROLLOUT_SCHEMA)

    @property
    def exchange(self) -> pl.DataFrame:
        """What became of every peer response: one row a transferred response; none where nothing was transferred."""
        return self._all("exchange", TRANSFER_SCHEMA).collect()

    @property
    def evaluations(self) -> pl.DataFrame:
        """Validation results: one row an evaluated step and model. Step 0 is before training."""
        rows = [
            {"step": step, "model": model, **result}
            for step, evaluation in read_runs([self.path])[0].evaluations.items()
            for model, result in evaluation["results"].items()
        ]
        return pl.DataFrame(rows, schema=_EVALUATION_SCHEMA)

    def checkpoint(self, step: int) -> Path | None:
        """The folder of a step's checkpoint, one subfolder a model; None where it was not kept."""
        folder = self._folder.checkpoint(step)
        if not folder.is_dir():
            return None
        for model in self.models:
            self._folder.fetch(folder / model)
        return folder

    @property
    def last_checkpoint(self) -> Path | None:
        latest = self._folder.latest_checkpoint()
        return None if latest is None else self.checkpoint(int(latest.name.removeprefix("step-")))

    @property
    def best_checkpoint(self) -> Path | None:
        """Of the step with the best validation; None where nothing was validated."""
        best = self._folder.best_step()
        return None if best is None else self.checkpoint(best)

    def _all(self, kind: str, schema: Mapping[str, Any]) -> pl.LazyFrame:
        folder = self.path / kind
        return read_steps(folder) if any(folder.glob("step-*.parquet")) else pl.LazyFrame(schema=schema)


# Pieces ---------------------------------------------------------------------------------------------------------------


def _recipe(recipe: Recipe | Mapping[str, Any] | Path | str, overrides: Mapping[str, Any] | Sequence[str]) -> Recipe:
    if isinstance(recipe, Path | str) and not isinstance(overrides, Mapping):
        return load_recipe(Path(recipe), overrides)
    if isinstance(recipe, Path | str):
        recipe = load_recipe(Path(recipe))
    if isinstance(recipe, Recipe):
        if not overrides:
            return recipe
        recipe = recipe.model_dump(mode="json")
    content = copy.deepcopy(dict(recipe))
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            put(content, key, value)
    else:
        for override in overrides:
            apply_override(content, override)
    return parse_recipe(content, "recipe")


def _train_in(folder: RunFolder, display: bool | Display, callbacks: Sequence[Callback]) -> Run:
    shown: Display = display if not isinstance(display, bool) else Terminal() if display else Silent()
    with _quiet_transformers():
        loop.train(folder, folder.recipe(), _Observed(shown, callbacks))
    return Run(folder.root)


class _Observed:
    """A display, and callbacks behind it."""

    def __init__(self, display: Display, callbacks: Sequence[Callback]) -> None:
        self._display, self._callbacks = display, callbacks

    def start(self, recipe: Recipe, steps: int, state: TrainingState, notes: Sequence[str]) -> None:
        self._display.start(recipe, steps, state, notes)

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._display.step(metrics)
        for callback in self._callbacks:
            callback.on_step(metrics)
            if "evaluation" in metrics:
                callback.on_evaluation(metrics["step"], metrics["evaluation"])

    def evaluated(self, step: int, results: Mapping[str, Mapping[str, Any]]) -> None:
        self._display.evaluated(step, results)
        for callback in self._callbacks:
            callback.on_evaluation(step, results)

    def finish(self, state: TrainingState, steps: int) -> None:
        self._display.finish(state, steps)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bars and warnings of the library among a run's lines; afterwards it is as talkative as before."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()

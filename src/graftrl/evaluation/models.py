"""Which models to evaluate: a hub id, a directory, a GGUF file, or checkpoints of a run.

runs/mine             every model of the run, at its best checkpoint if it was validated, else at its last
runs/mine:A           only model A
runs/mine:A@40        after step 40; @best, @last, and @0 for the model before training
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from graftrl.config import Recipe
from graftrl.errors import ConfigError, ModelError, RunError
from graftrl.names import model_names
from graftrl.policies.config import ModelSettings
from graftrl.training.remote import is_small, read_run
from graftrl.training.run_folder import RunFolder
from graftrl.urls import is_url


@dataclass(frozen=True)
class Subject:
    """A model to evaluate.

    name: in folders and tables. origin: what the user wrote, and for a run which model and step that is.
    adapter: the checkpoint folder of LoRA weights, to be put on `settings.path`.
    step: finished steps of its run; None for a model that is of no run. recipe: of its run.
    note: why this step, where the user left that open. run, model: the run it is of, and its name there.
    """

    name: str
    origin: str
    settings: ModelSettings
    adapter: Path | None = None
    step: int | None = None
    recipe: Recipe | None = None
    note: str | None = None
    run: RunFolder | None = None
    model: str | None = None

    @property
    def files_at(self) -> str:
        """Where the weights that may change lie."""
        return self.settings.path if self.adapter is None else str(self.adapter)


def find_models(arguments: Sequence[str], options: dict[str, Any]) -> list[Subject]:
    """The models of the command line, in its order.

    Args:
        options: of `ModelSettings`, over what a run's recipe says.

    Raises:
        ConfigError: no model, or an option that does not work.
        ModelError: a folder that is neither a model nor a run.
        RunError: a run without a checkpoint, or without the model or step that is asked for.
    """
    if not arguments:
        raise ConfigError("name a model to evaluate: a hub id, a directory, a .gguf file or a run folder")
    found: list[Subject] = []
    for argument in arguments:
        run, model, step = _split(argument)
        if run is None:
            found.append(Subject(argument, argument, _settings(argument, options)))
        else:
            found += _of_run(run, model, step, options)
    names = model_names([subject.name for subject in found])
    return [replace(subject, name=name) for name, subject in zip(names, found, strict=True)]


def _split(argument: str) -> tuple[RunFolder | None, str | None, str | None]:
    """Run folder, model and step of `RUN:MODEL@STEP`; no run for anything that is a model by itself."""
    if is_url(argument):
        return _split_url(argument)
    whole = Path(argument).expanduser()
    if _is_run(whole):
        return RunFolder(whole), None, None
    if whole.exists():
        if whole.is_dir() and not (whole / "config.json").exists():
            raise ModelError(f"{argument}: neither a model (no config.json) nor a run folder (no config.yaml)")
        return None, None, None
    before, at, step = argument.rpartition("@")
    place, colon, model = (before if at else argument).rpartition(":")
    if not at and not colon:
        return None, None, None
    folder = Path(place if colon else before).expanduser()
    if not _is_run(folder):
        raise RunError(f"{argument}: {folder} is no run folder (it has no config.yaml)")
    return RunFolder(folder), model if colon else None, step if at else None


def _split_url(argument: str) -> tuple[RunFolder, str | None, str | None]:
    parent, _, last = argument.rpartition("/")
    before, at, step = last.partition("@")
    name, colon, model = before.partition(":")
    return read_run(f"{parent}/{name}", is_small), model if colon else None, step if at else None


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and not (folder / "config.json").exists()


def _settings(path: str, options: dict[str, Any]) -> ModelSettings:
    try:
        return ModelSettings(path=path, **options)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"--{'-'.join(map(str, problem['loc']))}: {problem['msg']}") from error


def _of_run(run: RunFolder, model: str | None, step: str | None, options: dict[str, Any]) -> list[Subject]:
    recipe = run.recipe()
    if model is not None and model not in recipe.models:
        raise RunError(f"{run.root} has no model {model!r}; it trained {', '.join(recipe.models)}")
    number, folder = _checkpoint(run, step)
    note = None
    if step is None:
        why = "the newest, for nothing was validated" if run.best_step() is None else "the best in validation"
        note = f"{run.place}: step {number}, {why}"
    names = [model] if model is not None else list(recipe.models)
    return [replace(_trained(run, recipe, name, number, folder, options), note=note) for name in names]


def _checkpoint(run: RunFolder, step: str | None) -> tuple[int, Path | None]:
    """The step and its folder; no folder before training. Unless told otherwise the best, else the last."""
    if step == "0":
        return 0, None
    steps = run.checkpoint_steps()
    if not steps:
        raise RunError(f"{run.root} has no checkpoint yet; '@0' evaluates its models as they were before training")
    if step in (None, "best"):
        best = run.best_step()
        if best is None and step == "best":
            raise RunError(f"{run.root} was not validated, so that no checkpoint is its best; '@last' takes the newest")
        number = steps[-1] if best is None else best
    elif step == "last":
        number = steps[-1]
    elif step is not None and step.isdecimal():
        number = int(step)
    else:
        raise RunError(f"{run.root}@{step}: write a step, 'best' or 'last' after '@'")
    if number not in steps:
        raise RunError(f"{run.root} has no checkpoint of step {number}; it has {', '.join(map(str, steps))}")
    return number, run.checkpoint(number)


def _trained(
    run: RunFolder, recipe: Recipe, model: str, step: int, checkpoint: Path | None, options: dict[str, Any]
) -> Subject:
    settings = recipe.models[model]
    changes: dict[str, Any] = {"gradient_checkpointing": False, **options}
    path, adapter = settings.path, None
    if checkpoint is None:
        changes["lora"] = None
    else:
        folder = run.fetch(checkpoint / model)
        if settings.lora is not None:
            adapter = folder
        else:
            path = str(folder)
        if settings.bos == "auto":  # as it was decided before training
            changes["bos"] = "add" if json.loads((folder / "policy.json").read_text())["prepend_bos"] else "keep"
    named = f"{run.root.resolve().name}-{model}-step{step}"
    origin = f"{run.place}:{model}@{step}"
    changed = _settings(path, {**settings.model_dump(exclude={"path"}), **changes})
    return Subject(named, origin, changed, adapter, step, recipe, run=run, model=model)

"""Warmed-up models on disk, built once: one folder for each combination of everything that determines its contents."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from pydantic import ValidationError
from transformers.utils import logging as transformers_logging

from graftrl.errors import RunError
from graftrl.lab.models import LAB_MODELS, LabModel
from graftrl.lab.programs import HiddenProgramsConfig, draw_programs
from graftrl.lab.questions import warm_up_on_questions
from graftrl.lab.warmup import WARMUPS, WarmupReport, WarmupSettings, warm_up
from graftrl.tasks.config import ReasoningGymConfig

SHIPPED = Path(__file__).parent / "warm"  # the default pair, as `ensure_warm_pair(..., shipped=None)` built it

CACHE = "lab-cache"  # the name of the folder of warmed-up models beside folders of runs, which share it

CODE_VERSION = 1  # raised with every change of the laboratory's code that changes weights or reports


LabTask = HiddenProgramsConfig | ReasoningGymConfig


def _specify(model: LabModel, task: LabTask, settings: WarmupSettings, seed: int) -> dict[str, Any]:
    """What determines a warmed-up model, as JSON. Prompts and rewards of reinforcement learning do not, so runs with
    other data seeds share a model; the report is measured on the prompts of data seed 0, graded by the exact rule."""
    if isinstance(task, HiddenProgramsConfig):
        task = task.model_copy(update={"seed": 0, "train_size": 1})
    return {
        "code_version": CODE_VERSION,
        "model": asdict(model),
        "task": task.model_dump(mode="json", exclude={"false_positives"}),
        "settings": settings.specification(),
        "seed": seed,
    }


def _hash(spec: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()


def _is_ready(folder: Path, fingerprint: str) -> bool:
    try:
        return WarmupReport.read(folder).fingerprint == fingerprint and (folder / "model.safetensors").is_file()
    except (OSError, ValidationError):
        return False


def _specify_all(
    task: LabTask | None,
    models: Sequence[LabModel],
    settings: Mapping[str, WarmupSettings] | None,
    seed: int,
) -> dict[str, dict[str, Any]]:
    chosen = {**WARMUPS, **(settings or {})}
    task = task or HiddenProgramsConfig()
    return {model.name: _specify(model, task, chosen.get(model.name, WarmupSettings()), seed) for model in models}


def _folders(cache_folder: Path, specs: Mapping[str, Mapping[str, Any]]) -> dict[str, Path]:
    return {name: cache_folder / f"{name}-{_hash(spec)[:12]}" for name, spec in specs.items()}


def warm_folders(
    cache_folder: Path,
    task: LabTask | None = None,
    models: Sequence[LabModel] = (LAB_MODELS["A"], LAB_MODELS["B"]),
    settings: Mapping[str, WarmupSettings] | None = None,
    seed: int = 0,
) -> dict[str, Path]:
    """Where `ensure_warm_pair` puts these models, whether they are there already or not."""
    return _folders(cache_folder, _specify_all(task, models, settings, seed))


def ensure_warm_pair(
    cache_folder: Path,
    task: LabTask | None = None,
    models: Sequence[LabModel] = (LAB_MODELS["A"], LAB_MODELS["B"]),
    settings: Mapping[str, WarmupSettings] | None = None,
    seed: int = 0,
    shipped: Path | None = SHIPPED,
) -> dict[str, Path]:
    """`{model name: folder}` of warmed-up models, building those that are missing; about a minute for A and B.

    shipped: a folder of models that come with the package; one with the wanted hash is copied instead of built. None
    builds every missing model.

    task: the default task if None. settings: warm-ups by model name, where they differ from the presets.
    A folder is named by the model and the hash of all that determines it, and holds the weights, the tokenizer and the
    report `warmup.json`. It is reused when the report records the same hash. Missing models are built side by side, one
    process of one thread each, with lines of progress on standard error, and take their name only when complete.
    Several callers may share a cache: the second waits for the first.

    Raises ConfigError if the task cannot be built, RunError if a process fails.
    """
    if not isinstance(task, ReasoningGymConfig):
        draw_programs(task or HiddenProgramsConfig())  # refuses an impossible task here, not in a child's traceback
    specs = _specify_all(task, models, settings, seed)
    folders = _folders(cache_folder, specs)
    cache_folder.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_folder / ".lock"):
        for name, spec in specs.items():
            if shipped is not None and not _is_ready(folders[name], _hash(spec)):
                _copy_if_ready(shipped / folders[name].name, folders[name], _hash(spec))
        missing = {name: spec for name, spec in specs.items() if not _is_ready(folders[name], _hash(spec))}
        with tempfile.TemporaryDirectory(dir=cache_folder, prefix=".building-") as building:
            _build_all(missing, Path(building))
            for name in missing:
                if folders[name].exists():
                    shutil.rmtree(folders[name])
                (Path(building) / name).rename(folders[name])
    return folders


def link_names(folders: Mapping[str, Path]) -> None:
    """Give each model a short path beside its folder, `<cache>/A`, which recipes name."""
    for name, folder in folders.items():
        link = folder.parent / name
        if link.is_symlink() or not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(folder.name, target_is_directory=True)


def _copy_if_ready(source: Path, target: Path, fingerprint: str) -> None:
    if _is_ready(source, fingerprint):
        temporary = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(source, temporary)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)


def _build_all(specs: Mapping[str, Mapping[str, Any]], parent: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, spec in specs.items():
            command = [sys.executable, "-m", "graftrl.lab.cache", json.dumps(spec), str(parent / name)]
            processes[name] = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        for name, process in processes.items():
            if process.wait() != 0:
                raise RunError(f"warm-up of {name} failed with exit code {process.returncode}; its messages are above")
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def _build(specification: str, folder: Path) -> None:
    """The child process: warms up one model as `specification` says."""
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    spec = json.loads(specification)
    folder.mkdir()
    model, settings = LabModel(**spec["model"]), WarmupSettings.model_validate(spec["settings"])
    options: dict[str, Any] = {
        "fingerprint": _hash(spec),
        "progress": lambda line: print(line, file=sys.stderr, flush=True),
    }
    if spec["task"]["kind"] == "reasoning_gym":
        questions = ReasoningGymConfig.model_validate(spec["task"])
        warm_up_on_questions(model, questions, spec["seed"], folder, settings, **options)
    else:
        programs = HiddenProgramsConfig.model_validate(spec["task"])
        warm_up(model, programs, spec["seed"], folder, settings, **options)


if __name__ == "__main__":
    _build(sys.argv[1], Path(sys.argv[2]))

"""The machine: versions, devices, threads, memory, disk."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from graftrl import __version__
from graftrl.doctor.findings import Finding

GIB = 1024**3
MACHINE = "machine"
REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "scipy", "polars", "pydantic", "math-verify")
OPTIONAL = (
    "peft",
    "datasets",
    "reasoning-gym",
    "gguf",
    "accelerate",
    "matplotlib",
    "trl",
    "tensorboard",
    "trackio",
    "wandb",
)
_FULL_DISK = 5 * GIB
_CGROUP = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> float:
    """Cores that this process may use: its affinity, and the quota of its container."""
    allowed = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = _CGROUP.read_text().split()
        return allowed if quota == "max" else min(allowed, int(quota) / int(period))
    except (OSError, ValueError):
        return allowed


def describe(folder: Path) -> dict[str, Any]:
    """Versions and sizes, as plain values. folder: whose disk counts."""
    memory = psutil.virtual_memory()
    disk = shutil.disk_usage(_existing(folder))
    return {
        "graftrl": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in (*REQUIRED, *OPTIONAL)},
        "cores": usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "disk": str(folder),
        "disk_free_bytes": disk.free,
        "cuda": torch.version.cuda,
        "gpus": [
            {"name": torch.cuda.get_device_name(i), "memory_bytes": torch.cuda.get_device_properties(i).total_memory}
            for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        ],
    }


def check_machine(facts: dict[str, Any]) -> Iterator[Finding]:
    """facts: from `describe`."""
    missing = [name for name in REQUIRED if facts["packages"][name] is None]
    if missing:
        yield Finding("problem", MACHINE, "packages", f"not installed: {', '.join(missing)}; pip install graftrl")
    yield _threads(facts)
    yield _gpu(facts)
    free, place = facts["disk_free_bytes"], facts["disk"]
    level = "note" if free < _FULL_DISK else "ok"
    yield Finding(level, MACHINE, "disk", f"{free / GIB:.1f} GiB free at {place}")  # type: ignore[arg-type]
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        yield Finding("note", MACHINE, "hub", "HF_HUB_OFFLINE is set: hub ids work only if they are in the cache")


def _threads(facts: dict[str, Any]) -> Finding:
    threads, cores = facts["torch_threads"], facts["cores"]
    if threads > cores:
        return Finding(
            "problem",
            MACHINE,
            "threads",
            f"torch uses {threads} threads on {cores:g} usable cores, which is slower than one each; set threads: "
            f"{max(1, int(cores))} in the recipe or OMP_NUM_THREADS={max(1, int(cores))}",
        )
    return Finding("ok", MACHINE, "threads", f"torch uses {threads} threads on {cores:g} usable cores")


def _gpu(facts: dict[str, Any]) -> Finding:
    if facts["gpus"]:
        names = ", ".join(f"{gpu['name']} ({gpu['memory_bytes'] / GIB:.0f} GiB)" for gpu in facts["gpus"])
        return Finding("ok", MACHINE, "gpu", names)
    if shutil.which("nvidia-smi"):
        why = "this torch was built without CUDA" if facts["cuda"] is None else "torch cannot use it"
        return Finding("note", MACHINE, "gpu", f"there is an NVIDIA driver, but {why}: everything runs on the CPU")
    return Finding("ok", MACHINE, "gpu", "none; everything runs on the CPU")


def check_space(facts: dict[str, Any], checkpoint_bytes: int, kept: int) -> Finding:
    """Whether the checkpoints of a run fit on the disk. kept: at a time, the one being written included."""
    needed, free = checkpoint_bytes * kept, facts["disk_free_bytes"]
    text = (
        f"up to {kept} checkpoints of about {checkpoint_bytes / GIB:.2f} GiB need {needed / GIB:.1f} GiB; "
        f"{free / GIB:.1f} GiB are free at {facts['disk']}"
    )
    if needed > free:
        return Finding("problem", MACHINE, "checkpoints", f"{text}; choose another --run, or lower checkpoint.keep")
    return Finding("ok", MACHINE, "checkpoints", text)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    whole = folder.absolute()
    return next(path for path in (whole, *whole.parents) if path.exists())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

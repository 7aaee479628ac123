"""Metrics for experiment trackers, when a recipe asks for them; `metrics.jsonl` is written in any case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from graftrl.config import Recipe
from graftrl.errors import ConfigError
from graftrl.training.run_folder import RunFolder


class Tracker(Protocol):
    def log(self, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """`models/A/reward_mean` and the like; numbers only."""
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + str(key), float(value)


class _TensorBoard:
    def __init__(self, recipe: Recipe, run: RunFolder) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.root / "tensorboard"))

    def log(self, metrics: Mapping[str, Any]) -> None:
        for name, value in flatten(metrics):
            self.writer.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        self.writer.close()


class _Module:
    """wandb and trackio share one interface: init, log, finish."""

    def __init__(self, module: Any, recipe: Recipe, run: RunFolder) -> None:
        self.module = module
        module.init(project="graftrl", name=run.root.name, config=recipe.model_dump(mode="json"))

    def log(self, metrics: Mapping[str, Any]) -> None:
        self.module.log(dict(flatten(metrics)), step=int(metrics["step"]))

    def close(self) -> None:
        self.module.finish()


class _All:
    def __init__(self, trackers: list[Tracker]) -> None:
        self.trackers = trackers

    def log(self, metrics: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log(metrics)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()


def open_trackers(recipe: Recipe, run: RunFolder) -> Tracker:
    """Raises ConfigError when a tracker's package is missing."""
    opened: list[Tracker] = []
    for name in recipe.trackers:
        try:
            if name == "tensorboard":
                opened.append(_TensorBoard(recipe, run))
            elif name == "wandb":
                import wandb

                opened.append(_Module(wandb, recipe, run))
            else:
                import trackio

                opened.append(_Module(trackio, recipe, run))
        except ImportError as error:
            raise ConfigError(f"trackers: {name} is not installed; pip install 'graftrl[{name}]'") from error
    return _All(opened)

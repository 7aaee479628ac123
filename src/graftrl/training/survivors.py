"""Which models a run still trains, when the engine loses workers.

A model whose workers are lost gets new ones, and all models go back to the last checkpoint. Where the new ones cannot
be had, or are lost too before the next checkpoint, the model itself is lost: the others go on without it, and GRAFT on
one model is GRPO. Its last weights stay in every later checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from graftrl.config import Recipe
from graftrl.engines.base import Engine
from graftrl.errors import ConfigError, RunError, WorkerLost
from graftrl.training.run_folder import RunFolder, TrainingState


class Survivors:
    """recipe: with the models that train. lost: the others, each with the last step that trained it.

    Args:
        recipe: of the run. state: of its last checkpoint. bring_back: train its lost models again, too.

    Raises:
        RunError: there is nothing to bring back.
    """

    def __init__(self, run: RunFolder, recipe: Recipe, state: TrainingState, *, bring_back: bool = False) -> None:
        self._run = run
        self._lost_at: dict[str, int] = {}  # the checkpoint after which a model's workers were last lost
        if bring_back:
            state.lost, state.best_score = self._brought_back(state.lost), None
        self.lost = state.lost
        self.recipe = recipe.without(self.lost)

    def _brought_back(self, lost: Collection[str]) -> dict[str, int]:
        checkpoint = self._run.latest_checkpoint()
        if not lost or checkpoint is None:
            raise RunError(f"{self._run.root}: no model of this run is lost; resume it without --bring-back")
        for name in lost:
            if not (checkpoint / name).is_dir():
                raise RunError(
                    f"{self._run.root}: model {name!r} was lost before its first checkpoint; nothing of it is left"
                )
        return {}

    @property
    def notes(self) -> list[str]:
        """For every step without a lost model."""
        others = list(self.recipe.models)
        on = f"THE RUN GOES ON WITH {', '.join(others)}"
        if len(others) + len(self.recipe.peers) == 1:
            exchanges = self.recipe.build_method().fewest_models > 1
            on = f"{others[0]} GOES ON ALONE" + ": NO EXCHANGE, ONLY ITS OWN RESPONSES, AS IN GRPO" * exchanges
        return [f"MODEL {name} IS LOST SINCE STEP {step}; {on}" for name, step in self.lost.items()]

    def recover(self, engine: Engine, state: TrainingState, error: WorkerLost) -> list[str]:
        """Bring the engine back to the last checkpoint, whose state this is, with every model that can be had.

        Returns:
            what happened.

        Raises:
            WorkerLost: no model is left that could go on, or the recipe wants the run to end.
        """
        anew: set[str] = set()
        notes = engine.news()
        while True:
            fallen = {*(error.models or self.recipe.models)} & self.recipe.models.keys()
            gone = {name for name in fallen if self._lost_at.get(name) == state.step}
            self._lost_at |= dict.fromkeys(fallen, state.step)
            anew = (anew | fallen) - gone
            if gone:
                self._go_on_without(gone, error, state.step)
                notes.append(f"WORKERS LOST FOR GOOD: {error}")
            else:
                notes.append(f"WORKERS LOST, started again from step {state.step}: {error}")
            try:
                engine.restore(self.recipe, self._run.latest_checkpoint(), anew)
            except WorkerLost as again:
                error = again
                continue
            if state.lost != self.lost:  # validation is the mean of other models now, which does not compare
                state.lost, state.best_score = self.lost, None
            return notes

    def _go_on_without(self, gone: Collection[str], error: WorkerLost, step: int) -> None:
        try:
            if self.recipe.ray.lost_peer == "stop":
                raise ConfigError("ray.lost_peer is stop")
            self.recipe = self.recipe.without(gone)
        except ConfigError as end:
            raise WorkerLost(
                f"{error}; {end}; 'graftrl resume {self._run.root}' goes on from step {step}", error.models
            ) from error
        self.lost = self.lost | dict.fromkeys(sorted(gone), step)

    def carry(self, folder: Path) -> None:
        """Put the lost models' last weights into a new checkpoint, where there are any."""
        before = self._run.latest_checkpoint()
        for name in self.lost if before else ():
            assert before is not None
            if (before / name).is_dir():
                shutil.copytree(before / name, folder / name, copy_function=_link)


def _link(source: str, target: str) -> None:
    """The same file under a second name, where the disk can; nobody writes to a checkpoint's files."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)

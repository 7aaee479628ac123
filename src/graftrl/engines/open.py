"""The engine that a recipe names. Only a run on Ray imports what Ray needs."""

from __future__ import annotations

from pathlib import Path

from graftrl.config import Recipe
from graftrl.engines.base import Engine
from graftrl.engines.local import LocalEngine


def open_engine(recipe: Recipe, checkpoint: Path | None = None) -> Engine:
    """Policies of a recipe; from `checkpoint` (a folder with one subfolder a model) when it is given.

    Raises ConfigError or ModelError as the engine does; the ray engine also RunError.
    """
    if recipe.engine == "ray":
        from graftrl.engines.ray.engine import RayEngine

        return RayEngine(recipe, checkpoint)
    return LocalEngine(recipe, checkpoint)

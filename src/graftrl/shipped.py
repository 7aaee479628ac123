"""The recipes that come with graftrl: the folder `recipes` of a checkout, or its copy in an installed package."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent
_PLACES = (_PACKAGE, _PACKAGE.parents[1])  # pyproject.toml puts `recipes` into the first for a wheel


def find_recipe(path: Path) -> Path:
    """The path itself, or what graftrl brings under it: `recipes/quickstart.yaml` works in any folder."""
    if path.is_absolute() or path.parts[:1] != ("recipes",) or path.exists():
        return path
    return next((place / path for place in _PLACES if (place / path).is_file()), path)

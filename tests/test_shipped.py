"""The recipes that come with graftrl are found in any folder, from a checkout and from a wheel."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from graftrl import shipped
from graftrl.config import load_recipe
from graftrl.errors import ConfigError
from graftrl.shipped import find_recipe

ROOT = Path(__file__).parents[1]
QUICKSTART = Path("recipes/quickstart.yaml")


def test_a_recipe_is_found_where_there_is_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe(QUICKSTART) == ROOT / QUICKSTART
    assert load_recipe(QUICKSTART, ["seed=3"]).seed == 3
    assert load_recipe(Path("recipes/paper/smollm3-qwen3.yaml")).models
    with pytest.raises(ConfigError, match=r"^recipes/nothing\.yaml: no such recipe$"):
        load_recipe(Path("recipes/nothing.yaml"))


def test_a_file_of_ones_own_comes_first_and_other_paths_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("quickstart.yaml", "other/recipes/quickstart.yaml", tmp_path / QUICKSTART, "../recipes/stored.yaml"):
        assert find_recipe(Path(path)) == Path(path)
    QUICKSTART.parent.mkdir()
    QUICKSTART.write_text("own: 1\n")
    assert find_recipe(QUICKSTART) == QUICKSTART


def test_a_wheel_has_them_inside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert build["force-include"] == {"recipes": "graftrl/recipes"}
    installed = tmp_path / "site-packages" / "graftrl"
    (installed / "recipes").mkdir(parents=True)
    (installed / QUICKSTART).write_text((ROOT / QUICKSTART).read_text())
    monkeypatch.setattr(shipped, "_PLACES", (installed, installed.parents[1]))
    monkeypatch.chdir(tmp_path)
    assert find_recipe(QUICKSTART) == installed / QUICKSTART

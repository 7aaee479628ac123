"""The pages in docs/methods name every method, preset and option, with the defaults that the code has."""

from pathlib import Path

import pytest

from graftrl.methods import METHODS, PRESETS
from graftrl.methods.distillation import DistillationSettings
from graftrl.methods.grpo import ClipSettings, GRPOSettings

PAGES = Path(__file__).parents[2] / "docs" / "methods"
SHARED = {
    "grpo": (ClipSettings, {*GRPOSettings.model_fields}),
    "opd": (DistillationSettings, {*DistillationSettings.model_fields}),
}
ON_GRAFTS_PAGE = {name for name in [*METHODS, *PRESETS] if name.startswith("graft")}
IN_THE_INDEX = {*METHODS, "dapo"} - ON_GRAFTS_PAGE


def page_of(name):
    return (PAGES / ("graft.md" if name in ON_GRAFTS_PAGE else f"{name}.md")).read_text()


@pytest.mark.parametrize("name", [*METHODS, *PRESETS])
def test_every_name_is_on_a_page_and_in_the_index(name):
    page = page_of(name if name in METHODS else PRESETS[name]["name"])
    assert f"`{name}`" in page or f"`method: {name}`" in page
    assert name not in IN_THE_INDEX or f"`{name}`" in (PAGES / "index.md").read_text()


def options_in(page):
    """option -> what stands in the column of its default."""
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            names = [part.strip("` ") for part in cells[0].split(",")]
            values = [part.strip("` ") for part in cells[1].split(",")]
            found |= dict(zip(names, values, strict=len(values) > 1))
    return found


def written(value):
    if value is None:
        return "none"
    if isinstance(value, list):
        return "` and `".join(value)
    return str(value).lower() if isinstance(value, bool) else value if isinstance(value, str) else float(value)


@pytest.mark.parametrize("name", [n for n in METHODS if n not in ON_GRAFTS_PAGE or n == "graft"])
def test_every_option_is_listed_with_its_default(name):
    listed, fields = options_in(page_of(name)), METHODS[name].settings_type.model_fields
    settings = METHODS[name].settings_type
    shared = set().union(*(of for page, (base, of) in SHARED.items() if issubclass(settings, base) and name != page))
    for option, field in fields.items():
        if option == "name" or (option in shared and option not in listed):
            continue
        assert option in listed, f"docs/methods: {name} does not list {option}"
        stated = listed[option]
        expected = written(field.default)
        assert (float(stated) if isinstance(expected, float) else stated) == expected, option
    assert set(listed) <= set(fields), f"docs/methods: {name} lists options that it does not have"

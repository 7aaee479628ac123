"""Command lines on the pages are ones that the command line takes; those of the tutorial run."""

import re
import shlex
import shutil
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Union, get_args, get_origin

import pytest
import torch
import typer
from pydantic import BaseModel
from typer.testing import CliRunner

from graftrl.cli import app
from graftrl.config import Recipe, load_recipe
from graftrl.lab.transfer import prepare
from graftrl.methods import METHODS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "reference" / "commands.md"})]


def command_lines(page):
    """The words after `graftrl` of every command in a block of shell code, whatever stands around it."""
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE):
        if language not in ("bash", "sh", ""):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if not re.search(r"(^|[\s/(])graftrl ", line.partition(" #")[0]):
                continue
            words = shlex.split(line, comments=True)
            while words and not (words[0] == "graftrl" or words[0].endswith("/graftrl")):
                words = words[1:]
            end = next(
                (i for i, word in enumerate(words) if word in ("|", ">", "&", "&&", ";") or word[0] in "|>"), None
            )
            yield words[1:end]


def parsed(words):
    """(name, parameters) once the command line has taken the words; fails where it does not."""
    command, name = typer.main.get_command(app), "graftrl"
    while getattr(command, "commands", None) and words and not words[0].startswith("-"):
        name, *words = words
        assert name in command.commands, f"there is no command {name!r}"
        command = command.commands[name]
    try:
        return name, command.make_context(name, list(words)).params
    except (typer.Exit, SystemExit):  # --help, --version, --show-completion
        return name, {}


def test_a_mistake_would_be_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```bash\n$ cd x && .venv/bin/graftrl train r.yaml a=1 \\\n    --rn x | head   # --no\n```\n")
    ((*words,),) = command_lines(page)
    assert words == ["train", "r.yaml", "a=1", "--rn", "x"]
    with pytest.raises(Exception, match="No such option: --rn"):
        parsed(words)
    assert is_key(Recipe, ["models", "A", "optimizer", "lr"]) and is_key(Recipe, ["method", "threshold"])
    assert not is_key(Recipe, ["models", "A", "optimiser", "lr"]) and not is_key(Recipe, ["training", "step"])


def is_key(annotation, parts):
    """Whether a dotted key leads to something in this part of a recipe."""
    if get_origin(annotation) is Annotated:
        return is_key(get_args(annotation)[0], parts)
    if get_origin(annotation) in (Union, types.UnionType):
        return any(is_key(each, parts) for each in get_args(annotation))
    if not parts:
        return True
    if get_origin(annotation) in (dict, Mapping):
        return len(parts) == 1 or is_key(get_args(annotation)[1], parts[1:])
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return False
    if annotation is Recipe and parts[0] == "method" and len(parts) > 1:
        return any(is_key(method.settings_type, parts[1:]) for method in METHODS.values())
    return parts[0] in annotation.model_fields and is_key(annotation.model_fields[parts[0]].annotation, parts[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_line_is_taken(page, monkeypatch):
    monkeypatch.chdir(ROOT)  # recipes are named from here
    for words in command_lines(page):
        try:
            name, given = parsed(words)
        except Exception as error:
            error.add_note(f"{page}: graftrl {shlex.join(words)}")
            raise
        overrides = [word for word in given.get("overrides") or given.get("models") or [] if "=" in word]
        own = "method=" in " ".join(overrides) and ":" in " ".join(overrides)  # a class that is not here
        recipe = given.get("recipe_path") if name == "train" else None
        if recipe is not None and recipe.is_file() and not own:
            load_recipe(recipe, overrides)
        for override in overrides if not own else []:
            key = override.partition("=")[0]
            assert is_key(Recipe, key.split(".")), f"{page}: graftrl {shlex.join(words)}: {key}"


SMALLER = ["evaluation.prompts=24", "training.prompts_per_step=8", "training.minibatch_prompts=4"]


def test_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    """Every command of it, in order, with fewer steps and prompts; then its Python."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    prepare(Path("runs/lab-cache"))
    page = ROOT / "docs" / "tutorial.md"
    done = []
    for words in command_lines(page):
        if words[0] == "view":  # which would wait for its end
            continue
        words = [{"100": "8", "training.steps=40": "training.steps=2"}.get(word, word) for word in words]
        result = CliRunner().invoke(app, [*words, *(SMALLER if words[0] == "train" else [])])
        assert result.exit_code == 0, f"{words}: {result.output[-2000:]} {result.exception}"
        done.append(words[0])
    torch.set_num_threads(threads)
    assert done == ["probe", "train", "train", "resume", "report", "logs", "logs", "train"]
    for name in ("grpo", "graft", "stored"):
        assert len((tmp_path / "runs" / "tutorial" / name / "metrics.jsonl").read_text().splitlines()) == 2
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(code, "tutorial.md", "exec"), {})
    assert "admitted" in capsys.readouterr().out

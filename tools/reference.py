"""Writes docs/reference/recipe.md and docs/reference/commands.md from the code; a test says when they are out of date.

make reference
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.models import ArgumentInfo, OptionInfo

sys.path.insert(0, str(Path(__file__).parent))

from docstrings import taken_apart

from graftrl.cli import app
from graftrl.config import Recipe
from graftrl.engines.config import PolicyResources
from graftrl.lab.programs import HiddenProgramsConfig
from graftrl.logs.config import LivePeerSettings, PeerSettings
from graftrl.methods import METHODS, PRESETS
from graftrl.methods.distillation import DistillationSettings
from graftrl.methods.grpo import ClipSettings
from graftrl.policies.config import ModelSettings, ScorerSettings
from graftrl.tasks.config import CodeConfig, DataSource, FunctionConfig, GymDataset, MathConfig, ReasoningGymConfig

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
MADE = "<!-- Made by `make reference` from the code; edit the docstrings and help texts there. -->\n"


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


# The recipe's sections in the order of the page: heading, what is said of it, settings.
SECTIONS: list[tuple[str, str, type[BaseModel]]] = [
    ("Top level", "", Recipe),
    ("models.NAME", "One for each model that trains; NAME is yours.", ModelSettings),
    ("models.NAME.optimizer", "", ModelSettings.model_fields["optimizer"].annotation),  # type: ignore[list-item]
    ("models.NAME.lora", "", get_args(ModelSettings.model_fields["lora"].annotation)[0]),
    ("peers.NAME: stored", "Guide: [stored peers](../how-to/stored-peers.md).", PeerSettings),
    ("peers.NAME: live", "Guide: [live peers](../how-to/live-peers.md).", LivePeerSettings),
    ("scorers.NAME", "Guide: [scorers](../scorers.md).", ScorerSettings),
    ("task: kind math", "Guide: [tasks](../how-to/tasks.md).", MathConfig),
    ("task: kind code", "Guide: [programming problems](../how-to/code.md).", CodeConfig),
    ("task: kind reasoning_gym", "Guide: [tasks](../how-to/tasks.md).", ReasoningGymConfig),
    ("task.datasets", "Each item of the list, for `reasoning_gym`.", GymDataset),
    ("task: kind function", "Guide: [tasks](../how-to/tasks.md).", FunctionConfig),
    ("task: kind hidden_programs", "See [the laboratory](../lab.md).", HiddenProgramsConfig),
    ("task.train, task.validation", "Sources of problems.", DataSource),
    *((name, "", field.annotation) for name, field in Recipe.model_fields.items() if _is_section(field.annotation)),
    ("ray.resources.NAME", "NAME is a model's. Guide: [past one process](../how-to/scale.md).", PolicyResources),
]

# Options that several methods have, listed once.
SHARED: list[tuple[str, type[BaseModel]]] = [
    ("Of methods with a clipped policy gradient", ClipSettings),
    ("Of methods of on-policy distillation", DistillationSettings),
]


def recipe_page() -> str:
    parts = [
        "# Every option of a recipe",
        MADE,
        "A recipe is a YAML file, or a mapping in Python. Any option can be overridden on the command line by its "
        "dotted name: `graftrl train recipe.yaml training.steps=10 models.A.optimizer.lr=1e-5`. Unknown keys are "
        "refused. The run folder's `config.yaml` holds all of these with the values that a run had.",
    ]
    for heading, remark, settings in SECTIONS:
        parts += [f"## {heading}", " ".join(filter(None, [_summary(settings), remark])), options(settings)]
    parts += [
        "## method",
        "A name, or a mapping with `name` and options: of a method, a preset, or `module:Class` "
        "([a method of your own](../how-to/own-method.md)). What the methods do is in [Methods](../methods/index.md); "
        "here are all of their options.",
    ]
    for heading, settings in SHARED:
        parts += [f"### {heading}", options(settings)]
    for name in METHODS:
        parts += [f"### method: {name}", *_of_method(name)]
    parts += ["### Presets", "Names for options; more can be added.", "| preset | is |\n|---|---|"]
    parts[-1] += "".join(f"\n| `{name}` | {_mapping(given)} |" for name, given in PRESETS.items())
    return _joined(parts)


def _of_method(method: str) -> Iterator[str]:
    """A method's options without those that it has from another; what differs in these."""
    settings = METHODS[method].settings_type
    earlier = [*METHODS][: [*METHODS].index(method)]
    listed = [*SHARED, *((f"method: {name}", METHODS[name].settings_type) for name in earlier)]
    bases = {base: heading for heading, base in reversed(listed) if issubclass(settings, base)}
    skip = {"name"}
    for base, heading in bases.items():
        if any(other is not base and issubclass(other, base) for other in bases):
            continue
        yield f"All options under [{heading}](#{_anchor(heading)})."
        skip |= {
            name for name, field in base.model_fields.items() if settings.model_fields[name].default == field.default
        }
    table = options(settings, skip)
    if table and len(skip) > 1:
        yield "What differs, and more:"
    yield table


def options(settings: type[BaseModel], skip: Sequence[str] | set[str] = ()) -> str:
    """A table of the fields; empty if there are none."""
    rows = [
        f"| `{name}` | {_type(field)} | {_default(field)} | {meaning_of(settings, name)} |"
        for name, field in settings.model_fields.items()
        if name not in skip and name != "kind"
    ]
    return "\n".join(["| option | type | default | meaning |", "|---|---|---|---|", *rows]) if rows else ""


def meaning_of(settings: type[BaseModel], name: str) -> str:
    """From the docstring of the class, or of the nearest of its bases that says something."""
    for base in settings.__mro__:
        fields = getattr(base, "model_fields", {})
        if name in fields and "__doc__" in vars(base) and base.__doc__:
            meaning = taken_apart(base.__doc__, fields)[1].get(name)
            if meaning:
                return _cell(meaning)
    raise LookupError(f"{settings.__name__}.{name} has no meaning: add `{name}: ...` to the docstring")


def _summary(settings: type[BaseModel]) -> str:
    if "__doc__" not in vars(settings):
        return ""
    return " ".join(taken_apart(settings.__doc__ or "", settings.model_fields)[0].split())


NAMES = {
    int: "integer",
    float: "number",
    bool: "true, false",
    str: "text",
    Path: "path",
    type(None): "",
    Any: "name or mapping",
}


def _type(field: FieldInfo) -> str:
    bounds = []
    for extra in field.metadata:
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            if (bound := getattr(extra, attribute, None)) is not None:
                bounds.append(f"{sign} {bound:g}")
    return ", ".join(filter(None, [_type_name(field.annotation), *bounds]))


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in NAMES:
        return NAMES[annotation]
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(filter(None, map(_type_name, arguments))))
    if origin in (list, tuple):
        if origin is tuple and arguments[-1] is not ...:
            return f"list of {len(arguments)} {_type_name(arguments[0])}s"
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    return "section"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its defaults"
    return _value(value)


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return _mapping(value) if value else "none"
    return f"``{_cell(value)}``" if "`" in value else f"`{_cell(value)}`" if value else "empty"


def _mapping(given: dict[str, Any]) -> str:
    return "`{" + ", ".join(f"{key}: {_value(value).strip('`')}" for key, value in given.items()) + "}`"


def _cell(text: str) -> str:
    """In a cell of a table; outside of code, a `<` would begin a tag."""
    return (
        text.replace("\n", "\\n").replace("|", "\\|").replace("<", "&lt;")
        if "`" not in text
        else text.replace("|", "\\|").replace("\n", "\\n")
    )


def _anchor(heading: str) -> str:
    return "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def _joined(parts: Sequence[str]) -> str:
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


# The command line -----------------------------------------------------------------------------------------------------


def commands_page() -> str:
    parts = [
        "# Every command and option",
        MADE,
        "By task they are in [the command line](command-line.md); `graftrl COMMAND --help` prints the same.",
    ]
    for path, function in sorted(commands("graftrl", app)):
        parameters = list(_parameters(function))
        usage = " ".join([path, *(p.name for p in parameters if p.kind == "argument"), "[OPTIONS]"])
        rows = [f"| `{_cell(p.name)}` | {p.kind} | {p.default} | {_cell(p.meaning)} |" for p in parameters]
        table = "\n".join(["| argument or option | type | default | meaning |", "|---|---|---|---|", *rows])
        parts += [f"## {path}", inspect.getdoc(function) or "", f"```\n{usage}\n```", table if rows else ""]
    return _joined(parts)


def commands(path: str, group: typer.Typer) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every command as it is typed, with its function."""
    for command in group.registered_commands:
        if command.callback is not None:
            yield f"{path} {command.name or command.callback.__name__.replace('_', '-')}", command.callback
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            yield from commands(f"{path} {inner.name}", inner.typer_instance)


class Parameter(NamedTuple):
    name: str
    kind: str
    default: str
    meaning: str


def _parameters(function: Callable[..., Any]) -> Iterator[Parameter]:
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        annotation, *extras = get_args(hints[name])
        info = next(extra for extra in extras if isinstance(extra, ArgumentInfo | OptionInfo))
        required = parameter.default is inspect.Parameter.empty
        default = "" if parameter.default in (None, False) or isinstance(parameter.default, list) else parameter.default
        stated = "required" if required else "on" if default is True else f"`{default}`" if default != "" else ""
        if isinstance(info, ArgumentInfo):
            shown = info.metavar or name.upper()
            shown = shown if required or shown.startswith("[") else f"[{shown}]"
            yield Parameter(shown, "argument", stated, info.help or "")
        else:
            declared = (info.default, *(info.param_decls or ()))  # the first one's place is the default's
            names = [each for each in declared if isinstance(each, str) and each.startswith("-")]
            if not names:
                option = name.replace("_", "-")
                names = [f"--{option}", *([f"--no-{option}"] if annotation is bool else [])]
            yield Parameter(", ".join(names), _kind(annotation, info), stated, info.help or "")


def _kind(annotation: Any, info: OptionInfo) -> str:
    if annotation is bool:
        return "flag"
    kind = _type_name(annotation).removeprefix("list of ")
    for bound, sign in ((info.min, "≥"), (info.max, "≤")):
        kind += f", {sign} {bound:g}" if bound is not None else ""
    return kind


def main() -> None:
    for name, text in (("recipe.md", recipe_page()), ("commands.md", commands_page())):
        (REFERENCE / name).write_text(text, encoding="utf-8")
        print(REFERENCE / name)


if __name__ == "__main__":
    main()

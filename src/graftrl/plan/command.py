"""`graftrl plan`: from options to a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import polars as pl

from graftrl.config import Recipe, load_recipe
from graftrl.engines.config import PolicyResources
from graftrl.errors import ConfigError
from graftrl.logs.reader import RolloutLog, scan_many
from graftrl.plan.devices import Device, device_named
from graftrl.plan.estimate import Layout, Plan, check_layout, make_plan
from graftrl.plan.measure import this_machine
from graftrl.plan.workload import workload_of
from graftrl.training.run_folder import write_bytes

Value = TypeVar("Value")

# Name -> field of a device and the factor to its unit.
NUMBERS = {
    "tflops": ("bf16", 1e12),
    "fp32-tflops": ("fp32", 1e12),
    "bandwidth": ("bandwidth", 1e9),
    "memory": ("memory", 1e9),
    "link": ("link", 1e9),
    "network": ("network", 1e9),
    "node": ("node", 1),
}
SHARES = ("products", "decode", "attention", "stream", "traffic", "links")


@dataclass(frozen=True)
class PlanRequest:
    """What the command line asks for; see `graftrl plan --help`."""

    recipe: Path
    overrides: Sequence[str] = ()
    devices: Sequence[str] = ()
    device: Sequence[str] = ()
    own: bool | None = None
    sampler: bool | None = None
    numbers: Sequence[str] = ()
    prompt_tokens: int | None = None
    response_tokens: Sequence[str] = ()
    spread: float = 1.0
    log: Path | None = None
    exchanged: float | None = None
    contrast: float | None = None
    grade_seconds: float = 0.01
    scale: Sequence[int] = ()
    steps: int = 8
    seed: int | None = None


def run_plan(request: PlanRequest) -> Plan:
    """Raises ConfigError, DataError or ModelError."""
    recipe = load_recipe(request.recipe, request.overrides)
    layout = layout_of(recipe, request)
    means = by_policy(recipe, request.response_tokens, "--response-tokens", _positive)
    lengths, exchanged, contrast = (
        ({}, None, 1.0) if request.log is None else read_log(request.log, list(recipe.models))
    )
    workload = workload_of(
        recipe,
        prompt_tokens=request.prompt_tokens,
        response_tokens=means,
        spread=request.spread,
        lengths=lengths,
        exchanged=request.exchanged if request.exchanged is not None else exchanged,
        contrast=request.contrast if request.contrast is not None else contrast,
        grade_seconds=request.grade_seconds,
    )
    seed = recipe.seed if request.seed is None else request.seed
    return make_plan(recipe, layout, workload, steps=request.steps, seed=seed, scale=request.scale)


def layout_of(recipe: Recipe, request: PlanRequest) -> Layout:
    """What the options say; else the resources of a recipe for the engine ray; else one device that all policies share.

    Raises:
        ConfigError: an option that cannot be read, or a layout that cannot be.
    """
    counts = by_policy(recipe, request.devices, "--devices", _count)
    samplers: dict[str, int] = {}
    resources: dict[str, PolicyResources] = {}
    if recipe.engine == "ray" and not counts and request.own is None:
        for name in recipe.models:
            of_model = resources[name] = recipe.ray.of(name)
            counts[name] = of_model.trainers
            if of_model.devices == "own":
                samplers[name] = of_model.samplers * of_model.tensor_parallel
    names = by_policy(recipe, request.device, "--device", _text)
    own = request.own if request.own is not None else recipe.engine == "ray" or len(set(counts.values())) > 1
    devices = {name: counts.get(name, 1) for name in recipe.models}
    kinds: dict[str, Device] = {}
    made: dict[str, Device] = {}
    for name in recipe.models:
        kind = names.get(name, "cpu" if recipe.models[name].device == "cpu" else "h100")
        if kind not in made:
            made[kind] = with_numbers(this_machine() if kind == "here" else device_named(kind), request.numbers)
        kinds[name] = made[kind]
    several = own or recipe.engine == "ray" or max(devices.values()) > 1
    layout = Layout(
        devices=devices,
        kinds=kinds,
        shared=not own,
        sampler=several if request.sampler is None else request.sampler,
        samplers=samplers,
        resources=resources,
    )
    check_layout(layout)
    return layout


def with_numbers(device: Device, numbers: Sequence[str]) -> Device:
    """The device with NAME=VALUE changes. Raises ConfigError."""
    for number in numbers:
        key, equals, text = number.partition("=")
        place = NUMBERS.get(key) or ((key, 1.0) if key in SHARES else None)
        if key == "overhead":
            place = ("overhead", 1e-6)
        if not equals or place is None:
            known = ", ".join([*NUMBERS, *SHARES, "overhead"])
            raise ConfigError(f"--set {number!r}: write NAME=VALUE with one of {known}")
        value = _positive(text, f"--set {number!r}")
        if key in SHARES and value > 1:
            raise ConfigError(f"--set {number!r}: a share lies between 0 and 1")
        field, factor = place
        change: dict[str, Any] = {field: max(1, int(value)) if field == "node" else value * factor}
        device = replace(device, **change)
    return device


def by_policy(recipe: Recipe, given: Sequence[str], option: str, read: Callable[[str, str], Value]) -> dict[str, Value]:
    """`VALUE` for all policies, `NAME=VALUE` for one; the latter wins. Raises ConfigError."""
    found: dict[str, Value] = {}
    for text in sorted(given, key=lambda text: "=" in text):
        name, equals, value = text.rpartition("=")
        if equals and name not in recipe.models:
            raise ConfigError(f"{option} {text!r}: no model {name!r} in the recipe; it has {', '.join(recipe.models)}")
        for model in [name] if equals else recipe.models:
            found[model] = read(value, f"{option} {text!r}")
    return found


def _positive(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {text!r} is no number") from error
    if not 0 < value < math.inf:
        raise ConfigError(f"{where}: must be greater than 0")
    return value


def _count(text: str, where: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65_536:
        raise ConfigError(f"{where}: a number of devices from 1 to 65,536")
    return int(text)


def _text(text: str, _: str) -> str:
    return text


def read_log(path: Path, models: Sequence[str]) -> tuple[dict[str, list[int]], float, float]:
    """Response lengths by policy; shares of prompts that a receiver fails entirely and another solves in part, and of
    prompts that a model solves in part, means over the recipe's models that the log has.

    Raises:
        DataError: the log cannot be read, has ungraded responses or none of these models.
    """
    log = RolloutLog(path)
    found = [name for name in models if name in log.models]
    if not found:
        raise ConfigError(f"--log {path}: has none of {', '.join(models)}; it has {', '.join(log.models)}")
    columns = ["model", pl.col("token_ids").list.len().alias("tokens")]
    counts = pl.concat(scan_many(log.files, lambda frame: frame.select(columns).drop_nulls()))
    lengths = {name: counts.filter(model=name)["tokens"].to_list() for name in found}
    groups = {name: log.group_index(name) for name in found}
    mixed = {name: frame.filter((pl.col("k") > 0) & (pl.col("k") < pl.col("n"))) for name, frame in groups.items()}
    contrast = [mixed[name].height / groups[name].height for name in found]
    exchanged = []
    for receiver in found:
        others = [mixed[name] for name in found if name != receiver]
        failed = groups[receiver].filter(k=0)
        if others:
            solved = pl.concat(others).select("step", "prompt_id").unique()
            exchanged.append(failed.join(solved, on=["step", "prompt_id"]).height / groups[receiver].height)
    return lengths, sum(exchanged) / max(len(exchanged), 1), sum(contrast) / len(contrast)


def write_plots(plan: Plan, folder: Path) -> list[Path]:
    """NAME.svg for every plot. Raises ConfigError where matplotlib is missing."""
    from graftrl.plan.plots import drawn
    from graftrl.report.plots import standalone, to_svg

    written = []
    for name, figure in drawn(plan).items():
        written.append(folder / f"plan-{name}.svg")
        write_bytes(written[-1], standalone(to_svg(figure, name)).encode("utf-8"))
    return written

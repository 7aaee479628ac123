"""A recipe on given devices: does it fit, how long does a step take, where does the time go, how does it scale."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from graftrl.config import Recipe
from graftrl.engines.config import PolicyResources
from graftrl.errors import ConfigError
from graftrl.methods.extensions import UsesScorers
from graftrl.objective.distillation import REFERENCE
from graftrl.plan.devices import GIB, Device, without_communication
from graftrl.plan.shapes import shape_for
from graftrl.plan.simulate import LOSSES, PHASES, Member, Step, mean_step
from graftrl.plan.speed import Speed
from graftrl.plan.workload import Workload
from graftrl.policies.config import LoraSettings, ModelSettings
from graftrl.policies.costs import ModelShape
from graftrl.training.memory import MemoryEstimate, memory_of, together
from graftrl.training.workers import HEADROOM, Workers, workers_of

_MORE = (2, 4, 8, 16, 32)  # times as many devices, tried in this order


@dataclass(frozen=True)
class Layout:
    """devices: per policy, how many and of which kind. shared: all policies take turns on the same ones. sampler: each
    policy samples with an engine of its own (vLLM) beside its trainer; else with its training weights (local engine).
    samplers: per policy, devices for its samplers alone, besides the others; without them the same ones do both.
    resources: per policy, what the engine ray gives it; empty for another layout than the recipe's.
    """

    devices: Mapping[str, int]
    kinds: Mapping[str, Device]
    shared: bool
    sampler: bool
    samplers: Mapping[str, int] = field(default_factory=dict)
    resources: Mapping[str, PolicyResources] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return (max if self.shared else sum)(n + self.samplers.get(name, 0) for name, n in self.devices.items())


@dataclass(frozen=True)
class PolicyPlan:
    """One policy on its devices. memory: bytes on each; with `workers`, of a trainer. available: bytes of each. source:
    of the shape. workers: trainers and samplers of the engine ray. idle: by kind of device, the share of a step in
    which it has no work."""

    name: str
    parameters: int
    source: str
    devices: int
    device: str
    memory: MemoryEstimate
    available: float
    step: dict[str, float]
    tokens: int
    waits: float
    workers: Workers | None = None
    idle: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """A step on so many devices. bound: what most of the devices' time goes to. wait: the share of the devices' time
    that is spent waiting for the slower peer. exchange: share of the step's time in exchange and scoring. ideal:
    seconds if communication took none."""

    placement: str
    devices: int
    seconds: float
    low: float
    high: float
    shares: dict[str, float]
    bound: str
    slower: str | None
    exchange: float
    ideal: float


@dataclass(frozen=True)
class Plan:
    """Everything `graftrl plan` prints. seconds: of each phase of a step, on the wall; used: shares of the devices'
    time. frozen: bytes of scorers and references on each device."""

    name: str
    method: str
    layout: str
    shared: bool
    count: int
    policies: list[PolicyPlan]
    frozen: int
    peak: dict[str, int]
    seconds: dict[str, float]
    step_seconds: float
    low: float
    high: float
    used: dict[str, float]
    sampled_tokens: int
    passed_rows: int
    workload: dict[str, Any]
    warnings: list[str]
    advice: list[str]
    notes: list[str]
    scaling: list[Point] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return not self.warnings

    def to_json(self) -> str:
        content = {**asdict(self), "fits": self.fits}
        for policy, of_policy in zip(content["policies"], self.policies, strict=True):
            policy["memory"] |= {"training": of_policy.memory.training, "sampling": of_policy.memory.sampling}
            policy["workers"] = None if of_policy.workers is None else of_policy.workers.to_dict()
        return json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False)


def make_plan(
    recipe: Recipe,
    layout: Layout,
    workload: Workload,
    *,
    steps: int = 8,
    seed: int = 0,
    scale: Sequence[int] = (),
) -> Plan:
    """Raises ConfigError or ModelError."""
    shapes = {name: shape_for(name, settings) for name, settings in recipe.models.items()}
    readers = _frozen(recipe, {name: shape for name, (shape, _) in shapes.items()})
    frozen = _frozen_bytes(readers)
    workers = _workers(recipe, shapes, recipe.models, layout, frozen)
    memories = {
        name: workers[name].trainer if workers else _memory(recipe, name, shapes[name][0], settings, layout)
        for name, settings in recipe.models.items()
    }
    peak, warnings = _peaks_and_warnings(recipe, shapes, recipe.models, layout, frozen)
    members = _members(recipe, shapes, layout, workload, readers, workers)
    mean, seconds = mean_step(members, workload, shared=layout.shared, steps=steps, seed=seed)
    notes = [
        f"{name}: a mixture of experts; every token is taken to meet all of them, which is too many"
        for name, (shape, _) in shapes.items()
        if shape.experts
    ]
    if frozen:
        notes.append("frozen models lie whole on every device, and read all rows that are trained on")
    if layout.count > 1 or layout.sampler:
        notes.append("training is taken to be split over a policy's devices (FSDP), sampling to run beside it (vLLM)")
    notes += _notes_on_workers(workers)
    return Plan(
        name=recipe.name,
        method=recipe.method.name,
        layout=_describe(layout),
        shared=layout.shared,
        count=layout.count,
        policies=[
            PolicyPlan(
                name,
                shape.parameters,
                source,
                layout.devices[name],
                layout.kinds[name].name,
                memories[name],
                layout.kinds[name].memory,
                mean.phases_of[name],
                mean.tokens[name],
                mean.waits[name],
                workers.get(name),
                _idle(mean, name, workers[name]) if workers else {},
            )
            for name, (shape, source) in shapes.items()
        ],
        frozen=frozen,
        peak=peak,
        seconds=mean.seconds,
        step_seconds=mean.total,
        low=min(seconds),
        high=max(seconds),
        used=shares(mean),
        sampled_tokens=sum(mean.tokens.values()),
        passed_rows=round(workload.passed * workload.responses) * len(members) * workload.epochs,
        workload={**asdict(workload), "lengths": {name: len(v) for name, v in workload.lengths.items()}},
        warnings=warnings,
        advice=_memory_advice(recipe, shapes, layout, frozen) if warnings else _time_advice(mean, layout, members),
        notes=notes,
        scaling=scaling(members, workload, scale, steps=max(2, steps // 2), seed=seed),
    )


def shares(step: Step) -> dict[str, float]:
    whole = step.devices * step.total
    return {name: step.used[name] / whole for name in LOSSES}


# Memory ---------------------------------------------------------------------------------------------------------------


def _memory(recipe: Recipe, name: str, shape: ModelShape, settings: ModelSettings, layout: Layout) -> MemoryEstimate:
    devices = layout.devices[name]
    rows = -(-recipe.training.prompts_per_step * recipe.training.group_size // (layout.samplers.get(name) or devices))
    return memory_of(shape, settings, recipe.sampling, devices=devices, sampler=layout.sampler, rows=rows)


@dataclass(frozen=True)
class _Frozen:
    """A model that only reads: a scorer, for all policies, or the start of `policy`, for it alone."""

    shape: ModelShape
    settings: ModelSettings
    policy: str | None = None


def _frozen(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> list[_Frozen]:
    method = recipe.build_method()
    found = []
    for name in method.scorers if isinstance(method, UsesScorers) else ():
        scorer = recipe.scorers[name]
        settings = ModelSettings(
            path=scorer.path,
            dtype=scorer.dtype,
            microbatch_tokens=scorer.microbatch_tokens,
            logit_elements=scorer.logit_elements,
        )
        found.append(_Frozen(shape_for(name, scorer)[0], settings))
    objective = method.objective(0)
    if objective.needs_reference or (objective.mixture is not None and REFERENCE in objective.mixture.weights):
        found += [_Frozen(shapes[name], of_model, name) for name, of_model in recipe.models.items()]
    return found


def _frozen_bytes(frozen: Sequence[_Frozen]) -> int:
    """Float32 weights on a device; those of one path are there once, and the start of an adapter is its base."""
    sizes = {f.settings.path: 4 * f.shape.parameters for f in frozen if f.policy is None or f.settings.lora is None}
    return sum(sizes.values())


def _workers(
    recipe: Recipe,
    shapes: Mapping[str, tuple[ModelShape, str]],
    models: Mapping[str, ModelSettings],
    layout: Layout,
    frozen: int,
) -> dict[str, Workers]:
    training = recipe.training
    return {
        name: workers_of(
            shapes[name][0],
            models[name],
            recipe.sampling,
            resources,
            sampler=recipe.ray.sampler,
            available=int(layout.kinds[name].memory),
            on_cpu=layout.kinds[name].exps is not None,
            responses=training.prompts_per_step * training.group_size,
            minibatch=training.minibatch_prompts * training.group_size,
            frozen=frozen,
        )
        for name, resources in layout.resources.items()
    }


def _notes_on_workers(workers: Mapping[str, Workers]) -> list[str]:
    found = []
    for name, w in workers.items():
        if 1 <= w.held < w.asked:
            found.append(
                f"{name}: a sampler holds {w.held:,} responses of the greatest length at once and is asked for "
                f"{w.asked:,}; where they get that long, the others wait or begin again"
            )
        if w.shared and w.samplers < w.trainers:
            found.append(f"{name}: times are those of {w.trainers} samplers; it has {w.samplers}")
        if w.tensor_parallel > 1:
            found.append(f"{name}: a sampler's {w.tensor_parallel} devices are taken to sample each by itself")
    return found


def _idle(step: Step, name: str, workers: Workers) -> dict[str, float]:
    """From the policy's own seconds: a device is busy from its phase's begin to the policy's last end in it."""
    spent = step.phases_of[name]
    training = spent["scoring"] + spent["training"] + spent["sync"]
    if workers.shared:
        return {"devices": 1 - (training + spent["sampling"]) / step.total}
    return {"trainers": 1 - training / step.total, "samplers": 1 - (spent["sampling"] + spent["sync"]) / step.total}


def _peaks_and_warnings(
    recipe: Recipe,
    shapes: Mapping[str, tuple[ModelShape, str]],
    models: Mapping[str, ModelSettings],
    layout: Layout,
    frozen: int,
) -> tuple[dict[str, int], list[str]]:
    """Bytes on the fullest device by policy, and what does not fit."""
    workers = _workers(recipe, shapes, models, layout, frozen)
    if workers:
        problems = [problem for name, w in workers.items() for problem in w.problems(name)]
        return {name: w.peak for name, w in workers.items()}, problems
    memories = {name: _memory(recipe, name, shapes[name][0], models[name], layout) for name in models}
    peak = _peaks(layout, memories, frozen)
    return peak, _warnings(layout, peak)


def _peaks(layout: Layout, memories: Mapping[str, MemoryEstimate], frozen: int) -> dict[str, int]:
    """Bytes on a device at the peak, by policy; of shared devices one number under all names."""
    if layout.shared:
        return dict.fromkeys(memories, together(memories.values()) + frozen)
    return {
        name: (memory.peak_apart if layout.samplers.get(name) else memory.peak) + frozen
        for name, memory in memories.items()
    }


def _warnings(layout: Layout, peak: Mapping[str, int]) -> list[str]:
    found = []
    for name, size in peak.items():
        device = layout.kinds[name]
        if size > HEADROOM * device.memory:
            who = "all policies" if layout.shared else name
            found.append(
                f"{who}: about {size / GIB:.1f} GiB on each {device.name}, which has {device.memory / GIB:.1f} GiB"
            )
    return list(dict.fromkeys(found))


def _memory_advice(
    recipe: Recipe, shapes: Mapping[str, tuple[ModelShape, str]], layout: Layout, frozen: int
) -> list[str]:
    """Changes of the recipe or of the devices that make everything fit: each one that does so alone, else as few
    together as it takes."""

    def fits(settings: Mapping[str, ModelSettings], layout: Layout) -> bool:
        return not _peaks_and_warnings(recipe, shapes, settings, layout, frozen)[1]

    def changed(**update: Any) -> dict[str, ModelSettings]:
        return {name: settings.model_copy(update=update) for name, settings in recipe.models.items()}

    longest = recipe.sampling.max_prompt_tokens + recipe.sampling.max_response_tokens
    most = max(settings.sample_rows for settings in recipe.models.values())
    halves = [most >> i for i in range(1, most.bit_length())]
    rows = next((rows for rows in halves if fits(changed(sample_rows=rows), layout)), min(most, 32))
    changes: dict[str, dict[str, Any]] = {  # the least invasive last
        "models.NAME.lora.rank=32": {"lora": LoraSettings(rank=32)},
        "models.NAME.dtype=bfloat16": {"dtype": "bfloat16"},
        "models.NAME.gradient_checkpointing=true": {"gradient_checkpointing": True},
        f"models.NAME.microbatch_tokens={longest} (one row of the greatest length)": {"microbatch_tokens": longest},
        f"models.NAME.sample_rows={rows}": {"sample_rows": rows},
    }
    if layout.resources:  # which takes no adapters; its samplers decide themselves what they sample at once
        changes = {text: update for text, update in changes.items() if not {"lora", "sample_rows"} & update.keys()}
    layouts = {"": layout}
    if any(resources.devices == "shared" for resources in layout.resources.values()):
        own = {name: r.model_copy(update={"devices": "own"}) for name, r in layout.resources.items()}
        layouts["ray.resources.NAME.devices=own"] = replace(layout, resources=own)
    if layout.shared and len(layout.devices) > 1:
        layouts["devices of its own for each policy (--own)"] = replace(layout, shared=False, sampler=True)
    for f in _MORE:
        more = {name: f * n for name, n in layout.devices.items()}
        spread = {
            name: r.model_copy(update={"trainers": f * r.trainers, "samplers": f * r.samplers})
            for name, r in layout.resources.items()
        }
        layouts[f"{f} times as many devices"] = replace(layout, devices=more, sampler=True, resources=spread)
    found: list[str] = []
    for text, other in layouts.items():
        alone = [change for change, update in changes.items() if fits(changed(**update), other)]
        if text and fits(recipe.models, other):
            found.append(text)
        elif alone and not text:
            found += alone
        elif not alone:
            needed = dict(changes)
            for change in changes:
                rest = {key: value for c, update in needed.items() if c != change for key, value in update.items()}
                if fits(changed(**rest), other):
                    needed.pop(change)
            if fits(changed(**{key: value for update in needed.values() for key, value in update.items()}), other):
                found.append(" and ".join([*([text] if text else []), *needed]))
        elif text:
            found.append(f"{text} and {alone[-1]}")
        if text.endswith("many devices") and found and text in found[-1]:  # more of them would do as well
            break
    return found or ["no setting suffices: smaller models, or devices with more memory"]


# Time -----------------------------------------------------------------------------------------------------------------


def _members(
    recipe: Recipe,
    shapes: Mapping[str, tuple[ModelShape, str]],
    layout: Layout,
    workload: Workload,
    readers: Sequence[_Frozen],
    workers: Mapping[str, Workers],
) -> list[Member]:
    found = []
    for name, settings in recipe.models.items():
        if name in workers and recipe.ray.sampler == "vllm":
            settings = settings.model_copy(update={"sample_rows": _slots(workers[name], workload, name)})
        on_cpu = layout.kinds[name].exps is not None
        shares_prompts = on_cpu and not layout.sampler and not settings.gradient_checkpointing
        speed = Speed(
            shapes[name][0],
            settings,
            layout.kinds[name],
            sampler=layout.sampler,
            rows_per_prompt=workload.group if shares_prompts else 1,
        )
        rescored = layout.sampler or settings.dtype == "bfloat16"
        of_policy = tuple(
            Speed(frozen.shape, frozen.settings, layout.kinds[name])
            for frozen in readers
            if frozen.policy in (None, name)
        )
        found.append(Member(name, speed, layout.devices[name], rescored, of_policy, layout.samplers.get(name, 0)))
    return found


def _slots(workers: Workers, workload: Workload, name: str) -> int:
    """Responses that a vLLM sampler works on at once, when they have their mean length."""
    tokens = workload.prompt_tokens + workload.response_tokens[name]
    most = 1024 if workers.available >= 70 * GIB else 256  # vLLM's own limits
    return int(min(most, max(1, workers.cache // (workers.token * tokens))))


def _time_advice(mean: Step, layout: Layout, members: Sequence[Member]) -> list[str]:
    found = []
    used = shares(mean)
    if not layout.shared and len(members) > 1 and used["slower peer"] > 0.1:
        work = {m.name: m.all_devices * sum(mean.phases_of[m.name].get(p, 0.0) for p in PHASES) for m in members}
        whole = sum(work.values())
        split = ", ".join(f"{name}={max(1, round(layout.count * part / whole))}" for name, part in work.items())
        found.append(
            f"{used['slower peer']:.0%} of the devices' time is spent waiting for the slower peer; devices in "
            f"proportion to the work: {split}"
        )
    if used["tail"] > 0.3:
        found.append(
            f"{used['tail']:.0%} of the devices' time is idle beside the longest responses; more prompts a step, a "
            "lower sampling.max_response_tokens, or fewer devices use it better"
        )
    if mean.seconds["grading"] > 0.1 * mean.total:
        found.append(f"grading takes {mean.seconds['grading'] / mean.total:.0%} of a step: raise verification.workers")
    if used["communication"] > 0.2:
        found.append(f"{used['communication']:.0%} of the devices' time is communication: fewer devices for a policy")
    return found


def scaling(
    members: Sequence[Member], workload: Workload, counts: Sequence[int], *, steps: int, seed: int
) -> list[Point]:
    """The same step on more devices: shared by all policies in turn, and divided equally between them. Where a policy
    has devices of its own, as many in all are counted."""
    found = []
    for count in counts:
        placements = [("shared", count)]
        if len(members) > 1 and count % len(members) == 0:
            placements.append(("own", count // len(members)))
        for placement, each in placements:
            at = [replace(m, devices=each, samplers=0) for m in members]
            free = [replace(m, speed=replace(m.speed, device=without_communication(m.speed.device))) for m in at]
            shared = placement == "shared"
            mean, seconds = mean_step(at, workload, shared=shared, steps=steps, seed=seed)
            ideal, _ = mean_step(free, workload, shared=shared, steps=steps, seed=seed)
            found.append(_point(placement, mean, seconds, ideal.total))
    return found


def _point(placement: str, mean: Step, seconds: Sequence[float], ideal: float) -> Point:
    used = shares(mean)
    bound = max(used, key=lambda name: used[name])
    slower = min(mean.waits, key=lambda name: mean.waits[name]) if used["slower peer"] > 0.05 else None
    return Point(
        placement=placement,
        devices=mean.devices,
        seconds=mean.total,
        low=min(seconds),
        high=max(seconds),
        shares=used,
        bound=bound,
        slower=slower,
        exchange=(mean.seconds["exchange"] + mean.seconds["scoring"]) / mean.total,
        ideal=ideal,
    )


def _describe(layout: Layout) -> str:
    kinds = {name: layout.kinds[name].name for name in layout.devices}
    if layout.shared:
        return f"{layout.count} x {next(iter(kinds.values()))}, shared in turn"
    split = {name: f" + {layout.samplers[name]} for sampling" if layout.samplers.get(name) else "" for name in kinds}
    return ", ".join(f"{name} on {n} x {kinds[name]}{split[name]}" for name, n in layout.devices.items())


def check_layout(layout: Layout) -> None:
    """Raises ConfigError where policies cannot share what was asked for."""
    if layout.shared and len({kind.name for kind in layout.kinds.values()}) > 1:
        raise ConfigError("--device: policies that share devices share their kind; use --own, or one kind")
    if layout.shared and len(set(layout.devices.values())) > 1:
        raise ConfigError("--devices: policies that share devices have the same number; use --own, or one number")

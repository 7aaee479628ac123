"""`graftrl train --dry-run`: everything that can be found wrong without loading weights or training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from graftrl.config import Recipe
from graftrl.methods.extensions import UsesScorers
from graftrl.objective.distillation import REFERENCE
from graftrl.policies.codec import Codec
from graftrl.policies.config import ModelSettings
from graftrl.policies.costs import shape_of
from graftrl.policies.loading import check_context, load_skeleton
from graftrl.policies.scorers import resolved
from graftrl.tasks import build_task
from graftrl.training.data import PromptStream, prompt_length, within_limit
from graftrl.training.live import LivePeers
from graftrl.training.memory import MemoryEstimate, estimate_memory, together
from graftrl.training.peers import open_peers
from graftrl.training.workers import Workers, workers_of

GIB = 1024**3


@dataclass(frozen=True)
class ModelLine:
    """One model of a run. Bytes; trainable, optimizer and peak are None for a frozen model. optimizer: gradients and
    AdamW's moments. shared: its weights are those of a model above."""

    name: str
    architecture: str
    parameters: int
    trainable: int | None
    weights: int
    optimizer: int | None
    peak: int | None
    shared: bool = False


@dataclass(frozen=True)
class DryRun:
    """What a run would use. peers, live_peers: a line each. notes: what was left out, and what else a person should
    know."""

    name: str
    method: str
    models: list[ModelLine]
    peers: list[str]
    live_peers: list[str]
    training_prompts: int
    validation_prompts: int
    steps: int
    steps_per_epoch: int
    prompts_per_step: int
    group_size: int
    most_sampled_tokens: int
    notes: list[str]
    peak_bytes: int
    available_bytes: int
    workers: dict[str, Workers] = field(default_factory=dict)  # of the engine ray
    problems: list[str] = field(default_factory=list)  # of its devices

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.available_bytes and not self.problems

    def to_json(self) -> str:
        workers = {name: of_one.to_dict() for name, of_one in self.workers.items()}
        return json.dumps({**asdict(self), "workers": workers, "fits": self.fits}, ensure_ascii=False, indent=2)


def dry_run(recipe: Recipe) -> DryRun:
    """Everything but weights is opened and checked. Raises ConfigError, DataError or ModelError as the run would."""
    task = build_task(recipe.task)
    codecs: dict[str, Codec] = {}
    memories: dict[str, MemoryEstimate] = {}
    lines: list[ModelLine] = []
    skeletons: dict[str, Any] = {}
    for name, settings in recipe.models.items():
        model, codecs[name] = load_skeleton(name, settings)
        check_context(name, model, recipe.sampling)
        m = memories[name] = estimate_memory(model, settings, recipe.sampling)
        skeletons[name] = model
        kind = type(model).__name__
        lines.append(ModelLine(name, kind, m.parameters, m.trainable, m.weights, m.gradients + m.optimizer, m.peak))
    frozen, notes_on_scorers = _frozen(recipe, codecs, memories)
    peak = together(memories.values()) + sum(line.weights for line in frozen if not line.shared)
    lengths = [prompt_length(codec) for codec in codecs.values()]
    train, notes = within_limit(task.train, lengths, recipe.sampling.max_prompt_tokens, "training prompts")
    training = recipe.training
    stream = PromptStream(train, training.prompts_per_step, recipe.seed)
    steps = training.steps or (training.epochs or 0) * stream.batches_per_epoch
    peers = open_peers(recipe.peers, stream, steps, recipe.seed)
    workers: dict[str, Workers] = {}
    problems: list[str] = []
    available = _available_bytes(recipe)
    if recipe.engine == "ray":
        whole = sum(line.weights for line in frozen if not line.shared)
        workers, peak, problems, on_workers = _on_ray(recipe, skeletons, whole)
        lines = [replace(line, peak=workers[line.name].peak) for line in lines]
        notes = [*notes, *on_workers]
        if recipe.ray.address is not None:
            available = peak  # the cluster's devices are not seen from here
    return DryRun(
        name=recipe.name,
        method=recipe.method.name,
        models=[*lines, *frozen],
        peers=[peer.summary for peer in peers],
        live_peers=LivePeers(recipe.peers, list(recipe.models), recipe.ray.address).summaries,
        training_prompts=len(train),
        validation_prompts=len(task.validation),
        steps=steps,
        steps_per_epoch=stream.batches_per_epoch,
        prompts_per_step=training.prompts_per_step,
        group_size=training.group_size,
        most_sampled_tokens=training.prompts_per_step * training.group_size * recipe.sampling.max_response_tokens,
        notes=[*task.notes, *notes_on_scorers, *notes, *(note for peer in peers for note in peer.notes)],
        peak_bytes=peak,
        available_bytes=available,
        workers=workers,
        problems=problems,
    )


def _on_ray(
    recipe: Recipe, skeletons: Mapping[str, Any], frozen: int
) -> tuple[dict[str, Workers], int, list[str], list[str]]:
    """Workers of every policy; bytes of the fullest GPU, or of all together on a machine without; what does not fit;
    notes. On another cluster than this machine nothing is said about what fits."""
    gpus = torch.cuda.device_count() if any(s.device != "cpu" for s in recipe.models.values()) else 0
    available = int(torch.cuda.mem_get_info()[1]) if gpus else int(psutil.virtual_memory().total)
    training = recipe.training
    workers = {
        name: workers_of(
            shape_of(model),
            recipe.models[name],
            recipe.sampling,
            recipe.ray.of(name),
            sampler=recipe.ray.sampler,
            available=available,
            on_cpu=not gpus,
            responses=training.prompts_per_step * training.group_size,
            minibatch=training.minibatch_prompts * training.group_size,
            frozen=frozen,
        )
        for name, model in skeletons.items()
    }
    peak = max(w.peak for w in workers.values()) if gpus else sum(w.together for w in workers.values())
    if recipe.ray.address is not None:
        note = f"ray.address is {recipe.ray.address}: whether its devices suffice says graftrl plan --device KIND"
        return workers, peak, [], [note]
    problems = [problem for name, w in workers.items() for problem in w.problems(name)] if gpus else []
    wanted = sum(w.devices for w in workers.values())
    if gpus and wanted > gpus:
        problems.append(f"ray.resources ask for {wanted} GPUs; this machine has {gpus}")
    return workers, peak, problems, []


def print_dry_run(recipe: Recipe, console: Console | None = None) -> None:
    """Print what a run would use; raises as `dry_run`."""
    found = dry_run(recipe)
    console = console or Console()
    if not console.is_terminal:
        console.width = 120  # a pipe has no width; a table must not be cut to 80 columns
    console.print(_table(found))
    for peer in found.peers:
        console.print(f"stored peer {peer}", markup=False, highlight=False, soft_wrap=True)
    for peer in found.live_peers:
        console.print(f"live peer {peer}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"data: {found.training_prompts:,} training and {found.validation_prompts:,} validation prompts; "
        f"{found.steps:,} steps of {found.prompts_per_step} prompts x {found.group_size} responses, "
        f"{found.steps_per_epoch:,} steps an epoch; at most {found.most_sampled_tokens:,} sampled tokens a step and "
        "model",
        highlight=False,
    )
    for note in found.notes:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    for name, w in found.workers.items():
        split = f" x {w.tensor_parallel} devices" if w.tensor_parallel > 1 else ""
        console.print(
            f"{name}: trainers {w.trainers}, each at most {w.trainer_peak / GIB:.2f} GiB on its device and {w.rows:,} "
            f"rows of a minibatch; samplers {w.samplers}{split}, {'on the same devices' if w.shared else 'on others'}, "
            f"each {w.share / GIB:.2f} GiB and, of the {w.asked:,} responses of a step, {w.held:,} of the greatest "
            "length at once",
            highlight=False,
        )
    for problem in found.problems:
        console.print(f"does NOT fit: {problem}", style="red", markup=False, highlight=False)
    if found.workers and recipe.ray.address is not None:
        return
    of_what = "at most" if found.workers else "for all models"
    console.print(
        f"memory: about {found.peak_bytes / GIB:.1f} GiB {of_what}, {found.available_bytes / GIB:.1f} GiB "
        f"available: {'fits' if found.fits else 'does NOT fit'}",
        highlight=False,
    )
    if not found.fits and not found.problems:
        console.print(
            "note: lower sample_rows, microbatch_tokens or logit_elements, or use gradient_checkpointing or lora",
            style="yellow",
        )


def _table(found: DryRun) -> Table:
    table = Table(title=f"{found.name}: {found.method}", box=None)
    for column in ("model", "architecture", "parameters", "trainable", "weights", "optimizer", "peak (estimate)"):
        table.add_column(column, justify="left" if column in ("model", "architecture") else "right")
    for line in found.models:
        table.add_row(
            line.name,
            line.architecture,
            f"{line.parameters / 1e6:,.1f} M",
            "frozen" if line.trainable is None else f"{line.trainable / 1e6:,.1f} M",
            "shared" if line.shared else f"{line.weights / GIB:.2f} GiB",
            "" if line.optimizer is None else f"{line.optimizer / GIB:.2f} GiB",
            "" if line.peak is None else f"{line.peak / GIB:.2f} GiB",
        )
    return table


def _frozen(
    recipe: Recipe, codecs: Mapping[str, Codec], trained: Mapping[str, MemoryEstimate]
) -> tuple[list[ModelLine], list[str]]:
    """A line for each scorer that the method reads and for each model's frozen start where the method needs it; those
    of one path share their weights. And notes. Raises as the run would."""
    method = recipe.build_method()
    scorers: dict[str, Codec] = {}
    lines: list[ModelLine] = []
    seen: set[str] = set()

    def add(name: str, kind: str, memory: MemoryEstimate, path: str) -> None:
        lines.append(
            ModelLine(name, kind, memory.parameters, None, memory.weights + memory.casts, None, None, path in seen)
        )
        seen.add(path)

    for name in method.scorers if isinstance(method, UsesScorers) else ():
        settings = resolved(name, recipe.scorers[name])
        model, scorers[name] = load_skeleton(name, settings)
        check_context(name, model, recipe.sampling)
        memory = estimate_memory(model, ModelSettings(path=settings.path, dtype=settings.dtype), recipe.sampling)
        add(f"{name} (scorer)", type(model).__name__, memory, settings.path)
    objective = method.objective(0)
    if objective.needs_reference or (objective.mixture is not None and REFERENCE in objective.mixture.weights):
        for name, of_model in recipe.models.items():
            if of_model.lora is None:
                add(f"{name} (reference)", "", trained[name], of_model.path)
    return lines, method.check_scorers(codecs, scorers) if isinstance(method, UsesScorers) else []


def _available_bytes(recipe: Recipe) -> int:
    on_gpu = torch.cuda.is_available() and any(settings.device != "cpu" for settings in recipe.models.values())
    if on_gpu:
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)

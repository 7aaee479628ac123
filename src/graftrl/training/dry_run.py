"""`graftrl train --dry-run`: everything that can be found wrong without loading weights or training."""

from __future__ import annotations

from collections.abc import Mapping

import psutil
import torch
from rich.console import Console
from rich.table import Table

from graftrl.config import Recipe
from graftrl.methods.extensions import UsesScorers
from graftrl.objective.distillation import REFERENCE
from graftrl.policies.codec import Codec
from graftrl.policies.config import ModelSettings
from graftrl.policies.loading import check_context, load_skeleton
from graftrl.policies.scorers import resolved
from graftrl.tasks import build_task
from graftrl.training.data import PromptStream, prompt_length, within_limit
from graftrl.training.memory import MemoryEstimate, estimate_memory
from graftrl.training.peers import open_peers

GIB = 1024**3


def print_dry_run(recipe: Recipe, console: Console | None = None) -> None:
    """Print what a run would use. Raises ConfigError, DataError or ModelError as the run itself would."""
    console = console or Console()
    if not console.is_terminal:
        console.width = 120  # a pipe has no width; a table must not be cut to 80 columns
    task = build_task(recipe.task)
    table = Table(title=f"{recipe.name}: {recipe.method.name}", box=None)
    for column in ("model", "architecture", "parameters", "trainable", "weights", "optimizer", "peak (estimate)"):
        table.add_column(column, justify="left" if column in ("model", "architecture") else "right")
    codecs: dict[str, Codec] = {}
    memories: dict[str, MemoryEstimate] = {}
    peak = 0
    for name, settings in recipe.models.items():
        model, codec = load_skeleton(name, settings)
        check_context(name, model, recipe.sampling)
        codecs[name] = codec
        memory = estimate_memory(model, settings, recipe.sampling)
        peak += memory.peak
        table.add_row(
            name, type(model).__name__, f"{memory.parameters / 1e6:,.1f} M", f"{memory.trainable / 1e6:,.1f} M",
            f"{memory.weights / GIB:.2f} GiB", f"{(memory.gradients + memory.optimizer) / GIB:.2f} GiB",
            f"{memory.peak / GIB:.2f} GiB",
        )  # fmt: skip
        memories[name] = memory
    read, notes_on_scorers = _frozen(recipe, codecs, memories, table)
    peak += read
    lengths = [prompt_length(codec) for codec in codecs.values()]
    train, notes = within_limit(task.train, lengths, recipe.sampling.max_prompt_tokens, "training prompts")
    training = recipe.training
    stream = PromptStream(train, training.prompts_per_step, recipe.seed)
    steps = training.steps or (training.epochs or 0) * stream.batches_per_epoch
    peers = open_peers(recipe.peers, stream, steps, recipe.seed)
    console.print(table)
    for peer in peers:
        console.print(f"stored peer {peer.summary}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"data: {len(train):,} training and {len(task.validation):,} validation prompts; {steps:,} steps of "
        f"{training.prompts_per_step} prompts x {training.group_size} responses, {stream.batches_per_epoch:,} steps an "
        f"epoch; at most {training.prompts_per_step * training.group_size * recipe.sampling.max_response_tokens:,} "
        "sampled tokens a step and model",
        highlight=False,
    )
    for note in [*task.notes, *notes_on_scorers, *notes, *(note for peer in peers for note in peer.notes)]:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    available = _available_bytes(recipe)
    verdict = "fits" if peak <= available else "does NOT fit"
    console.print(
        f"memory: about {peak / GIB:.1f} GiB for all models, {available / GIB:.1f} GiB available: {verdict}",
        highlight=False,
    )
    if peak > available:
        console.print(
            "note: lower sample_rows, microbatch_tokens or logit_elements, or use gradient_checkpointing or lora",
            style="yellow",
        )


def _frozen(
    recipe: Recipe, codecs: Mapping[str, Codec], trained: Mapping[str, MemoryEstimate], table: Table
) -> tuple[int, list[str]]:
    """A row for each scorer that the method reads and for each model's frozen start where the method needs it.

    Returns:
        the bytes of their weights, which those of one path share, and notes. Raises as the run would.
    """
    method = recipe.build_method()
    scorers: dict[str, Codec] = {}
    weights: dict[str, int] = {}  # by path

    def add(name: str, kind: str, memory: MemoryEstimate, path: str) -> None:
        size = "shared" if path in weights else f"{memory.weights / GIB:.2f} GiB"
        weights.setdefault(path, memory.weights)
        table.add_row(name, kind, f"{memory.parameters / 1e6:,.1f} M", "frozen", size, "", "")

    for name in method.scorers if isinstance(method, UsesScorers) else ():
        settings = resolved(name, recipe.scorers[name])
        model, scorers[name] = load_skeleton(name, settings)
        memory = estimate_memory(model, ModelSettings(path=settings.path, dtype=settings.dtype), recipe.sampling)
        add(f"{name} (scorer)", type(model).__name__, memory, settings.path)
    objective = method.objective(0)
    if objective.needs_reference or (objective.mixture is not None and REFERENCE in objective.mixture.weights):
        for name, of_model in recipe.models.items():
            if of_model.lora is None:
                add(f"{name} (reference)", "", trained[name], of_model.path)
    notes = method.check_scorers(codecs, scorers) if isinstance(method, UsesScorers) else []
    return sum(weights.values()), notes


def _available_bytes(recipe: Recipe) -> int:
    on_gpu = torch.cuda.is_available() and any(settings.device != "cpu" for settings in recipe.models.values())
    if on_gpu:
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)

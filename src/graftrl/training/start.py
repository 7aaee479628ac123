"""A run as the command line starts it: with a display, quiet libraries, and a last line that says where it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import typer
from transformers.utils import logging as transformers_logging

from graftrl.config import Recipe
from graftrl.errors import ConfigError, ModelError
from graftrl.training.dry_run import dry_run, print_dry_run
from graftrl.training.loop import train
from graftrl.training.progress import Silent, Terminal
from graftrl.training.remote import create_run
from graftrl.training.run_folder import RunFolder


def train_or_check(recipe: Recipe, run: Path | str | None, *, check: bool, quiet: bool, as_json: bool = False) -> None:
    """Train a recipe in `run`, a folder or a URL (default: runs/NAME), or only check it.

    as_json: print what the check finds as JSON.
    """
    if as_json and not check:
        raise ConfigError("--json belongs to --dry-run; the numbers of a run are in its metrics.jsonl")
    if as_json:
        typer.echo(dry_run(recipe).to_json())
    elif check:
        print_dry_run(recipe)
    else:
        train_in(create_run(run or Path("runs") / recipe.name, recipe), quiet=quiet)


@contextmanager
def memory_errors(run: Path) -> Iterator[None]:
    """Raises ModelError where memory is not enough; what the run has finished is kept."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch says it by a RuntimeError on a CPU
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise ModelError(
            "out of memory: 'graftrl train --dry-run' lists what every model and scorer takes; use smaller ones, lower "
            "sample_rows, microbatch_tokens or logit_elements, or use gradient_checkpointing or lora. Finished steps "
            f"are in {run}"
        ) from error


def train_in(folder: RunFolder, *, quiet: bool, bring_back: bool = False) -> None:
    """Train, or go on, in a run folder. bring_back: as of `train`."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    with memory_errors(folder.root):
        train(folder, folder.recipe(), Silent() if quiet else Terminal(), bring_back=bring_back)
    typer.echo(f"run folder: {folder.place}")

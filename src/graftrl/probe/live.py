"""Sampling for a probe: chunks of prompts, each written as a whole, so that an interrupted probe goes on.

The folder is a rollout log: `rollouts/step-N.parquet` holds chunk N of every model, `exchange/step-N.parquet` the
scores of the peer responses that GRAFT could exchange. `probe.yaml` says what was sampled from what.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from graftrl.chunks import CHUNK, Progress, Record, chunk_sizes, fill, model_files, model_record, prompts_in
from graftrl.config import Recipe
from graftrl.engines.local import LocalEngine
from graftrl.logs.rollouts import write_rollouts, write_transfers
from graftrl.probe.observe import score_candidates
from graftrl.rollout import Prompt
from graftrl.seeds import derive_seed
from graftrl.tasks import VerificationPool, build_task, grade_groups
from graftrl.training.data import PromptStream, check_lengths, prompt_length, within_limit
from graftrl.training.run_folder import RunFolder

RECORD = Record("probe", "a probe")


def sample(recipe: Recipe, root: Path, prompts: int, progress: Progress = lambda done, wanted: None) -> list[str]:
    """Have `prompts` prompts (or all that the task has) answered, graded and scored in the folder.

    Chunks that are there already are kept; when all are, no model is loaded. The prompts are the first ones that
    training with this recipe would use.

    Args:
        recipe: `method`, the steps and the optimizers are not used; `training.group_size` is n.

    Returns:
        notes for people.

    Raises:
        RunError: the folder holds something else, or responses of other models, settings or weights.
        ConfigError, DataError, ModelError: as training would.
    """
    check_identity(recipe, root)
    run = RunFolder(root)
    wanted = chunk_sizes(prompts, CHUNK)
    missing = [index for index, size in enumerate(wanted) if chunk_prompts(run, index) < size]
    if not missing:
        return []
    task = build_task(recipe.task)
    engine = LocalEngine(without_training(recipe))
    limit = recipe.sampling.max_prompt_tokens
    lengths = [prompt_length(codec) for codec in engine.codecs.values()]
    usable, notes = within_limit(task.train, lengths, limit, "training prompts")
    notes = [*task.notes, *engine.notes, *notes]
    if len(usable) < prompts:
        notes.append(f"the task has only {len(usable)} usable training prompts")
        wanted = chunk_sizes(len(usable), CHUNK)
    stream = PromptStream(usable, 1, recipe.seed)
    verification = recipe.verification
    RECORD.write(root, identity(recipe), weights(recipe))
    with VerificationPool(verification.workers, verification.limit_s) as pool:

        def answer(index: int, size: int) -> None:
            chunk = [stream.batch(index * CHUNK + i)[0] for i in range(size)]
            check_lengths(chunk, lengths, limit)
            _answer(recipe, run, engine, task, pool, index, chunk)

        fill(wanted, lambda index: chunk_prompts(run, index), answer, progress)
    return notes


def _answer(
    recipe: Recipe,
    run: RunFolder,
    engine: LocalEngine,
    task: Any,
    pool: VerificationPool,
    index: int,
    chunk: Sequence[Prompt],
) -> None:
    models, step = list(recipe.models), index + 1
    seeds = {model: derive_seed(recipe.seed, "probe", index, model) for model in models}
    groups = engine.sample(dict.fromkeys(models, chunk), recipe.training.group_size, seeds)
    grade_groups(task, [group for of_model in groups.values() for group in of_model], pool)
    transfers = score_candidates(groups, engine, recipe.sampling, exchange_seed(recipe), step)
    # The rollouts go first and come last: a chunk that has them is complete.
    run.step_file("rollouts", step).unlink(missing_ok=True)
    write_transfers(run.step_file("exchange", step), step, transfers)
    write_rollouts(
        run.step_file("rollouts", step),
        run=recipe.name,
        step=step,
        groups=groups,
        sampling=recipe.sampling,
        fingerprints={model: codec.fingerprint for model, codec in engine.codecs.items()},
        policy_version=0,
    )


def exchange_seed(recipe: Recipe) -> int:
    """Decides between equally good sources, as in selection."""
    return derive_seed(recipe.seed, "probe exchange")


def without_training(recipe: Recipe) -> Recipe:
    """The recipe without what only training needs: adapters start as the identity, checkpointing saves no memory."""
    plain = {
        name: settings.model_copy(update={"lora": None, "gradient_checkpointing": False})
        for name, settings in recipe.models.items()
    }
    return recipe.model_copy(update={"models": plain})


# Chunks ---------------------------------------------------------------------------------------------------------------


def chunk_prompts(run: RunFolder, index: int) -> int:
    """How many prompts a chunk has on disk; 0 where it is not there, or its scores are not."""
    scored = run.step_file("exchange", index + 1).exists()
    return prompts_in(run.step_file("rollouts", index + 1)) if scored else 0


def sampled_prompts(root: Path, prompts: int) -> list[str]:
    """Ids of the first `prompts` prompts of a probe's folder, in the order in which they were sampled."""
    run, found = RunFolder(root), []
    for index, size in enumerate(chunk_sizes(prompts, CHUNK)):
        file = run.step_file("rollouts", index + 1)
        if file.exists():  # a task may have fewer prompts
            ids = pl.read_parquet(file, columns=["prompt_id"])["prompt_id"].unique(maintain_order=True)
            found += ids.head(size).to_list()
    return found


# Identity -------------------------------------------------------------------------------------------------------------


def identity(recipe: Recipe) -> dict[str, Any]:
    """What the responses are a function of, apart from the versions of software."""
    content = recipe.model_dump(mode="json")
    return {
        "seed": recipe.seed,
        "group_size": recipe.training.group_size,
        "models": {name: model_record(settings) for name, settings in recipe.models.items()},
        "task": content["task"],
        "sampling": content["sampling"],
    }


def weights(recipe: Recipe) -> dict[str, list[list[Any]]]:
    """The files of every local model."""
    found = {name: model_files(settings.path) for name, settings in recipe.models.items()}
    return {name: files for name, files in found.items() if files}


def check_identity(recipe: Recipe, root: Path) -> None:
    """Raises RunError where the folder is not empty and does not hold a probe of the same models and settings."""
    held = RECORD.read(root)
    if held is not None:
        asked, files = held
        RECORD.refuse_other(root, asked, identity(recipe))
        RECORD.refuse_changed(root, files, weights(recipe))

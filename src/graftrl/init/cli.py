"""The command `graftrl init`. Nothing heavy is imported before it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer


def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE.yaml]")] = Path("recipe.yaml"),
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PATH", help="A model to train: a hub id, a directory or a .gguf; may be repeated."
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help="Default graft; grpo for one model.", show_default=False)] = None,
    task: Annotated[
        Literal["math", "code", "reasoning_gym", "function", "hidden_programs"] | None,
        typer.Option(help="What the models are asked.", show_default=False),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Training problems: a .jsonl or .parquet file, or a hub data set."),
    ] = None,
    validation: Annotated[str | None, typer.Option(metavar="SOURCE", help="Validation problems, likewise.")] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A data set of reasoning-gym; may be repeated.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Prompts of the task `function`, instead of --train.")
    ] = None,
    verifier: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Verifier of the task `function`.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]LOG", help="A stored peer: a run or a rollout log.")
    ] = None,
    scorer: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]PATH", help="A frozen model that the method asks.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the run; default the file's name.", show_default=False)] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Default 100.", show_default=False)] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of steps.", show_default=False)] = None,
    prompts_per_step: Annotated[int | None, typer.Option(min=1, help="Default 128.", show_default=False)] = None,
    group_size: Annotated[int | None, typer.Option(min=2, help="Default 8.", show_default=False)] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Default 2048.", show_default=False)] = None,
    max_response_tokens: Annotated[int | None, typer.Option(min=1, help="Default 4096.", show_default=False)] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate; default 1e-6.", show_default=False)] = None,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, typer.Option(help="Default float32.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a recipe from these options; on a terminal, ask for what is missing."""
    from transformers.utils import logging as transformers_logging

    from graftrl.errors import ConfigError
    from graftrl.init.recipe import Answers, write_recipe

    transformers_logging.disable_progress_bar()
    if steps is not None and epochs is not None:
        raise ConfigError("--steps and --epochs exclude each other")

    def ask(question: str, default: str | None) -> str:
        return str(typer.prompt(question, default=default, err=True))

    answers = Answers(
        name=name,
        models=model or (),
        peers=peer or (),
        scorers=scorer or (),
        method=method,
        task=task,
        train=train,
        validation=validation,
        datasets=dataset or (),
        prompts=prompts,
        verifier=verifier,
        steps=steps,
        epochs=epochs,
        prompts_per_step=prompts_per_step,
        group_size=group_size,
        max_prompt_tokens=max_prompt_tokens,
        max_response_tokens=max_response_tokens,
        lr=lr,
        dtype=dtype,
        seed=seed,
    )
    recipe, notes = write_recipe(answers, file, ask=ask if sys.stdin.isatty() else None, force=force)
    typer.echo(f"{file}: {recipe.method.name} on {', '.join(recipe.models)}; next: graftrl train {file} --dry-run")
    for note in notes:
        typer.echo(f"note: {note}")

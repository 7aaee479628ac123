"""The command `graftrl probe`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def probe(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL ...] [key=value ...]",
            help="Two models or more, each a hub id, a directory or a .gguf file; key=value overrides the recipe.",
        ),
    ] = None,
    task: Annotated[Path | None, typer.Option(help="YAML file with a task section, such as a recipe.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Take models, task and sampling from this recipe.")] = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(help="Read this run folder or rollout log instead of sampling; may be repeated."),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="How many prompts; default 200, of a log all.", show_default=False)
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Responses a prompt; default 8 or the recipe's.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Default 2048 or the recipe's.")] = None,
    max_response_tokens: Annotated[int | None, typer.Option(help="Default 4096 or the recipe's.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16, for models given here.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="auto or plain, for models given here.")] = None,
    delta: Annotated[
        list[float] | None, typer.Option(help="Another threshold of the gate to try; may be repeated.")
    ] = None,
    step_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts of a training step; default 128 or the recipe's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Default 0 or the recipe's.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; default runs/probe-<names>.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")] = False,
) -> None:
    """Measure what models could learn from each other, before paying for training."""
    from rich.console import Console
    from transformers.utils import logging as transformers_logging

    from graftrl.probe.command import ProbeRequest, run_probe

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    request = ProbeRequest(
        arguments=models or (),
        task=task,
        recipe=recipe,
        logs=log or (),
        prompts=prompts,
        group_size=group_size,
        max_prompt_tokens=max_prompt_tokens,
        max_response_tokens=max_response_tokens,
        dtype=dtype,
        chat_template=chat_template,
        thresholds=delta or (),
        step_prompts=step_prompts,
        seed=seed,
        threads=threads,
        out=out,
    )
    report = run_probe(request, None if as_json else Console())
    if as_json:
        typer.echo(report.to_json())

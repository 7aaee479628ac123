"""The command `graftrl plan`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plan(
    recipe_path: Annotated[Path, typer.Argument(metavar="RECIPE.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]")] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]KIND", help="h100, h200, a100, l40s, cpu or here (measured); of all policies, or of NAME."
        ),
    ] = None,
    devices: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]N", help="How many, of every policy or of NAME; default 1.")
    ] = None,
    own: Annotated[
        bool | None,
        typer.Option("--own/--shared", help="Each policy has devices of its own, or all take turns on the same."),
    ] = None,
    sampler: Annotated[
        bool | None,
        typer.Option("--sampler/--no-sampler", help="Policies sample with vLLM; default with more than one device."),
    ] = None,
    numbers: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A number of the device: tflops, fp32-tflops, bandwidth, memory, link, network (GB, GB/s), node, "
            "overhead (µs a layer), or an achieved share: products, decode, attention, stream, traffic, links.",
        ),
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Mean; default an eighth of the limit.")] = None,
    response_tokens: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]N", help="Mean; default a quarter of the limit.")
    ] = None,
    spread: Annotated[float, typer.Option(help="Standard deviation of response lengths over their mean.")] = 1.0,
    log: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Take lengths and exchange from this run or rollout log.")
    ] = None,
    exchanged: Annotated[
        float | None, typer.Option(help="Share of prompts on which a receiver gets a peer's group; default 0.1.")
    ] = None,
    contrast: Annotated[
        float | None,
        typer.Option(help="Share of prompts that a model solves in part, and trains on; default 1."),
    ] = None,
    grade_seconds: Annotated[float, typer.Option(min=0, help="Of one response in one process.")] = 0.01,
    scale: Annotated[
        int, typer.Option(min=0, max=4096, help="Also simulate 1, 2, 4, ... devices up to this many; 0: do not.")
    ] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Simulated steps.")] = 8,
    seed: Annotated[int | None, typer.Option(help="Of the simulated lengths; default the recipe's.")] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write the plots as SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate memory, tokens and time of a recipe's step on given devices. Exit code 0 whether it fits or not."""
    from rich.console import Console

    from graftrl.plan.command import PlanRequest, run_plan, write_plots
    from graftrl.plan.show import show

    found = run_plan(
        PlanRequest(
            recipe=recipe_path,
            overrides=overrides or (),
            devices=devices or (),
            device=device or (),
            own=own,
            sampler=sampler,
            numbers=numbers or (),
            prompt_tokens=prompt_tokens,
            response_tokens=response_tokens or (),
            spread=spread,
            log=log,
            exchanged=exchanged,
            contrast=contrast,
            grade_seconds=grade_seconds,
            scale=[2**i for i in range(scale.bit_length())],
            steps=steps,
            seed=seed,
        )
    )
    if plots is not None:
        write_plots(found, plots)
    if as_json:
        typer.echo(found.to_json())
    else:
        show(found, Console())

"""`graftrl logs`: what is in a rollout log, what is wrong with it, and how logs of other programs become one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from graftrl.errors import ConfigError, DataError
from graftrl.urls import local, readable

app = typer.Typer(help="Rollout logs: inspect, validate, import, score, merge.", no_args_is_help=True)

_LOG = "A run folder, a folder of Parquet files, or one file"
LogArgument = Annotated[Path, typer.Argument(metavar="PATH", help=f"{_LOG}.", parser=local)]
LogOrURL = Annotated[
    Path, typer.Argument(metavar="PATH", help=f"{_LOG}; or a run's URL.", parser=readable("responses"))
]


@app.command()
def inspect(
    path: LogOrURL, as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not tables.")] = False
) -> None:
    """Show models, steps, prompts, successes, sampling settings and what is missing."""
    from graftrl.logs.summary import headline, summarize, tables

    summary = summarize(path)
    if as_json:
        typer.echo(json.dumps(summary, ensure_ascii=False, indent=2, allow_nan=False))
        return
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    console.print(headline(summary), markup=False)
    for table in tables(summary):
        console.print()
        console.print(table)


@app.command()
def validate(
    path: LogOrURL,
    most: Annotated[int, typer.Option("--most", min=1, help="Problems to print; the rest is counted.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List torn files, faulty rows, duplicates and uneven groups; fails when there are any."""
    from graftrl.logs.validate import validate_log

    count, listed = 0, []
    for problem in validate_log(path):
        count += 1
        if count <= most and as_json:
            listed.append({**asdict(problem), "file": str(problem.file)})
        elif count <= most:
            typer.echo(str(problem))
    if as_json:
        content = {"path": str(path), "count": count, "problems": listed}
        typer.echo(json.dumps(content, ensure_ascii=False, indent=2))
    elif count > most:
        typer.echo(f"... and {count - most} more; --most prints more of them")
    if count:
        raise DataError(f"{path}: {count} problem{'s' if count > 1 else ''} found")
    if not as_json:
        typer.echo(f"{path}: no problem found")


Unknown = "; null if it is not known."
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop-token", help="A token that ends a response besides the EOS; may be repeated."),
]


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A file, or a folder of files of that format.")],
    format_: Annotated[Literal["verl", "trl"], typer.Option("--format", help="Who wrote it.")],
    model: Annotated[str, typer.Option(help="The model's name in the log.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    temperature: Annotated[str, typer.Option(help="It was sampled with" + Unknown)],
    top_p: Annotated[str, typer.Option(help="It was sampled with; 1 is off" + Unknown)],
    top_k: Annotated[str, typer.Option(help="It was sampled with; 0 (or -1) is off" + Unknown)],
    task: Annotated[Path | None, typer.Option(metavar="RECIPE.yaml", help="Take prompt ids from its task.")] = None,
    drop_unmatched: Annotated[
        bool, typer.Option("--drop-unmatched", help="Leave out prompts that the task does not have.")
    ] = False,
    reward: Annotated[str | None, typer.Option(help="Field that holds the reward. verl: score.")] = None,
    success_above: Annotated[float | None, typer.Option(help="Rewards above it become 1, all others 0.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="The model's path: fill in token ids.")] = None,
    stop_token: StopOption = None,
    assume_finished: Annotated[bool, typer.Option("--assume-finished", help="Every response ended by itself.")] = False,
    max_response_tokens: Annotated[
        int | None, typer.Option(min=1, help="The limit they were sampled with: as long ones were cut.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="The run's name in the log; default: the source's name.")] = None,
) -> None:
    """Turn rollouts of verl (JSONL) or TRL (Parquet) into a rollout log, without log-probabilities."""
    from graftrl.config import load_recipe
    from graftrl.logs.formats import READERS
    from graftrl.logs.importing import ImportSettings, import_log
    from graftrl.logs.matching import TaskPrompts

    if assume_finished and max_response_tokens is not None:
        raise ConfigError("--assume-finished and --max-response-tokens exclude each other")
    k = _known("--top-k", top_k, -1)
    settings = ImportSettings(
        model=model,
        run=run or source.stem,
        sampling=(
            _known("--temperature", temperature, 0),
            _known("--top-p", top_p, 0, 1),
            None if k is None else max(int(k), 0),
        ),
        success_above=success_above,
        drop_unmatched=drop_unmatched,
        assume_finished=assume_finished,
        max_response_tokens=max_response_tokens,
    )
    codec = None
    if tokenizer is not None:
        from graftrl.policies.config import ModelSettings
        from graftrl.policies.loading import load_skeleton

        codec = load_skeleton(model, ModelSettings(path=tokenizer, extra_stop_tokens=stop_token or []))[1]
    prompts = None if task is None else TaskPrompts(load_recipe(task).task)
    notes: list[str] = []
    report = import_log(READERS[format_](source, reward, notes), out, settings, task=prompts, codec=codec)
    typer.echo(f"{out}: {report.responses:,} responses in {report.groups:,} groups, {report.steps:,} steps")
    for note in [*notes, *report.notes()]:
        typer.echo(f"note: {note}")


@app.command()
def score(
    path: LogArgument,
    model: Annotated[str, typer.Option(help="Path or hub id of the model that wrote the responses.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the result; default: files are replaced.")] = None,
    name: Annotated[str | None, typer.Option(help="Its name in the log, if several lack log-probabilities.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Precision of the forward pass.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "auto",
    chat_template: Annotated[Literal["auto", "plain"], typer.Option(help="plain: prompts as they are.")] = "auto",
    bos: Annotated[Literal["auto", "add", "keep"], typer.Option(help="Whether prompts get a BOS.")] = "auto",
    stop_token: StopOption = None,
    microbatch_tokens: Annotated[int, typer.Option(min=1, help="Padded tokens of one forward pass.")] = 16_384,
) -> None:
    """Add log-probabilities under the source model where they are missing. An interrupted call can be repeated."""
    from transformers.utils import logging as transformers_logging

    from graftrl.logs.score import score_log
    from graftrl.policies.config import ModelSettings, SamplingSettings
    from graftrl.policies.hf import HFPolicy

    transformers_logging.disable_progress_bar()
    settings = ModelSettings(
        path=model,
        dtype=dtype,
        device=device,
        chat_template=chat_template,
        bos=bos,
        extra_stop_tokens=stop_token or [],
        microbatch_tokens=microbatch_tokens,
    )
    policy = HFPolicy(name or "source", settings, SamplingSettings())
    for note in policy.notes:
        typer.echo(f"note: {note}")
    scored = skipped = unknown = 0
    versions: set[int] = set()
    for result in score_log(path, policy, name, out):
        without = "".join(f", {count} not ({reason})" for reason, count in result.skipped.items())
        typer.echo(f"{result.file}: {result.scored} scored, {result.encoded} of them encoded from text{without}")
        scored += result.scored
        skipped += result.skipped.total()
        unknown += result.unknown_sampling
        versions |= result.versions
    typer.echo(f"{out or path}: {scored:,} responses scored, {skipped:,} left without log-probabilities")
    if len(versions) > 1:
        typer.echo(
            f"note: they were sampled by {len(versions)} versions of the model while it was trained; the "
            "log-probabilities are exact only for the version whose weights were given"
        )
    if unknown:
        typer.echo(f"note: how {unknown:,} of them were sampled is unknown; if not plainly, the values are not theirs")


@app.command()
def merge(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG ...", help="Run folders, folders of Parquet, or files.", parser=local)
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    rename: Annotated[
        list[str] | None, typer.Option(metavar="[N:]OLD=NEW", help="Rename a model, in the N-th log or in all.")
    ] = None,
    step_offset: Annotated[
        list[str] | None, typer.Option(metavar="N:K", help="Add K to the steps of the N-th log, from 1.")
    ] = None,
    drop_faulty: Annotated[
        bool, typer.Option("--drop-faulty", help="Leave out torn files, faulty responses and the rest of their groups.")
    ] = False,
) -> None:
    """Put several logs into one folder. The same response twice is kept once; a contradiction is an error."""
    from graftrl.logs.merge import merge_logs, parse_sources

    report = merge_logs(parse_sources(logs, rename or [], step_offset or []), out, drop_faulty=drop_faulty)
    for fault in report.torn:
        typer.echo(f"left out: {fault}")
    if report.faulty:
        typer.echo(f"left out: {report.faulty} faulty responses and {report.companions} others of their groups")
    if report.identical:
        typer.echo(f"{report.identical} responses occurred more than once, with the same content")
    typer.echo(f"{out}: {report.responses:,} responses, {report.steps:,} steps")


def _known(option: str, text: str, low: float, high: float = float("inf")) -> float | None:
    """A number in [low, high], or None for null."""
    if text == "null":
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}, neither a number nor null") from error
    if not low <= value <= high:
        raise ConfigError(
            f"{option} is {text}, not {f'at least {low}' if high == float('inf') else f'in [{low}, {high}]'}"
        )
    return value

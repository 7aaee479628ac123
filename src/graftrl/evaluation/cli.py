"""The command `graftrl eval`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer


def evaluate(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL ...]",
            help="A hub id, a directory, a .gguf file, or a run folder: RUN, RUN:MODEL, RUN:MODEL@STEP "
            "(a number, best, last; 0 is before training). Others are compared with the first.",
        ),
    ] = None,
    benchmarks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME_OR_PATH,...",
            help="math500, aime2024, aime2025, amc23, minerva, gsm8k, olympiadbench, humaneval+, mbpp+; a .jsonl or "
            ".parquet file; or a YAML file with a task section. Default, for runs: their validation prompts.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses to a problem in each run.")] = 8,
    runs: Annotated[int, typer.Option(min=1, help="Independent runs.")] = 5,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")] = 0.6,
    top_p: Annotated[float, typer.Option(help="In (0, 1].")] = 0.95,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Of a response; default 4096, or the limit of the runs' recipes.", show_default=False),
    ] = None,
    k: Annotated[
        str | None, typer.Option(metavar="K,...", help="Of pass@k; default 1, 2, 4, ...", show_default=False)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first problems of each benchmark.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with NAME.jsonl or NAME.parquet, instead of the hub.")
    ] = None,
    id_field: Annotated[str | None, typer.Option(help="Field of files; default id.")] = None,
    problem_field: Annotated[str | None, typer.Option(help="Field of files; default problem.")] = None,
    answer_field: Annotated[str | None, typer.Option(help="Field of files; default answer.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    template: Annotated[
        str | None,
        typer.Option(help="User message with {problem}, instead of the problem and the instruction to box the answer."),
    ] = None,
    chat_template: Annotated[
        Literal["auto", "plain"] | None, typer.Option(help="plain: prompts as they are, without a chat template.")
    ] = None,
    stop_token: Annotated[
        list[str] | None, typer.Option(help="A further token that ends a response; may be repeated.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option(help="Default float32 or the recipe's.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    sample_rows: Annotated[
        int | None, typer.Option(min=1, help="Responses sampled side by side; default 512.", show_default=False)
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with a model.")] = False,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Grading processes.")] = 2,
    limit_s: Annotated[float, typer.Option(help="Seconds to grade one response; beyond them it is wrong.")] = 5.0,
    out: Annotated[Path | None, typer.Option(help="Folder to write; default runs/eval-<names>.")] = None,
    regrade: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Grade the responses of an evaluation again; sample nothing.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Also write results.tex.")] = False,
    plots: Annotated[bool, typer.Option("--plots", help="Also draw pass@k: pass-at-k.svg and .png.")] = False,
) -> None:
    """Evaluate models on benchmarks: pass@1, pass@k, intervals, comparisons. Safe to stop and to call again."""
    from rich.console import Console
    from transformers.utils import logging as transformers_logging

    from graftrl.errors import ConfigError
    from graftrl.evaluation.benchmarks import BenchmarkOptions
    from graftrl.evaluation.command import EvalRequest, run_evaluation, run_regrade

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    console = None if as_json else Console()
    if regrade is not None:
        if models or benchmarks:
            raise ConfigError("--regrade takes models and benchmarks from its folder; leave them out")
        report = run_regrade(regrade, console, workers=workers, limit_s=limit_s, latex=latex, plots=plots)
    else:
        if not 0 < top_p <= 1:
            raise ConfigError(f"--top-p {top_p:g} is not in (0, 1]")
        options = {
            "chat_template": chat_template,
            "extra_stop_tokens": stop_token,
            "dtype": dtype,
            "device": device,
            "sample_rows": sample_rows,
            "trust_remote_code": trust_remote_code or None,
        }
        request = EvalRequest(
            models=models or (),
            benchmarks=_split(benchmarks or ()),
            benchmark_options=BenchmarkOptions(data, system, template, id_field, problem_field, answer_field),
            model_options={key: value for key, value in options.items() if value is not None},
            samples=samples,
            runs=runs,
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            limit=limit,
            k=_numbers(k),
            seed=seed,
            threads=threads,
            workers=workers,
            limit_s=limit_s,
            out=out,
            latex=latex,
            plots=plots,
        )
        report = run_evaluation(request, console)
    if as_json:
        typer.echo(report.to_json())


def _split(given: Sequence[str]) -> list[str]:
    return [name.strip() for text in given for name in text.split(",") if name.strip()]


def _numbers(text: str | None) -> list[int]:
    from graftrl.errors import ConfigError

    parts = _split([text or ""])
    bad = next((part for part in parts if not part.isdecimal()), None)
    if bad is not None:
        raise ConfigError(f"--k {text}: {bad!r} is no whole number; write --k 1,4,8")
    return [int(part) for part in parts]

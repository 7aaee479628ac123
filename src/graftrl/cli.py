"""The command line. Every error that a user can mend is one line on standard error and a non-zero exit code."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from graftrl import __version__
from graftrl.doctor.cli import doctor
from graftrl.errors import GraftrlError
from graftrl.evaluation.cli import evaluate
from graftrl.export.cli import export
from graftrl.init.cli import init
from graftrl.lab.cli import lab
from graftrl.logs.cli import app as logs_app
from graftrl.plan.cli import plan
from graftrl.probe.cli import probe
from graftrl.push.cli import push
from graftrl.report.cli import report
from graftrl.transfer.cli import app as proxies_app
from graftrl.transfer.cli import transfer
from graftrl.viewer.cli import view

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

app = typer.Typer(
    help="Cross-model RL post-training: language models that learn from each other's verified rollouts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(logs_app, name="logs")
app.add_typer(proxies_app, name="proxies")

RunOption = Annotated[
    str | None,
    typer.Option(
        "--run", metavar="FOLDER", help="Run folder, or a URL (s3://, ...); default runs/<name of the recipe>."
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing while training.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"graftrl {__version__}")
        raise typer.Exit()


@app.command()
def train(
    recipe_path: Annotated[Path, typer.Argument(metavar="RECIPE.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]")] = None,
    run: RunOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check recipe, data and models; do not train.")] = False,
    quiet: QuietOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
) -> None:
    """Train the models of a recipe."""
    from graftrl.config import load_recipe

    recipe = load_recipe(recipe_path, overrides or [])
    from graftrl.training.start import train_or_check

    train_or_check(recipe, run, check=dry_run, quiet=quiet, as_json=as_json)


@app.command()
def resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its URL.")],
    bring_back: Annotated[bool, typer.Option("--bring-back", help="Train models again that the run lost.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Continue an interrupted run from its last whole checkpoint."""
    from graftrl.training.remote import open_run
    from graftrl.training.start import train_in

    train_in(open_run(run), quiet=quiet, bring_back=bring_back)


@app.command()
def quickstart(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method.")] = 4,
    workers: Annotated[int, typer.Option(min=1, help="Runs side by side, one CPU thread each.")] = 2,
    run: Annotated[Path, typer.Option(help="Folder of the comparison.")] = Path("runs/quickstart"),
    recipe_path: Annotated[Path, typer.Option("--recipe", help="What to train.")] = Path("recipes/quickstart.yaml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress on stderr.")] = False,
) -> None:
    """Compare GRPO and GRAFT on two tiny models, from nothing to a report, in minutes on two CPU cores."""
    from rich.console import Console

    from graftrl.lab.quickstart import run_quickstart

    summary = run_quickstart(recipe_path, run, seeds=seeds, workers=workers, console=Console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps(summary, indent=2, allow_nan=False))


@app.command()
def grade(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl")],
    workers: Annotated[int, typer.Option(help="Grading processes.")] = 2,
    limit_s: Annotated[float, typer.Option(help="Wall-clock seconds for one response; beyond it the reward is 0.")] = 5,
    require_box: Annotated[bool, typer.Option(help="A response without \\boxed{} scores 0.")] = True,
    task_file: Annotated[
        Path | None,
        typer.Option("--task", metavar="FILE.yaml", help="Grade by the task section of a recipe.", show_default=False),
    ] = None,
) -> None:
    """Grade responses: each line has `answer`, or with --task the `id` of a problem, and `response`.

    Prints the lines with `reward` and `reason`.
    """
    from graftrl.tasks.grade_file import grade_file

    task = None
    if task_file is not None:
        from graftrl.config import load_task
        from graftrl.tasks import build_task

        task = build_task(load_task(task_file))
    for line in grade_file(file, workers=workers, limit_s=limit_s, require_box=require_box, task=task):
        typer.echo(json.dumps(line, ensure_ascii=False))


app.command("eval")(evaluate)
app.command()(plan)
app.command()(probe)
app.command()(doctor)
app.command()(init)
app.command()(export)
app.command()(push)
app.command()(lab)
app.command()(transfer)
app.command()(report)
app.command()(view)


def main() -> None:
    try:
        app()
    except GraftrlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of our output went away, as in `graftrl grade ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

"""The commands `graftrl transfer` and `graftrl proxies`. Nothing heavy is imported before they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from graftrl.errors import DataError

app = typer.Typer(help="Proxy pairs: save what a run taught a small model, list what there is.", no_args_is_help=True)

_MODEL = "A hub id, a folder, or a run's model, RUN:MODEL@STEP (a number, best, last; 0 is before training)."


def transfer(
    target: Annotated[str, typer.Option(help="The model to train. " + _MODEL)],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]")] = None,
    proxy: Annotated[
        Path | None, typer.Option(help="A pair that 'graftrl proxies save' wrote.", show_default=False)
    ] = None,
    proxy_base: Annotated[
        str | None, typer.Option(help="The proxy before. Default: of the expert's run.", show_default=False)
    ] = None,
    proxy_expert: Annotated[str | None, typer.Option(help="The proxy after. " + _MODEL, show_default=False)] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="Task, sampling and training. Default: of the run that made the proxy.", show_default=False),
    ] = None,
    calibration: Annotated[
        float, typer.Option("--lambda", help="Larger stays closer to the target's start; 1.5 for a much smaller proxy.")
    ] = 1.0,
    estimator: Annotated[
        Literal["sampled", "full", "top_k"], typer.Option(help="full and top_k need one tokenizer.")
    ] = "sampled",
    run: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Run folder or URL; default runs/<name of the recipe>-transfer.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything; do not train.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing while training.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
) -> None:
    """Train a target with what reinforcement learning changed in a proxy (P-OPD)."""
    from graftrl.training.start import train_or_check
    from graftrl.transfer.command import transfer_recipe

    made = transfer_recipe(
        target, proxy=proxy, base=proxy_base, expert=proxy_expert, recipe=recipe,
        calibration=calibration, estimator=estimator, overrides=overrides or [],
    )  # fmt: skip
    train_or_check(made, run, check=dry_run, quiet=quiet, as_json=as_json)


@app.command()
def save(
    source: Annotated[
        str, typer.Argument(metavar="RUN[:MODEL[@STEP]]", help="Default: the best checkpoint, else the last.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    copy_base: Annotated[
        bool, typer.Option("--copy-base/--leave-base", help="Copy the model before training, or record where it lies.")
    ] = True,
) -> None:
    """Make a proxy pair of a run: the model before and after, its recipe, what it gained."""
    from graftrl.transfer.pairs import save_pair

    pair, notes = save_pair(source, out, copy_base=copy_base)
    for note in notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{out}: {pair.summary}")


@app.command("list")
def list_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of pairs, or one pair.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that is known, as JSON.")] = False,
) -> None:
    """Show proxy pairs: model, run, step, pass@1 before and after."""
    from graftrl.transfer.pairs import find_pairs

    found = list(find_pairs(folder))
    if not found:
        raise DataError(f"{folder} holds no proxy pair; 'graftrl proxies save RUN --out {folder}/NAME' makes one")
    whole = [(path, pair) for path, pair in found if not isinstance(pair, DataError)]
    if as_json:
        typer.echo(json.dumps({str(path): pair.model_dump(mode="json") for path, pair in whole}, indent=2))
    else:
        from graftrl.transfer.show import print_pairs

        print_pairs(whole)
    broken = [str(pair) for _, pair in found if isinstance(pair, DataError)]
    if broken:
        raise DataError("; ".join(broken))

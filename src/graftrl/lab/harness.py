"""`graftrl lab`: train what a study needs, then write its page and the raw numbers."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from graftrl import __version__
from graftrl.errors import ConfigError, RunError
from graftrl.lab.jobs import duration, finished_steps, run_jobs
from graftrl.lab.measure import MEASURE_S, measure_missing, read_measures
from graftrl.lab.pages import MEASURING_RULE, SELECTION_RULE, Page, render
from graftrl.lab.pairs import PAIRS, REGIMES, Pair, Transfer
from graftrl.lab.plan import (
    WARMUP_S,
    Cell,
    Laboratory,
    RunKey,
    cells_of,
    expected_seconds,
    missing_models,
    pairs_of,
    runs_of,
    total_seconds,
)
from graftrl.lab.results import (
    COLUMNS,
    DETAILS,
    FAMILY_COLUMNS,
    MEASURED_COLUMNS,
    MEASURED_DETAILS,
    TRANSFER_COLUMNS,
    Result,
    as_measured,
    family_rows,
    measured_rows,
    read_result,
    rows,
    to_csv,
    transfer_rows,
)
from graftrl.lab.studies import BASELINE, SEEDS, STUDIES, Study
from graftrl.report.plots import require_matplotlib
from graftrl.training.run_folder import write_text

DOCS = Path("docs/results")
PAIR_TABLES = (("lab.csv", COLUMNS), ("lab-details.csv", DETAILS))
TRANSFER_TABLES = (("distillation.csv", TRANSFER_COLUMNS),)


@dataclass(frozen=True)
class Options:
    """seeds, pairs, steps: None or empty for the study's own. out: where results go; by default `docs/results`, or
    `results` beside the runs if seeds, pairs or steps were reduced. held_out: open the pairs that are kept for the
    end."""

    recipe: Path = Path("recipes/quickstart.yaml")
    root: Path = Path("runs/lab")
    out: Path | None = None
    seeds: int | None = None
    pairs: tuple[str, ...] = ()
    steps: int | None = None
    workers: int = 2
    corrected: bool = True
    held_out: bool = False

    def as_flags(self) -> str:
        """What differs from the defaults, as it is typed."""
        default = Options()
        flags = [
            f"--{name} {value}"
            for name in ("recipe", "out", "seeds", "steps", "workers")
            if (value := getattr(self, name)) != getattr(default, name)
        ]
        if self.root != default.root:
            flags.append(f"--run {self.root}")
        if self.pairs:
            flags.append(f"--pairs {','.join(self.pairs)}")
        if not self.corrected:
            flags.append("--no-holm")
        if self.held_out:
            flags.append("--held-out")
        return "".join(f" {flag}" for flag in flags)


@dataclass(frozen=True)
class _Planned:
    """parts: of a study that includes others; its cells are theirs."""

    study: Study
    pairs: list[Pair | Transfer]
    cells: list[Cell]
    parts: tuple[_Planned, ...] = ()


def planned_runs(names: Sequence[str], options: Options) -> dict[str, Any]:
    """Every run with its state and expected time, the models to be warmed up, and the time of all that is missing, as
    plain values. Refuses what cannot be planned."""
    lab, planned = _plan(names, options)
    keys = runs_of(cell for each in planned for cell in each.cells)
    expected = expected_seconds(lab, keys)
    for key in keys:
        lab.job(key, expected[key])
    models = missing_models(lab, keys)
    warm_s = sum(WARMUP_S * -(-len(of_regime) // options.workers) for of_regime in models.values())
    unmeasured = [key for key in _measured_keys(planned) if read_measures(lab.folder(key)) is None]
    measure_s = MEASURE_S * sum(len(key.models) for key in unmeasured) / options.workers
    return {
        "runs": [
            {
                "run": key.name,
                "state": _state(lab, key),
                "folder": str(lab.folder(key)),
                "expected_s": 0.0 if lab.is_finished(key) else expected[key],
            }
            for key in keys
        ],
        "finished": sum(lab.is_finished(key) for key in keys),
        "warm_up": {regime: list(of_regime) for regime, of_regime in models.items()},
        "expected_s": total_seconds(expected, lab, options.workers) + warm_s + measure_s,
        "workers": options.workers,
        "held_out": [] if options.held_out else [name for name, pair in PAIRS.items() if _is_held_out(pair)],
    }


def list_runs(names: Sequence[str], options: Options, console: Console | None = None) -> None:
    """`--dry-run`: print `planned_runs`."""
    console = console or Console()
    plan = planned_runs(names, options)
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for column in ("run", "state", "folder"):
        table.add_column(column, no_wrap=True)
    table.add_column("expected", justify="right", no_wrap=True)
    for run in plan["runs"]:
        left = "" if run["state"] == "finished" else duration(run["expected_s"])
        table.add_row(run["run"], run["state"], run["folder"], left)
    if not console.is_terminal:
        console.width = 200  # a pipe has no width; a folder's name must not be cut
    console.print(table)
    for regime, of_regime in plan["warm_up"].items():
        console.print(f"to be warmed up: {', '.join(of_regime)} in regime {regime}", highlight=False)
    console.print(
        f"{len(plan['runs'])} runs, {plan['finished']} finished; about {duration(plan['expected_s'])} with "
        f"{plan['workers']} workers",
        highlight=False,
    )
    if plan["held_out"]:
        console.print(
            f"kept for the end, opened by --held-out: {', '.join(plan['held_out'])}", highlight=False, soft_wrap=True
        )


def run_lab(
    names: Sequence[str], options: Options, console: Console | None = None, tables_only: bool = False
) -> list[Path]:
    """Train what is missing (unless `tables_only`), measure what a study needs measured, then write pages and raw
    numbers; returns the pages.

    Finished runs are never repeated and interrupted ones continued. A run that fails does not stop the others: pages
    are written from what there is, then RunError is raised.

    Raises:
        ConfigError: an unknown study or pair; a recipe without the laboratory's task; no matplotlib.
        RunError: some runs failed, or a folder holds a run of other settings.
    """
    console = console or Console()
    require_matplotlib()
    lab, planned = _plan(names, options)
    keys = runs_of(cell for each in planned for cell in each.cells)
    failure: RunError | None = None
    if not tables_only:
        failure = _train(lab, keys, options, console)
    _measure(lab, planned, options, console)
    out = options.out or (lab.base / "results" if _is_reduced(lab, planned) else DOCS)
    known: dict[Cell, Result | None] = {}
    pages = [_write_page(lab, each, options, out, known, console) for each in planned]
    _write_numbers(lab, planned, out, known, console)
    if failure is not None:
        raise failure
    return pages


def _plan(names: Sequence[str], options: Options) -> tuple[Laboratory, list[_Planned]]:
    lab = Laboratory(options.recipe, options.root, options.steps)
    included = {name for study in STUDIES.values() for name in study.includes}
    everything = [name for name, s in STUDIES.items() if name not in included and (options.held_out or not s.held_out)]
    chosen = everything if list(names) == ["all"] else list(dict.fromkeys(names))
    unknown = [name for name in chosen if name not in STUDIES]
    if unknown:
        raise ConfigError(f"unknown study {unknown[0]!r}; there are {', '.join(STUDIES)}, or all")
    if lab.steps < 1:
        raise ConfigError("--steps must be at least 1")
    return lab, [_plan_study(STUDIES[name], options) for name in chosen]


def _plan_study(study: Study, options: Options) -> _Planned:
    if study.includes:
        included = [STUDIES[name] for name in study.includes]
        parts = tuple(_plan_study(part, options) for part in included if options.held_out or not part.held_out)
        return _Planned(study, [], list(dict.fromkeys(cell for part in parts for cell in part.cells)), parts)
    pairs = pairs_of(study, options.pairs)
    waiting = next((pair for pair in pairs if _is_held_out(pair)), None)
    if waiting is not None and not options.held_out:
        raise ConfigError(
            f"the pair {waiting.name} is kept for the end: nothing but {BASELINE} is trained on it before the rule is "
            "frozen; --held-out opens it"
        )
    return _Planned(study, pairs, cells_of(study, pairs, options.seeds))


def _is_held_out(pair: Pair | Transfer) -> bool:
    return REGIMES[pair.regime].held_out


def _is_reduced(lab: Laboratory, planned: Sequence[_Planned]) -> bool:
    studies = [part.study for each in planned for part in (each.parts or (each,))]
    whole = {cell for study in studies for cell in cells_of(study, pairs_of(study))}
    return lab.reduced or not whole.issubset({cell for each in planned for cell in each.cells})


def _state(lab: Laboratory, key: RunKey) -> str:
    step = finished_steps(lab.folder(key))
    return "finished" if step >= lab.steps_of(key) else f"at step {step}" if step else "new"


def _train(lab: Laboratory, keys: Sequence[RunKey], options: Options, console: Console) -> RunError | None:
    expected = expected_seconds(lab, keys)
    left = [key for key in keys if not lab.is_finished(key)]
    console.print(
        f"{len(keys)} runs, {len(left)} to be trained, {options.workers} at a time: about "
        f"{duration(total_seconds(expected, lab, options.workers))}",
        highlight=False,
    )
    for regime, models in missing_models(lab, left).items():
        console.print(f"warming up {', '.join(models)} in regime {regime} (done once, then kept)", highlight=False)
        REGIMES[regime].warm(lab.cache, models)
    try:
        run_jobs([lab.job(key, expected[key]) for key in keys], options.workers, console)
    except RunError as error:
        return error
    return None


def _measure(lab: Laboratory, planned: Sequence[_Planned], options: Options, console: Console) -> None:
    finished = [lab.folder(key) for key in _measured_keys(planned) if lab.is_finished(key)]
    measure_missing(finished, options.workers, console)


def _measured_keys(planned: Sequence[_Planned]) -> list[RunKey]:
    return list(dict.fromkeys(k for each in planned if each.study.measured for cell in each.cells for k in cell.runs))


def _write_page(
    lab: Laboratory,
    planned: _Planned,
    options: Options,
    out: Path,
    known: dict[Cell, Result | None],
    console: Console,
) -> Path:
    results = _of_study(planned.study, _read(lab, planned.cells, known))
    there = {result.cell for result in results}
    missing = [cell for cell in planned.cells if cell not in there]
    sections = [
        Page(part.study, part.pairs, _of_study(part.study, _read(lab, part.cells, known)), options.corrected)
        for part in planned.parts or (planned,)
    ]
    text = render(planned.study, sections, _lead(lab, planned, options, results), _missing(missing, planned.cells))
    for page in sections:
        for name, svg in page.plots.items():
            write_text(out / name, svg)
    if planned.study.measured:
        for table, columns in (("", MEASURED_COLUMNS), ("-details", MEASURED_DETAILS)):
            write_text(out / f"{planned.study.name}{table}.csv", to_csv(measured_rows(results), columns))
        write_text(out / f"{planned.study.name}-families.csv", to_csv(family_rows(results), FAMILY_COLUMNS))
    path = out / f"{planned.study.name}.md"
    write_text(path, text)
    console.print(f"{path}: {len(results)} of {len(planned.cells)} results", highlight=False, soft_wrap=True)
    for cell in missing:
        console.print(f"  missing: {cell.name}", highlight=False, style="yellow")
    return path


def _of_study(study: Study, results: Sequence[Result]) -> list[Result]:
    """With the scores that the study speaks of."""
    if not study.measured:
        return list(results)
    return [measured for result in results if (measured := as_measured(result)) is not None]


def _read(lab: Laboratory, cells: Sequence[Cell], known: dict[Cell, Result | None]) -> list[Result]:
    for cell in cells:
        if cell not in known:
            known[cell] = read_result(lab, cell)
    return [result for cell in cells if (result := known[cell]) is not None]


def _write_numbers(
    lab: Laboratory,
    planned: Sequence[_Planned],
    out: Path,
    known: dict[Cell, Result | None],
    console: Console,
) -> None:
    """All finished results of all studies of the kind, not only of those asked for: a table is about the folder of
    runs."""
    seeds = max([SEEDS, *(1 + cell.seed for each in planned for cell in each.cells)])
    asked = [cell for each in planned for cell in each.cells]
    for kind in {bool(each.study.grids) for each in planned}:
        cells = [cell for cell in asked if isinstance(cell.pair, Transfer) == kind]
        for study in STUDIES.values():
            if bool(study.grids) == kind:
                cells += cells_of(study, pairs_of(study), seeds)
        unique = sorted(dict.fromkeys(cells), key=lambda cell: (cell.pair.name, cell.method, cell.seed))
        results = _read(lab, unique, known)
        table = transfer_rows(results) if kind else rows(results)
        for name, columns in TRANSFER_TABLES if kind else PAIR_TABLES:
            write_text(out / name, to_csv(table, columns))
            console.print(f"{out / name}: {len(table)} rows", highlight=False, soft_wrap=True)


# What a page says about itself ----------------------------------------------------------------------------------------


def _lead(lab: Laboratory, planned: _Planned, options: Options, results: Sequence[Result]) -> str:
    training = lab.recipe.training
    trained = sorted(_ended(result) for result in results)
    when = f", trained between {trained[0]} and {trained[-1]}" if trained else ""
    lines = [
        f"Made by `graftrl lab {planned.study.name}{options.as_flags()}`, graftrl {_version()}, on {_machine()}, "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
        f"Results of {len(results)} of {len(planned.cells)} combinations of pair, method and seed{when}.",
        f"Runs: {_steps(lab, planned)} of {training.prompts_per_step} prompts × {training.group_size} responses a "
        f"model (unless a method says otherwise), optimizer steps of {training.minibatch_prompts} prompts; all else as "
        f"in `{lab.recipe_path}`.",
        f"Scores: {MEASURING_RULE if planned.study.measured else SELECTION_RULE}.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _steps(lab: Laboratory, planned: _Planned) -> str:
    """`60 steps`, or `30 steps, 40 of grpo and rstg` where methods differ."""
    methods: dict[int, dict[str, None]] = {}
    for cell in planned.cells:
        for key in cell.runs:
            methods.setdefault(lab.steps_of(key), {}).setdefault(cell.method)
    most = max(methods, key=lambda steps: len(methods[steps]), default=lab.steps)
    others = {steps: [f"`{m}`" for m in of] for steps, of in methods.items() if steps != most}
    return f"{most} steps" + "".join(f", {steps} of {' and '.join(of)}," for steps, of in others.items())


def _missing(missing: Sequence[Cell], cells: Sequence[Cell]) -> str:
    if not missing:
        return ""
    named = ", ".join(cell.name for cell in missing[:20])
    more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
    return f"**Missing: {len(missing)} of {len(cells)} results** ({named}{more}). Everything below is without them."


def _ended(result: Result) -> str:
    seconds = (result.run.folder / "metrics.jsonl").stat().st_mtime
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}"


def _version() -> str:
    """The package's version, and the commit in a checkout; `-dirty` where the package itself differs."""
    package = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=10, check=True).stdout

    try:
        commit = git("rev-parse", "--short", "HEAD").strip()
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{__version__} ({commit}{'-dirty' if changed else ''})"


def _machine() -> str:
    return f"{_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

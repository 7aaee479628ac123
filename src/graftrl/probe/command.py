"""`graftrl probe`: from what a user asks to a report on the terminal and in a folder."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from graftrl.chunks import shown, told_where
from graftrl.config import Recipe, load_recipe
from graftrl.engines.local import LocalEngine
from graftrl.errors import ConfigError
from graftrl.names import model_names
from graftrl.probe import live
from graftrl.probe.observe import Observed, observe, open_logs, use_engine_scores, use_logged_scores
from graftrl.probe.page import render_page
from graftrl.probe.report import ProbeReport, build_report
from graftrl.probe.terminal import print_report
from graftrl.report.plots import require_matplotlib
from graftrl.training.run_folder import RunFolder, disk_errors, write_text

THRESHOLDS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
PAPER_STEP = 128  # prompts a step in the paper's runs
REPORT, PAGE = "probe.json", "probe.html"


@dataclass(frozen=True)
class ProbeRequest:
    """What was asked for on the command line; None is "not given".

    arguments: models, and overrides `key=value`. logs: rollout logs to read instead of sampling. thresholds: to try
    besides THRESHOLDS, on which the suggested one rests.
    """

    arguments: Sequence[str] = ()
    task: Path | None = None
    recipe: Path | None = None
    logs: Sequence[Path] = ()
    prompts: int | None = None
    group_size: int | None = None
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    dtype: str | None = None
    chat_template: str | None = None
    seed: int | None = None
    threads: int | None = None
    thresholds: Sequence[float] = ()
    step_prompts: int | None = None
    out: Path | None = None


def run_probe(request: ProbeRequest, console: Console | None = None, progress: Console | None = None) -> ProbeReport:
    """Sample or read, analyse, write `probe.json` and `probe.html`, print.

    Args:
        console: for the result; None prints nothing. progress: for what is done so far; standard error if None.

    Raises:
        GraftrlError: one line that says what to mend. Chunks of prompts that were finished are kept.
    """
    require_matplotlib()
    if not all(math.isfinite(t) and t >= 0 for t in request.thresholds):
        raise ConfigError(f"--delta: {list(request.thresholds)} are not all numbers >= 0")
    recipe = build_recipe(request)
    thresholds = sorted({*THRESHOLDS, *request.thresholds, *_own_threshold(recipe)})
    root = request.out or Path("runs") / default_name(request, recipe)
    step_sizes = list(dict.fromkeys([_step_prompts(request, recipe), PAPER_STEP]))
    with disk_errors(root, again="the same command goes on where this one stopped", option="--out"):
        root.mkdir(parents=True, exist_ok=True)
        with RunFolder(root).locked("--out"), told_where(root, "prompts"):
            if request.logs:
                report, observed = _from_logs(request, recipe, thresholds, step_sizes)
            else:
                assert recipe is not None
                report, observed = _from_models(request, recipe, root, thresholds, step_sizes, progress)
            write_text(root / REPORT, report.to_json() + "\n")
            write_text(root / PAGE, render_page(report, observed))
    if console is not None:
        print_report(report, console)
        for file in (REPORT, PAGE):
            console.print(str(root / file), highlight=False, soft_wrap=True)
    return report


def _from_models(
    request: ProbeRequest,
    recipe: Recipe,
    root: Path,
    thresholds: Sequence[float],
    step_sizes: Sequence[int],
    progress: Console | None,
) -> tuple[ProbeReport, Observed]:
    prompts = request.prompts or 200
    with shown("prompts", progress) as progressed:
        notes = live.sample(recipe, root, prompts, progressed)
    observed = observe(open_logs([root]), prompts=live.sampled_prompts(root, prompts))
    use_logged_scores(observed)
    observed.notes.clear()  # how logs were matched is no news here
    report = build_report(
        observed,
        name=recipe.name,
        task=recipe.task.kind,
        origins={name: settings.path for name, settings in recipe.models.items()},
        thresholds=thresholds,
        step_sizes=step_sizes,
        seed=live.exchange_seed(recipe),
        notes=notes,
    )
    return report, observed


def _from_logs(
    request: ProbeRequest, recipe: Recipe | None, thresholds: Sequence[float], step_sizes: Sequence[int]
) -> tuple[ProbeReport, Observed]:
    members = open_logs(request.logs)
    observed = observe(members, limit=request.prompts)
    if recipe is None:
        use_logged_scores(observed)
        if observed.scored is None:
            observed.notes.append(
                "s is not known: these logs hold no exchanges with scores; --recipe with the models "
                f"{', '.join(member.name for member in members)} computes it"
            )
    else:
        lacking = [member.name for member in members if member.name not in recipe.models]
        if lacking:
            raise ConfigError(
                f"{request.recipe}: has no model {lacking[0]!r}; to score these logs it needs "
                f"{', '.join(member.name for member in members)} under models"
            )
        chosen = {member.name: recipe.models[member.name] for member in members}
        engine = LocalEngine(live.without_training(recipe.model_copy(update={"models": chosen})))
        use_engine_scores(observed, engine, recipe.sampling, live.exchange_seed(recipe))
        observed.notes.append("s was computed with the recipe's models as they are now, on the responses in the logs")
    report = build_report(
        observed,
        name=" and ".join(path.resolve().name for path in request.logs),
        task="a log",
        origins={member.name: str(member.folder) for member in members},
        thresholds=thresholds,
        step_sizes=step_sizes,
        seed=0 if recipe is None else live.exchange_seed(recipe),
        notes=(),
    )
    return report, observed


# What was asked -------------------------------------------------------------------------------------------------------


def build_recipe(request: ProbeRequest) -> Recipe | None:
    """The recipe that says what to sample; None for logs alone.

    Models on the command line take the task, the sampling limits and whatever else a training recipe would say from the
    file of `--task`.

    Raises:
        ConfigError: a combination that does not work, fewer than two models, or what the recipe's own checks refuse.
    """
    models = [argument for argument in request.arguments if "=" not in argument]
    overrides = [argument for argument in request.arguments if "=" in argument]
    if models and (request.recipe or request.logs):
        where = "--recipe" if request.recipe else "--log"
        raise ConfigError(
            f"{where} says which models to probe; leave out {models[0]!r}, or give models and --task alone"
        )
    if request.task and (request.recipe or request.logs):
        raise ConfigError("--task goes with models on the command line; --recipe and --log know their prompts")
    if request.recipe is not None:
        recipe = load_recipe(request.recipe, [*overrides, *_flags(request)])
        if len(recipe.models) < 2:
            raise ConfigError(f"{request.recipe}: a probe compares models, and there is one; name two under models")
        return recipe
    if request.logs:
        if overrides:
            raise ConfigError(f"override {overrides[0]!r}: there is no recipe to change; give --recipe too")
        return None
    if len(models) < 2:
        raise ConfigError(f"a probe compares two models or more, not {len(models)}; or give --recipe or --log")
    if request.task is None:
        raise ConfigError("say what to ask the models: --task FILE.yaml, a recipe or any YAML file with a task section")
    options = {"dtype": request.dtype, "chat_template": request.chat_template}
    given = {key: value for key, value in options.items() if value is not None}
    named = {name: {"path": path, **given} for name, path in zip(model_names(models), models, strict=True)}
    training = {"steps": 1, "prompts_per_step": PAPER_STEP, "minibatch_prompts": PAPER_STEP}
    base = {"name": "-".join(named), "method": "graft", "models": named, "training": training}
    return load_recipe(
        request.task, [*(f"{key}={json.dumps(value)}" for key, value in base.items()), *overrides, *_flags(request)]
    )


def _flags(request: ProbeRequest) -> list[str]:
    flags: dict[str, Any] = {
        "training.group_size": request.group_size,
        "sampling.max_prompt_tokens": request.max_prompt_tokens,
        "sampling.max_response_tokens": request.max_response_tokens,
        "seed": request.seed,
        "threads": request.threads,
    }
    return [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]


def default_name(request: ProbeRequest, recipe: Recipe | None) -> str:
    """The folder's name under runs/."""
    if request.logs:
        return "probe-" + "-".join(path.resolve().name for path in request.logs)
    assert recipe is not None
    return f"probe-{recipe.name}"


def _own_threshold(recipe: Recipe | None) -> list[float]:
    """delta of the recipe's method, if it has one."""
    value = None if recipe is None else getattr(recipe.method, "threshold", None)
    return [] if value is None else [float(value)]


def _step_prompts(request: ProbeRequest, recipe: Recipe | None) -> int:
    if request.step_prompts is not None:
        return request.step_prompts
    return PAPER_STEP if recipe is None else recipe.training.prompts_per_step

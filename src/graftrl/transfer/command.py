"""`graftrl transfer`: the recipe of a P-OPD run from a proxy and a target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graftrl.config import Recipe, apply_override, load_recipe, parse_recipe
from graftrl.errors import ConfigError
from graftrl.evaluation.models import Subject, find_models
from graftrl.transfer.pairs import read_pair, recipe_of

TARGET = "target"
_OF_THE_MODEL = ("path", "bos", "lora")  # settings that a proxy's do not say anything about for a target


def transfer_recipe(
    target: str,
    *,
    proxy: Path | None = None,
    base: str | None = None,
    expert: str | None = None,
    recipe: Path | None = None,
    calibration: float = 1.0,
    estimator: str = "sampled",
    overrides: Sequence[str] = (),
) -> Recipe:
    """A recipe that transfers what a proxy learnt to the target.

    Task, sampling, training and evaluation are those of `recipe`, by default of the run that made the proxy. The
    target's optimizer and other settings are those of the proxy there, or of the recipe's first model.

    Args:
        target, base, expert: a hub id, a folder, or a run's model as `RUN:MODEL@STEP`. Without a base, that of the
            expert's run.
        proxy: a proxy pair's folder, in place of base and expert.

    Raises:
        ConfigError: what is missing or contradicts itself; then as `load_recipe`. DataError: no proxy pair.
    """
    if (proxy is None) == (expert is None):
        raise ConfigError("give either --proxy, a saved pair, or --proxy-expert (with --proxy-base)")
    if proxy is not None and base is not None:
        raise ConfigError("--proxy holds its base; leave out --proxy-base")
    made_by: Recipe | None
    if proxy is not None:
        pair = read_pair(proxy)
        scorers, made_by = pair.scorers(proxy), recipe_of(proxy)
        model: str | None = pair.provenance.model
    else:
        assert expert is not None
        of_expert = _find(expert)
        model, made_by = of_expert.model, of_expert.recipe
        if base is None:
            if of_expert.run is None:
                raise ConfigError("--proxy-expert is no run's model, so that its --proxy-base must be given")
            base = f"{of_expert.run.root}:{of_expert.model}@0"
        scorers = {"expert": _scorer(of_expert), "base": _scorer(_find(base))}
    if recipe is not None:
        made_by = load_recipe(recipe)
    if made_by is None:
        raise ConfigError("name a recipe with --recipe: the proxy is no run's, so that nothing says which task")
    content = made_by.model_dump(mode="json")
    content |= {
        "name": f"{made_by.name}-transfer",
        "method": {"name": "p_opd", "calibration": calibration, "estimator": estimator},
        "models": {TARGET: _target(target, made_by, model)},
        "peers": {},
        "scorers": scorers,
    }
    for override in overrides:
        apply_override(content, override)
    return parse_recipe(content, "transfer")


def _find(argument: str) -> Subject:
    """One model. A checkpoint's folder is known as its run's."""
    folder = Path(argument).expanduser().resolve()
    run, step = folder.parents[2] if len(folder.parents) > 2 else folder, folder.parent.name
    if folder.parent.parent.name == "checkpoints" and (run / "config.yaml").is_file():
        argument = f"{run}:{folder.name}@{int(step.removeprefix('step-'))}"
    found = find_models([argument], {})
    if len(found) > 1:
        names = ", ".join(subject.model or subject.name for subject in found)
        raise ConfigError(f"{argument} has several models ({names}); say which, as {argument}:{found[0].model}")
    return found[0]


def _scorer(subject: Subject) -> dict[str, Any]:
    kept = {"path", "dtype", "trust_remote_code", "chat_template", "chat_template_options", "bos", "extra_stop_tokens"}
    options = subject.settings.model_dump(mode="json", include=kept, exclude_defaults=True)
    return options if subject.adapter is None else {**options, "adapter": str(subject.adapter)}


def _target(argument: str, recipe: Recipe, proxy: str | None) -> dict[str, Any]:
    subject = _find(argument)
    if subject.adapter is not None:
        raise ConfigError(f"{argument} is a LoRA adapter; a target needs whole weights: merge it into its base first")
    if subject.recipe is not None:  # goes on from a run, with that run's settings
        return subject.settings.model_dump(mode="json", exclude_defaults=True)
    like = recipe.models[proxy] if proxy in recipe.models else next(iter(recipe.models.values()))
    return {"path": argument, **like.model_dump(mode="json", exclude=set(_OF_THE_MODEL), exclude_defaults=True)}

"""The frozen models that a recipe's method reads, as an engine holds them."""

from __future__ import annotations

from graftrl.config import Recipe
from graftrl.methods.extensions import UsesScorers
from graftrl.policies.frozen import FrozenWeights
from graftrl.policies.loading import check_context
from graftrl.policies.scorers import Scorer, open_scorer


def scorer_names(recipe: Recipe) -> tuple[str, ...]:
    method = recipe.build_method()
    return method.scorers if isinstance(method, UsesScorers) else ()


def open_scorers(recipe: Recipe, frozen: FrozenWeights) -> dict[str, Scorer]:
    """By name. Raises ModelError as `open_scorer`, or for a scorer with too few positions."""
    scorers = {name: open_scorer(name, recipe.scorers[name], frozen) for name in scorer_names(recipe)}
    for name, scorer in scorers.items():
        check_context(name, scorer.model.passes.loaded.causal_lm, recipe.sampling)
    mixture = recipe.build_method().objective(0).mixture
    for name in mixture.weights if mixture is not None else ():
        if name in scorers:
            scorers[name].model.keep_hidden = True
    return scorers

"""Every method and preset trains a tiny pair through the loop; their numbers are tested beside each method."""

import numpy as np
import pytest

from graftrl.methods import METHODS, PRESETS
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder


@pytest.mark.parametrize("name", [*METHODS, *PRESETS])
def test_one_step(name, make_recipe, new_run):
    training = {"steps": 1, "prompts_per_step": 8, "group_size": 4, "minibatch_prompts": 4}
    recipe = make_recipe(name, training=training)
    run = RunFolder.create(new_run, recipe)
    train(run, recipe, Silent())
    (line,) = run.read_metrics()
    for model in ("A", "B"):
        of_model = line["models"][model]
        assert of_model["optimizer_steps"] >= 1 and of_model["skipped_nonfinite"] == 0
        assert np.isfinite(of_model["loss"]) and of_model["grad_norm"] > 0
    assert run.recipe().build_method().settings == recipe.build_method().settings


def test_scion_logs_its_damping_and_strength(make_recipe, new_run):
    recipe = make_recipe("scion", steps=2)
    run = RunFolder.create(new_run, recipe)
    train(run, recipe, Silent())
    line = run.read_metrics()[1]
    transferred = {model: line["models"][model]["trained_tokens"].get("sft", 0) for model in "AB"}
    assert sum(transferred.values()) > 0
    for model, tokens in transferred.items():
        means = line["models"][model]["token_means"]
        if tokens:
            assert 0 < means["damping"] <= 1 and 0 <= means["damped"] <= 1 and means["peer_loss"] > 0
        else:
            assert means == {}
    assert any(stats["advantage_mean"] is not None for stats in line["exchange"].values())

"""What a model argument means: paths, hub ids, and checkpoints of runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from graftrl.config import dump_recipe, parse_recipe
from graftrl.errors import ConfigError, RunError
from graftrl.evaluation.models import find_models
from graftrl.training.run_folder import RunFolder, TrainingState


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunFolder]:
    """A run folder as training leaves it, without weights: `make_run([20, 40], best=20)`."""

    def make(steps: list[int], best: int | None = None, **model: object) -> RunFolder:
        content = {
            "name": "toy",
            "method": "grpo",
            "models": {
                "A": {"path": "a", "dtype": "bfloat16", "gradient_checkpointing": True, **model},
                "B": {"path": "b"},
            },
            "task": {"kind": "hidden_programs"},
            "training": {"steps": 40},
        }
        run = RunFolder(tmp_path / "run")
        run.root.mkdir(exist_ok=True)
        (run.root / "config.yaml").write_text(dump_recipe(parse_recipe(content, "test")))
        for step in steps:
            for name, prepend in (("A", True), ("B", False)):
                folder = run.checkpoint(step) / name
                folder.mkdir(parents=True)
                (folder / "policy.json").write_text(json.dumps({"prepend_bos": prepend}))
            state = TrainingState(step=step, best_step=best)
            (run.checkpoint(step) / "state.json").write_text(json.dumps(asdict(state)))
        return run

    return make


def test_paths_and_hub_ids_are_models_by_themselves(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "config.yaml").write_text("a model may have one too")
    arguments = ["org/some-model", str(tmp_path / "m"), "x/m.gguf", "other/m"]
    found = find_models(arguments, {"dtype": "bfloat16"})
    assert [s.name for s in found] == ["some-model", "m", "m-2", "m-3"]
    assert [s.settings.path for s in found] == [s.origin for s in found] == arguments
    assert all(s.settings.dtype == "bfloat16" and s.step is None and s.recipe is None for s in found)


def test_a_run_is_its_models_at_the_best_checkpoint(make_run):
    run = make_run([20, 40], best=20)
    a, b = find_models([str(run.root)], {})
    assert [(s.name, s.step) for s in (a, b)] == [("run-A-step20", 20), ("run-B-step20", 20)]
    assert a.settings.path == str(run.checkpoint(20) / "A") == a.files_at and a.adapter is None
    assert a.note == f"{run.root}: step 20, the best in validation"
    # the recipe's settings hold, but training needs more than evaluation, and the BOS was decided before training
    assert (a.settings.dtype, a.settings.gradient_checkpointing) == ("bfloat16", False)
    assert (a.settings.bos, b.settings.bos) == ("add", "keep")


def test_without_validation_it_is_the_newest(make_run):
    run = make_run([20, 40])
    found = find_models([str(run.root)], {"dtype": "float32"})
    assert [s.step for s in found] == [40, 40] and "the newest, for nothing was validated" in found[0].note
    assert found[0].settings.dtype == "float32"  # an option overrules the recipe


def test_model_and_step_can_be_chosen(make_run):
    run = make_run([20, 40], best=20)
    wanted = {":A": ("A", 20), ":B@40": ("B", 40), ":B@best": ("B", 20), ":A@last": ("A", 40)}
    for text, expected in wanted.items():
        (found,) = find_models([f"{run.root}{text}"], {})
        assert (found.origin, found.step) == (f"{run.root}:{expected[0]}@{expected[1]}", expected[1])
    assert [s.step for s in find_models([f"{run.root}@last"], {})] == [40, 40]
    before, after = find_models([f"{run.root}:A@0", f"{run.root}:A"], {})
    assert (before.settings.path, before.step, before.settings.bos) == ("a", 0, "auto")
    assert (before.name, after.name) == ("run-A-step0", "run-A-step20") and before.note is None


def test_lora_weights_go_on_the_models_own(make_run):
    run = make_run([20], lora={"rank": 4})
    (found,) = find_models([f"{run.root}:A"], {})
    assert found.settings.path == "a" and found.settings.lora is not None
    assert found.adapter == run.checkpoint(20) / "A" and found.files_at == str(found.adapter)
    (before,) = find_models([f"{run.root}:A@0"], {})
    assert before.settings.lora is None and before.adapter is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RUN:C", "has no model 'C'; it trained A, B"),
        ("RUN@30", "has no checkpoint of step 30; it has 20, 40"),
        ("RUN@best", "was not validated, so that no checkpoint is its best"),
        ("RUN@soon", "write a step, 'best' or 'last' after '@'"),
        ("nowhere:A", "nowhere is no run folder"),
        ("nowhere@20", "nowhere is no run folder"),
    ],
)
def test_what_a_run_does_not_have_is_said(make_run, text, message):
    run = make_run([20, 40])
    with pytest.raises(RunError, match=message):
        find_models([text.replace("RUN", str(run.root))], {})


def test_a_run_without_a_checkpoint_has_only_its_start(make_run):
    run = make_run([])
    with pytest.raises(RunError, match="no checkpoint yet; '@0' evaluates"):
        find_models([str(run.root)], {})
    assert [s.settings.path for s in find_models([f"{run.root}@0"], {})] == ["a", "b"]


def test_no_model_and_bad_options():
    with pytest.raises(ConfigError, match="name a model to evaluate"):
        find_models([], {})
    with pytest.raises(ConfigError, match="--sample_rows"):
        find_models(["x/y"], {"sample_rows": 0})

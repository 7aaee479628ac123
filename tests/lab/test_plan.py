"""Which runs a study needs, how they are set up, and how long they should take."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_runs import finish, laboratory

from graftrl.config import load_recipe
from graftrl.errors import ConfigError
from graftrl.lab import pages
from graftrl.lab.cache import warm_folders
from graftrl.lab.models import LAB_MODELS
from graftrl.lab.pairs import PAIRS, REGIMES
from graftrl.lab.plan import (
    Laboratory,
    RunKey,
    cell_of,
    cells_of,
    expected_seconds,
    log_of,
    missing_models,
    pairs_named,
    runs_of,
    total_seconds,
)
from graftrl.lab.studies import STUDIES

TABLES = {"main", "stored", "ablation", "designs", "delta", "position", "cost", "stability"}


def _runs(study: str, seeds: int = 1) -> list[RunKey]:
    return runs_of(cells_of(STUDIES[study], pairs_named(STUDIES[study].pairs), seeds))


def test_three_pairs_differ_in_architecture_tokenizer_and_size() -> None:
    pairs = [PAIRS[name] for name in STUDIES["main"].pairs]
    assert len(pairs) == 3
    for pair in pairs:
        first, second = (LAB_MODELS[model] for model in pair.models)
        assert first.architecture != second.architecture
        assert first.tokenizer != second.tokenizer
        assert (first.hidden_size, first.intermediate_size) != (second.hidden_size, second.intermediate_size)


def test_every_table_of_the_paper_is_a_study_of_known_pairs_and_parts() -> None:
    assert STUDIES.keys() >= TABLES
    for study in STUDIES.values():
        assert pairs_named(study.pairs)
        assert set(study.references) <= set(study.methods)
        assert set(study.parts) <= pages.PARTS.keys()
        assert set(dict(study.labels)) <= set(study.methods)


@pytest.mark.parametrize("study", STUDIES)
def test_every_run_of_every_study_is_a_valid_recipe(study: str, tmp_path: Path) -> None:
    lab = laboratory(tmp_path, steps=None)
    folders = set()
    for key in _runs(study):
        job = lab.job(key, 1.0)
        recipe = load_recipe(job.recipe, job.overrides)
        assert recipe.seed == key.seed
        assert tuple(recipe.models) == key.models
        assert tuple(recipe.peers) == ((key.source,) if key.source else ())
        assert recipe.training.steps == 60
        assert recipe.task.validation_size == recipe.evaluation.prompts == 960
        assert {name: getattr(recipe.task, name) for name in REGIMES[key.regime].task} == REGIMES[key.regime].task
        for model, settings in recipe.models.items():
            assert settings.path == str(lab.model_folder(key.regime, model))
            assert settings.optimizer.lr == 3e-4
        folders.add(job.folder)
    assert len(folders) == len(_runs(study))


@pytest.mark.parametrize(
    ("method", "name", "option", "value"),
    [
        ("grpo-n16", "grpo", "group_size", 16),
        ("grpo-n32", "grpo", "group_size", 32),
        ("graft", "graft", "group_size", 8),
        ("hacpo", "hacpo", "minibatch_prompts", 16),
        ("sgt", "sgt", "minibatch_prompts", 8),
    ],
)
def test_methods_set_what_their_name_says(method: str, name: str, option: str, value: int, tmp_path: Path) -> None:
    job = laboratory(tmp_path).job(cell_of(PAIRS["A-B"], method, 3).runs[0], 1.0)
    recipe = load_recipe(job.recipe, job.overrides)
    assert recipe.method.name == name
    assert getattr(recipe.training, option) == value


def test_runs_are_shared_between_pairs_and_studies() -> None:
    assert len(_runs("main")) == 3 * 3 + 3 * 3  # GRPO with three n once per model; three methods once per pair
    assert len(_runs("main", seeds=5)) == 90
    assert RunKey("base", ("A",), "grpo", 0) in _runs("main")
    assert set(_runs("stability")) <= set(_runs("main"))
    assert set(_runs("position")) <= set(_runs("ablation"))
    new = set(_runs("stored")) - set(_runs("main"))
    assert {key.method for key in new} == {"graft-stored"}
    assert len(new) == 6  # each of three pairs in both directions


def test_a_stored_peer_is_the_peers_own_run_of_the_same_seed_and_comes_first(tmp_path: Path) -> None:
    lab = laboratory(tmp_path)
    keys = runs_of([cell_of(PAIRS["A-C"], "graft-stored", 2)])
    assert [key.name for key in keys] == [
        "C grpo seed 2", "A-from-C graft-stored seed 2", "A grpo seed 2", "C-from-A graft-stored seed 2",
    ]  # fmt: skip
    job = lab.job(keys[1], 1.0)
    assert job.after == (lab.folder(keys[0]),)
    assert log_of(keys[1]) == keys[0]
    assert load_recipe(job.recipe, job.overrides).peers["C"].log == [lab.folder(keys[0])]


def test_seeds_are_the_outer_loop() -> None:
    seeds = [cell.seed for cell in cells_of(STUDIES["main"], pairs_named(["A-B"]), 3)]
    assert seeds == sorted(seeds)
    assert set(seeds) == {0, 1, 2}


def test_reduced_runs_lie_apart_and_regimes_have_models_of_their_own(tmp_path: Path) -> None:
    key = RunKey("base", ("A", "B"), "graft", 0)
    whole, reduced, same = (laboratory(tmp_path, steps) for steps in (None, 2, 60))
    assert whole.folder(key) == whole.root / "base" / "A-B" / "graft-seed0"
    assert reduced.folder(key) == whole.root / "steps-2" / "base" / "A-B" / "graft-seed0"
    assert same.folder(key) == whole.folder(key)
    of_b = {regime: whole.model_folder(regime, "B") for regime in REGIMES}
    assert of_b["base"] == of_b["lenient"]  # only the rewards differ
    assert len(set(of_b.values())) == len(REGIMES) - 1
    assert whole.model_folder("style", "A") == whole.model_folder("base", "A")


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown laboratory pair 'A-Z'; there are A-B, A-C"):
        pairs_named(["A-Z"])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: x\nmethod: grpo\nmodels: {A: {path: a}}\ntask: {kind: function, prompts: 'a:b', "
                      "verifier: 'a:c'}\ntraining: {steps: 1}\n")  # fmt: skip
    with pytest.raises(ConfigError, match=r"needs task\.kind hidden_programs"):
        _ = Laboratory(recipe, tmp_path).recipe


def test_time_is_told_by_finished_runs_of_a_kind_and_scaled_for_the_others(tmp_path: Path) -> None:
    lab = laboratory(tmp_path)
    keys = _runs("main", seeds=2)
    before = expected_seconds(lab, keys)
    assert before[RunKey("base", ("A",), "grpo-n32", 0)] > before[RunKey("base", ("A",), "grpo", 0)]
    finish(lab, RunKey("base", ("A",), "grpo", 0))
    after = expected_seconds(lab, keys)
    ratio = after[RunKey("base", ("A",), "grpo", 1)] / before[RunKey("base", ("A",), "grpo", 1)]
    assert after[RunKey("base", ("A",), "grpo", 1)] == pytest.approx(6.0 + 10 * 0.5)  # the start, ten steps
    other = RunKey("base", ("A", "B"), "graft", 1)
    assert after[other] / before[other] == pytest.approx(ratio)
    left = sum(seconds for key, seconds in after.items() if not lab.is_finished(key))
    assert total_seconds(after, lab, 2) == pytest.approx(left / 2)


@pytest.mark.parametrize("regime", REGIMES)
def test_models_are_built_where_runs_look_for_them(
    regime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graftrl.lab.pairs.ensure_warm_pair", warm_folders)  # same arguments, builds nothing
    lab = laboratory(tmp_path)
    for model in LAB_MODELS:
        assert REGIMES[regime].warm(lab.cache, [model]) == {model: lab.model_folder(regime, model)}


def test_models_that_are_missing_are_told(tmp_path: Path) -> None:
    lab = laboratory(tmp_path)
    keys = runs_of([cell_of(PAIRS["A-B"], "graft", 0), cell_of(PAIRS["A-C"], "grpo", 0)])
    assert missing_models(lab, keys) == {"base": ["A", "B", "C"]}
    lab.model_folder("base", "A").mkdir(parents=True)
    assert missing_models(lab, keys) == {"base": ["B", "C"]}

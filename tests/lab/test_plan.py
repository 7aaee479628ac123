"""Which runs a study needs, how they are set up, and how long they should take."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_runs import finish, laboratory

from graftrl.config import load_recipe
from graftrl.errors import ConfigError
from graftrl.lab import pages
from graftrl.lab.cache import warm_folders
from graftrl.lab.models import LAB_MODELS, build_model
from graftrl.lab.pairs import PAIRS, REGIMES, TRANSFERS
from graftrl.lab.plan import (
    Laboratory,
    RunKey,
    cell_of,
    cells_of,
    expected_seconds,
    missing_models,
    pairs_of,
    runs_of,
    total_seconds,
)
from graftrl.lab.studies import STUDIES, lab_method

TABLES = {"main", "stored", "ablation", "designs", "delta", "position", "cost", "stability"}


def _runs(study: str, seeds: int = 1) -> list[RunKey]:
    return runs_of(cells_of(STUDIES[study], pairs_of(STUDIES[study]), seeds))


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
        assert bool(pairs_of(study)) != bool(study.includes)
        assert set(study.includes) <= STUDIES.keys()
        assert study.includes or set(study.references) <= set(study.methods)
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
        method = lab_method(key.method)
        peer = method.log if method.trains == "transfer" else key.source and key.source.models[0]
        assert tuple(recipe.peers) == ((peer,) if peer else ())
        assert set(recipe.scorers) == set(dict(method.scorers))
        assert recipe.training.steps == lab.steps_of(key)
        assert recipe.task.validation_size == recipe.evaluation.prompts == 960
        regime = REGIMES[key.regime]
        expected = regime.task_config().model_dump(mode="json", include=set(regime.task))
        assert recipe.task.model_dump(mode="json", include=set(regime.task)) == expected
        for model, settings in recipe.models.items():
            start = lab.folder(key.start) / "checkpoints" / "step-000040" / model if key.start else None
            assert settings.path == str(start or lab.model_folder(key.regime, model))
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
    assert keys[1].source == keys[0]
    assert load_recipe(job.recipe, job.overrides).peers["C"].log == [lab.folder(keys[0])]


def _one(transfer: str, method: str, seed: int = 0) -> RunKey:
    return cell_of(TRANSFERS[transfer], method, seed).runs[0]


def test_a_transfer_reads_the_proxys_run_of_the_same_seed_before_and_after(tmp_path: Path) -> None:
    lab = laboratory(tmp_path, steps=None)
    proxy, target = runs_of([cell_of(TRANSFERS["M-A"], "p_opd", 2)])
    assert (proxy.name, target.name) == ("M transfer grpo seed 2", "A-from-M transfer p_opd seed 2")
    job = lab.job(target, 1.0)
    assert job.after == (lab.folder(proxy),)
    scorers = load_recipe(job.recipe, job.overrides).scorers
    assert scorers["expert"].path == str(lab.folder(proxy) / "checkpoints" / "step-000040" / "M")
    assert scorers["base"].path == str(lab.model_folder("transfer", "M"))


@pytest.mark.parametrize(
    ("steps", "quarter", "taken", "every"), [(None, 1, 10, 10), (None, 2, 20, 10), (10, 1, 2, 2), (2, 1, 1, 1)]
)
def test_experts_are_taken_from_checkpoints_that_the_proxys_run_keeps(
    steps: int | None, quarter: int, taken: int, every: int, tmp_path: Path
) -> None:
    lab = laboratory(tmp_path, steps)
    key = _one("M-A", f"p_opd-quarter-{quarter}")
    job = lab.job(key, 1.0)
    expert = load_recipe(job.recipe, job.overrides).scorers["expert"].path
    assert expert.endswith(f"M/grpo-seed0/checkpoints/step-{taken:06d}/M")
    assert key.source is not None
    of_proxy = lab.job(key.source, 1.0)
    checkpoint = load_recipe(of_proxy.recipe, of_proxy.overrides).checkpoint
    assert checkpoint.every == every
    assert checkpoint.keep >= lab.steps_of(key.source) // every


def test_a_sequence_goes_on_from_what_the_middle_model_learnt(tmp_path: Path) -> None:
    lab = laboratory(tmp_path, steps=None)
    keys = runs_of([cell_of(TRANSFERS["M-S-A"], "p_opd", 1)])
    assert [key.who for key in keys] == ["M", "S-from-M", "A-from-S-from-M"]
    job = lab.job(keys[2], 1.0)
    scorers = load_recipe(job.recipe, job.overrides).scorers
    assert scorers["expert"].path == str(lab.folder(keys[1]) / "checkpoints" / "step-000030" / "S")
    assert scorers["base"].path == str(lab.model_folder("transfer", "S"))


def test_a_trained_target_starts_where_its_own_run_ended(tmp_path: Path) -> None:
    lab = laboratory(tmp_path, steps=None)
    keys = runs_of([cell_of(TRANSFERS["M-A_trained"], "opd", 0)])
    assert [key.who for key in keys] == ["M", "A", "A_trained-from-M"]
    job = lab.job(keys[2], 1.0)
    assert set(job.after) == {lab.folder(key) for key in keys[:2]}
    start = load_recipe(job.recipe, job.overrides).models["A"].path
    assert start == str(lab.folder(keys[1]) / "checkpoints" / "step-000040" / "A")


def test_transfers_share_runs_and_side_parts_have_fewer_seeds() -> None:
    study = STUDIES["distillation"]
    cells = cells_of(study, pairs_of(study), 5)
    assert cell_of(TRANSFERS["M-A"], "grpo", 0).runs == cell_of(TRANSFERS["S-A"], "grpo", 0).runs
    seeds = {(cell.pair.name, cell.method): 0 for cell in cells}
    for cell in cells:
        seeds[cell.pair.name, cell.method] += 1
    assert [seeds["M-A", method] for method in ("grpo", "opd", "p_opd")] == [5, 5, 5]
    assert min(seeds.values()) == 3
    assert len(set(cells)) == len(cells)  # grids overlap
    assert [cell.seed for cell in cells if cell.method == "opd_ft"] == [0, 1, 2]
    assert set(study.methods) == {method for grid in study.grids for method in grid.methods}
    assert set(study.pairs) == {grid.transfer for grid in study.grids}


def test_seeds_are_the_outer_loop() -> None:
    seeds = [cell.seed for cell in cells_of(STUDIES["main"], [PAIRS["A-B"]], 3)]
    assert seeds == sorted(seeds)
    assert set(seeds) == {0, 1, 2}


def test_reduced_runs_lie_apart_and_regimes_have_models_of_their_own(tmp_path: Path) -> None:
    key = RunKey("base", ("A", "B"), "graft", 0)
    whole, reduced, same = (laboratory(tmp_path, steps) for steps in (None, 2, 60))
    assert whole.folder(key) == whole.root / "base" / "A-B" / "graft-seed0"
    assert reduced.folder(key) == whole.root / "steps-2" / "base" / "A-B" / "graft-seed0"
    assert same.folder(key) == whole.folder(key)
    of_b = {regime: whole.model_folder(regime, "B") for regime in REGIMES}
    alike = {"base", "lenient", "transfer", "stored", "three", "unequal"}  # only rewards, steps or company differ
    assert {of_b[regime] for regime in alike} == {of_b["base"]}
    assert len({of_b[regime] for regime in REGIMES.keys() - alike}) == len(REGIMES) - len(alike)
    assert whole.model_folder("style", "A") == whole.model_folder("base", "A")


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown laboratory pair 'A-Z'; there are A-B, A-C"):
        pairs_of(STUDIES["main"], ["A-Z"])
    with pytest.raises(ConfigError, match="unknown laboratory transfer 'A-B'; there are S, M, P, M-A"):
        pairs_of(STUDIES["distillation"], ["A-B"])
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


# Regimes of other pairs -----------------------------------------------------------------------------------------------


def test_a_pair_may_share_the_runs_of_another_regime() -> None:
    three = cell_of(PAIRS["A-B-C-three"], "scion", 1)
    assert [key.name for key in three.runs] == ["A-B-C scion seed 1"]
    alone = {key for name in ("A-B", "A-C") for key in cell_of(PAIRS[name], "grpo", 1).runs}
    assert set(cell_of(PAIRS["A-B-C-three"], "grpo", 1).runs) == alone
    assert cell_of(PAIRS["P-D-unequal"], "scion", 0).runs[0].regime == "unequal"


def test_in_the_stored_regime_methods_that_exchange_read_logs() -> None:
    stored = PAIRS["A-B-stored"]
    assert cell_of(stored, "graft", 3).runs == cell_of(PAIRS["A-B"], "graft-stored", 3).runs
    assert cell_of(stored, "scion", 3).runs[0].source == RunKey("base", ("B",), "grpo", 3)
    assert cell_of(stored, "grpo", 3).runs == cell_of(PAIRS["A-B"], "grpo", 3).runs
    assert lab_method("hacpo-stored").overrides == lab_method("hacpo").overrides
    with pytest.raises(ConfigError, match="A-B-C-three: a stored peer is the other one of two models"):
        cell_of(PAIRS["A-B-C-three"], "scion-stored", 0)


def test_unequal_sizes_are_tenfold() -> None:
    sizes = [sum(p.numel() for p in build_model(LAB_MODELS[name], 0).parameters()) for name in ("P", "D")]
    assert 9 < sizes[1] / sizes[0] < 11


def test_held_out_pairs_are_in_the_held_out_study_alone() -> None:
    held_out = {name for name, pair in PAIRS.items() if REGIMES[pair.regime].held_out}
    assert held_out == set(STUDIES["scion-held-out"].pairs) and len(held_out) == 2
    assert not any(held_out & set(study.pairs) for study in STUDIES.values() if not study.held_out)

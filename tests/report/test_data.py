from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from run_builder import GRAFT_COUNTS, group, make_run, metrics_line, recipe_content

from graftrl.config import parse_recipe
from graftrl.errors import RunError
from graftrl.logs.rollouts import write_rollouts, write_transfers
from graftrl.methods import Transfer
from graftrl.policies.config import SamplingSettings
from graftrl.report.data import (
    Run,
    clipping_table,
    complementarity_table,
    cost_table,
    example_grafts,
    exchange_table,
    join_runs,
    methods_of,
    phase_table,
    read_runs,
    score_table,
    scores,
    validation_table,
)
from graftrl.training.run_folder import RunFolder

NO_GATE = {"name": "graft", "weighting": "none"}


def test_scores_by_hand(tmp_path: Path) -> None:
    grpo = {0: 0.5, 1: 0.6, 2: 0.7}
    graft = {0: 0.65, 1: 0.7, 2: 0.81}
    folders = [
        make_run(tmp_path / f"{name}{seed}", name, seed, {"A": score, "B": 0.5})
        for name, of_method in (("graft", graft), ("grpo", grpo))
        for seed, score in of_method.items()
    ]
    of_model = scores(read_runs(folders))["A"]
    assert list(of_model.methods) == ["grpo", "graft"]
    baseline, ours = of_model.methods["grpo"], of_model.methods["graft"]
    assert baseline.mean == pytest.approx(0.6)
    assert baseline.half_width == pytest.approx(0.248414, abs=1e-5)  # t(2) = 4.302653, times 0.1 / sqrt(3)
    assert baseline.gain is None
    assert ours.mean == pytest.approx(0.72)
    assert ours.gains == pytest.approx({0: 0.15, 1: 0.10, 2: 0.11})
    assert ours.gain == pytest.approx(0.12)
    assert ours.gain_half_width == pytest.approx(0.065724, abs=1e-5)  # 4.302653 times sqrt(0.0007) / sqrt(3)
    assert of_model.before is None


def test_one_seed_has_no_interval_and_an_unfinished_run_no_score(tmp_path: Path) -> None:
    done = make_run(tmp_path / "done", "grpo", 0, {"A": 0.5, "B": 0.5})
    cut = make_run(tmp_path / "cut", "grpo", 1, {"A": 0.9, "B": 0.9}, steps=3, planned_steps=4)
    # planned steps are part of a recipe, so the two differ as methods too
    score = next(iter(scores(read_runs([done, cut]))["A"].methods.values()))
    assert score.seeds == {0: 0.5}
    assert score.half_width is None


def test_gains_pair_seeds_not_positions(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "a", "grpo", 1, {"A": 0.2}),
        make_run(tmp_path / "b", "grpo", 0, {"A": 0.6}),
        make_run(tmp_path / "c", "graft", 0, {"A": 0.7}),
        make_run(tmp_path / "d", "graft", 5, {"A": 0.9}),
    ]
    score = scores(read_runs(folders))["A"].methods["graft"]
    assert score.gains == pytest.approx({0: 0.1})


def test_before_counts_each_seed_once_per_problem(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "a", "grpo", 0, {"A": 1.0}, before={"v1": 1, "v2": 0}),
        make_run(tmp_path / "b", "graft", 0, {"A": 1.0}, before={"v1": 1, "v2": 0}),
        make_run(tmp_path / "c", "graft", 1, {"A": 1.0}, before={"v1": 0, "v2": 0}),
    ]
    before = scores(read_runs(folders))["A"].before
    assert before is not None
    mean, low, high = before
    assert mean == pytest.approx(0.25)  # v1: half of two draws, v2: none
    assert (low, high) == pytest.approx((0.0, 0.5))


def test_tables_count_what_the_logs_hold(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "a", "graft", grafts=True), make_run(tmp_path / "b", "grpo")])
    counted = complementarity_table(runs).filter(method="grpo", step=1).sort("model")
    assert counted.select("model", "prompts", "all_fail", "solved_by_peer").rows() == [
        ("A", 2.0, 1.0, 1.0),
        ("B", 2.0, 0.0, 0.0),
    ]
    exchanged = exchange_table(runs).filter(direction="B->A", step=2).row(0, named=True)
    assert (exchanged["candidates"], exchanged["selected"], exchanged["admitted_successes"]) == (2, 1, 1)
    assert score_table(runs).filter(step=1).sort("score")["score"].to_list() == [0.5, 0.9]
    assert score_table(runs)["direction"].unique().to_list() == ["B->A"]
    cost = cost_table(runs).filter(method="graft").row(0, named=True)
    assert (cost["sampled_tokens"], cost["trained_tokens"], cost["passed_tokens"]) == (
        120,
        72,
        180,
    )  # 3 steps, 2 models
    assert cost["wall_s"] == 3.0
    seconds = dict(phase_table(runs).filter(method="grpo").select("phase", "seconds").iter_rows())
    assert seconds == pytest.approx({"sampling": 1.5, "training": 0.75, "other": 0.75})
    clipped = clipping_table(runs).filter(method="grpo", model="A", kind="own", step=1).row(0, named=True)
    assert (clipped["tokens"], clipped["clipped"]) == (10, 1)


def test_example_grafts_hold_both_groups(tmp_path: Path) -> None:
    grafts = example_grafts(read_runs([make_run(tmp_path / "a", "graft", grafts=True)]))
    assert [graft.step for graft in grafts] == [1, 2, 3]
    first = grafts[0]
    assert (first.receiver, first.source, first.prompt, first.reference) == ("A", "B", "question p1", "42")
    assert first.own["reward"].to_list() == [0.0, 0.0]
    assert first.peer["status"].to_list() == ["admitted", "gated"]
    assert first.peer["weight"].to_list() == [0.9, 0.0]
    assert example_grafts(read_runs([make_run(tmp_path / "b", "grpo")])) == []


def make_stored_run(root: Path, log: Path) -> Path:
    """A alone, against B's part of a log; it takes what the log has for p1 in step 3, whatever the step."""
    recipe = {**recipe_content("graft"), "models": {"A": {"path": "models/a"}}}
    recipe["peers"] = {"B": {"log": str(log), "model": "B", "match": "prompt"}}
    run = RunFolder.create(root, parse_recipe(recipe, "test"))
    for step in (1, 2):
        line = metrics_line(step, {"B->A": GRAFT_COUNTS})
        shares = {"B->A": {"all_fail_prompts": 2, "solved_by_peer": 0.5}}
        run.append_metrics({**line, "models": {"A": line["models"]["A"]}, "complementarity": shares})
        write_rollouts(
            run.step_file("rollouts", step),
            run="stored", step=step, groups={"A": [group("A", "p1", [0.0, 0.0], "mine")]},
            sampling=SamplingSettings(), fingerprints={"A": "a"},
        )  # fmt: skip
        moved = [
            Transfer("A", "B", "p1", 0, "admitted", "", 0.0, -0.7, 0.9, 0.9, 3, source_step=3),
            Transfer("A", "B", "p1", 1, "gated", "score", 1.0, 0.7, 0.5, 0.0, 3, source_step=3),
        ]
        write_transfers(run.step_file("exchange", step), step, moved)
    return root


def test_a_stored_peers_texts_come_from_its_log_and_rewards_from_the_run(tmp_path: Path) -> None:
    log = make_run(tmp_path / "log", text="theirs")
    (run,) = read_runs([make_stored_run(tmp_path / "stored", log)])
    first = example_grafts([run])[0]
    assert first.own["text"].to_list() == ["mine 0", "mine 1"]
    assert first.peer["text"].to_list() == ["theirs 0", "theirs 1"]
    assert first.peer["reward"].to_list() == [0.0, 1.0]  # the log says otherwise, and the verifier's verdict counts
    other = _of_one_model(read_runs([make_run(tmp_path / "other", "graft")])[0], "B")
    assert example_grafts([join_runs([run, other])])[0].peer.equals(first.peer)
    counted = complementarity_table([run])
    assert counted.select("step", "model", "prompts", "all_fail", "solved_by_peer").rows() == [
        (1, "A", 2.0, 2.0, 1.0),
        (2, "A", 2.0, 2.0, 1.0),
    ]
    shutil.rmtree(log)
    assert example_grafts([run])[0].peer["text"].to_list() == ["(the peer's log is not there any more)"] * 2


def test_runs_of_one_method_with_different_options_are_told_apart(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "a", NO_GATE), make_run(tmp_path / "b", "graft"), make_run(tmp_path / "c")])
    assert methods_of(runs) == ["grpo", "graft (weighting=none)", "graft (weighting=gate)"]
    assert [run.method for run in read_runs([tmp_path / "a", tmp_path / "c"])] == ["graft", "grpo"]


def test_presets_go_by_their_names_where_that_is_asked_for(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "a": "grpo", "b": {"name": "grpo", "dynamic_sampling": True}, "c": "graft-delta-0.8", "d": NO_GATE,
        "e": {"name": "graft", "threshold": 0.123},
    }  # fmt: skip
    folders = [make_run(tmp_path / name, method) for name, method in given.items()]
    assert [run.method for run in read_runs(folders, presets=True)] == [
        "grpo", "dapo", "graft (threshold=0.8)", "graft-no-gate", "graft (threshold=0.123)",
    ]  # fmt: skip
    assert [run.method for run in read_runs(folders[1:2])] == ["grpo"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no run folder"):
        read_runs([tmp_path])
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(RunError, match="cannot be read"):
        read_runs([tmp_path])


def _of_one_model(run: Run, model: str) -> Run:
    return Run(run.folder, {**run.config, "models": {model: run.config["models"][model]}}, run.method)


def test_runs_of_different_models_read_as_one(tmp_path: Path) -> None:
    """Of A's run only A counts, of B's only B; seconds and tokens are summed, step by step."""
    of_a = make_run(tmp_path / "a", "grpo", 0, {"A": 0.5, "B": 0.1}, before={"v1": 1, "v2": 0}, steps=3)
    of_b = make_run(tmp_path / "b", "grpo", 0, {"A": 0.2, "B": 0.7}, before={"v1": 1, "v2": 1}, steps=3)
    (a,), (b,) = read_runs([of_a]), read_runs([of_b])
    joined = join_runs([_of_one_model(a, "A"), _of_one_model(b, "B")])
    assert joined.models == ["A", "B"]
    assert (joined.method, joined.seed, joined.last_step) == ("grpo", 0, 3)
    assert joined.metrics[1]["wall_s"] == 4.0
    assert joined.metrics[1]["cost"] == {"sampled_tokens": 160, "trained_tokens": 80, "passed_tokens": 240}
    assert cost_table([joined])["passed_tokens"].item() == 3 * 2 * 30
    finals = validation_table([joined]).filter(step=3).select("model", "pass_at_1").rows()
    assert finals == [("A", 0.5), ("B", 0.7)]
    assert set(joined.evaluations) == {0, 3}
    assert complementarity_table([joined]).rows() == complementarity_table([a]).rows()
    assert join_runs([a]) is a

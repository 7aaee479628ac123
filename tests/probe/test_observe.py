from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from graftrl.engines.local import LocalEngine
from graftrl.errors import ConfigError, DataError
from graftrl.policies.config import SamplingSettings
from graftrl.probe import live
from graftrl.probe.observe import observe, open_logs, use_engine_scores, use_logged_scores
from graftrl.training.run_folder import RunFolder

FAIL, HALF, ALL = (0, 0), (0, 1), (1, 1)


def test_groups_are_matched_by_step_and_prompt(write_log):
    log = write_log(
        "run",
        {
            1: {"A": {"p2": HALF, "p1": FAIL}, "B": {"p1": ALL, "p2": FAIL}},
            2: {"A": {"p1": ALL, "p3": FAIL}, "B": {"p1": HALF}},
        },
    )
    observed = observe(open_logs([log]))
    assert observed.group_size == 2 and observed.by_step
    assert observed.keys == [(1, "p1"), (1, "p2"), (2, "p1")]  # p1 comes in two steps
    assert list(observed.successes["A"].values()) == [0, 1, 2]
    assert list(observed.successes["B"].values()) == [2, 0, 1]
    assert observed.notes == ["3 groups are shared by all models; the largest log has 4"]
    assert sorted(observed.tokens["A"].tolist()) == [2, 2, 2, 3, 3, 3]  # p3, which B lacks, is left out
    assert observed.truncated["B"].mean() == 0.5
    assert observe(open_logs([log]), limit=1).keys == ["p1"]
    assert observe(open_logs([log]), prompts=["p2"]).successes == {"A": {"p2": 1}, "B": {"p2": 0}}


def test_logs_without_a_common_step_are_matched_by_prompt_each_models_last(write_log):
    first = write_log("first", {1: {"A": {"p1": FAIL}}, 2: {"A": {"p1": HALF, "p2": FAIL}}})
    second = write_log("second", {7: {"B": {"p2": ALL, "p1": FAIL, "p9": ALL}}})
    observed = observe(open_logs([first, second]))
    assert not observed.by_step
    assert observed.successes == {"A": {"p1": 1, "p2": 0}, "B": {"p1": 0, "p2": 2}}
    assert any("matched by prompt" in note for note in observed.notes)


def test_models_of_the_same_name_are_told_apart_by_their_log(write_log):
    logs = [write_log(name, {1: {"A": {"p1": FAIL}}}) for name in ("grpo", "graft")]
    assert [member.name for member in open_logs(logs)] == ["grpo-A", "graft-A"]
    with pytest.raises(DataError, match="same name"):
        open_logs([logs[0], logs[0]])


def test_what_cannot_be_compared_is_refused(write_log):
    one = write_log("one", {1: {"A": {"p1": FAIL}}})
    with pytest.raises(DataError, match="one model, 'A'"):
        open_logs([one])
    elsewhere = write_log("elsewhere", {1: {"B": {"p2": FAIL}}})
    with pytest.raises(DataError, match="share no prompt"):
        observe(open_logs([one, elsewhere]))
    three = write_log("three", {1: {"C": {"p1": (0, 0, 1)}}})
    with pytest.raises(DataError, match="groups of 2 and 3 responses"):
        observe(open_logs([one, three]))
    single = write_log("single", {1: {"D": {"p1": HALF}, "E": {"p1": FAIL}}})
    file = single / "rollouts" / "step-000001.parquet"
    pl.read_parquet(file).filter(response_index=0).write_parquet(file, metadata={"graftrl": '{"schema_version": 1}'})
    with pytest.raises(DataError, match="groups of 1 responses"):
        observe(open_logs([single]))
    cold = write_log("cold", {1: {"F": {"p1": FAIL}}}, sampling=SamplingSettings(temperature=0.6))
    with pytest.raises(DataError, match=r"'F' was sampled with temperature 0\.6"):
        open_logs([one, cold])


def test_scores_come_from_the_logs_own_exchange(write_log, transfer):
    moved = [
        transfer("A", "B", "p1", 0, 0.0, 0.9),
        transfer("A", "B", "p1", 1, 1.0, None, status="rejected", reason="too long"),
        transfer("A", "B", "p2", 0, 1.0, 0.7),  # B solves p2 every time: no candidate
        transfer("A", "stored", "p1", 0, 1.0, 0.7),  # of a model that the log does not hold
    ]
    log = write_log("run", {1: {"A": {"p1": FAIL, "p2": FAIL}, "B": {"p1": HALF, "p2": ALL}}}, moved)
    observed = observe(open_logs([log]))
    use_logged_scores(observed)
    assert observed.scored is not None and list(observed.scored) == [("B", "A")]
    responses = observed.scored["B", "A"]
    np.testing.assert_array_equal(responses.scores, [0.9, np.nan])
    assert responses.right.tolist() == [False, True] and len(set(responses.groups.tolist())) == 1
    assert responses.rejected == {"too long": 1}


def test_exchanges_of_a_method_without_a_gate_hold_no_scores(write_log, transfer):
    steps = {1: {"A": {"p1": FAIL}, "B": {"p1": HALF}}}
    observed = observe(open_logs([write_log("sgt", steps, [transfer("A", "B", "p1", 1, 1.0, None)])]))
    use_logged_scores(observed)
    assert observed.scored is None


def test_a_torn_exchange_file_is_named(write_log):
    log = write_log("run", {1: {"A": {"p1": FAIL}, "B": {"p1": HALF}}})
    (log / "exchange").mkdir()
    (log / "exchange" / "step-000001.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(DataError, match="exchange: cannot be read"):
        use_logged_scores(observe(open_logs([log])))


def test_models_score_a_log_as_the_live_probe_does(recipe, tmp_path):
    settings = recipe()
    live.sample(settings, tmp_path, 24)
    observed, again = observe(open_logs([tmp_path])), observe(open_logs([tmp_path]))
    use_logged_scores(observed)
    engine = LocalEngine(settings)
    use_engine_scores(again, engine, settings.sampling, live.exchange_seed(settings))
    assert observed.scored is not None and again.scored is not None
    assert set(observed.scored) == set(again.scored) == {("A", "B"), ("B", "A")}
    for pair, responses in observed.scored.items():
        logged, computed = (np.argsort(r.groups, kind="stable") for r in (responses, again.scored[pair]))
        np.testing.assert_allclose(responses.scores[logged], again.scored[pair].scores[computed], rtol=1e-5)
        assert (responses.right[logged] == again.scored[pair].right[computed]).all()
        assert (responses.groups[logged] == again.scored[pair].groups[computed]).all()
    engine.codecs["A"].fingerprint = "another"
    with pytest.raises(ConfigError, match=r"models\.A: its tokenizer is not the one"):
        use_engine_scores(again, engine, settings.sampling, 0)


def test_engine_scores_of_models_that_never_complement_each_other_are_empty(recipe, tmp_path):
    settings = recipe()
    run = RunFolder(tmp_path)
    live.sample(settings, tmp_path, 4)
    observed = observe(open_logs([run.root]))
    observed.groups = observed.groups.clear()
    use_engine_scores(observed, LocalEngine(settings), settings.sampling, 0)
    assert observed.scored == {}

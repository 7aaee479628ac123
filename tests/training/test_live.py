"""Live peers end to end: jobs that train one model each and meet in a folder."""

import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import polars as pl
import pytest
import yaml
from peer_runs import COIN, exchanged, run_recipe, same_weights, weights_at

from graftrl.config import parse_recipe
from graftrl.errors import ConfigError, DataError, RunError
from graftrl.live.folder import SharedFolder
from graftrl.logs.reader import RolloutLog
from graftrl.report.data import example_grafts, read_runs
from graftrl.training import loop
from graftrl.training.dry_run import print_dry_run
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder
from graftrl.viewer.runs import open_runs

STEPS = 3
weights = partial(weights_at, STEPS)


@pytest.fixture(scope="module", autouse=True)
def _models_load_one_after_the_other():
    """transformers cannot load two models in two threads of a process at once."""
    lock, load = threading.Lock(), loop.open_engine

    def locked(*arguments):
        with lock:
            return load(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "open_engine", locked)
        yield


@pytest.fixture(scope="session")
def content_of(content):
    """The recipe of one side as a mapping; keyword arguments replace sections or the peer's settings."""

    def make(model, folder, method="graft", steps=STEPS, peer=None, **sections):
        recipe = content(method, steps=steps, **{"task": COIN, **sections})
        other = {"A": "B", "B": "A"}[model]
        recipe["models"] = {model: recipe["models"][model]}
        recipe["peers"] = {other: {"live": str(folder), "timeout_s": 60, **(peer or {})}}
        return recipe

    return make


@pytest.fixture(scope="session")
def recipe_of(content_of):
    return lambda *args, **sections: parse_recipe(content_of(*args, **sections), "test")


def side_by_side(recipes, root):
    """The runs of several recipes, each in a thread of its own."""
    with ThreadPoolExecutor(len(recipes)) as pool:
        runs = {name: pool.submit(run_recipe, recipe, root / name) for name, recipe in recipes.items()}
        return {name: run.result(timeout=120) for name, run in runs.items()}


@pytest.fixture(scope="module")
def pair_of_jobs(recipe_of, tmp_path_factory):
    """Two finished jobs with balanced GRAFT."""
    root = tmp_path_factory.mktemp("jobs")
    return side_by_side({name: recipe_of(name, root / "exchange") for name in "AB"}, root)


def test_two_jobs_train_as_one_that_holds_both_models(pair_of_jobs, make_recipe, tmp_path):
    together = run_recipe(make_recipe("graft", steps=STEPS, task=COIN), tmp_path / "together")
    for name, other in (("A", "B"), ("B", "A")):
        run = pair_of_jobs[name]
        assert same_weights(weights(run, name), weights(together, name))
        mine, theirs = exchanged(run), exchanged(together, receiver=name)
        assert len(mine) > 0 and mine.equals(theirs)
        for one, whole in zip(run.read_metrics(), together.read_metrics(), strict=True):
            assert one["exchange"] == {f"{other}->{name}": whole["exchange"][f"{other}->{name}"]}
            assert one["complementarity"] == {f"{other}->{name}": whole["complementarity"][f"{other}->{name}"]}


def test_metrics_say_what_came_and_what_it_cost(pair_of_jobs):
    for name, other in (("A", "B"), ("B", "A")):
        for mine, theirs in zip(pair_of_jobs[name].read_metrics(), pair_of_jobs[other].read_metrics(), strict=True):
            of_peer = mine["peers"][other]
            assert {key: of_peer[key] for key in ("groups", "missing", "responses", "contradicted", "alone")} == {
                "groups": 8, "missing": 0, "responses": 32, "contradicted": 0, "alone": 0,
            }  # fmt: skip
            assert of_peer["staleness"] == 0 and 0 <= of_peer["waited_s"] < 60
            assert of_peer["bytes_received"] == theirs["peers"][name]["bytes_published"] > 1000
            assert of_peer["reward_mean"] == pytest.approx(theirs["models"][other]["reward_mean"])


def test_what_came_is_recorded_as_a_log_and_the_folder_keeps_the_last_steps(pair_of_jobs):
    log = RolloutLog(pair_of_jobs["A"].root / "received")
    theirs = RolloutLog(pair_of_jobs["B"].root)
    assert log.models == ("B",) and log.steps("B") == [1, 2, 3]
    assert log.group_index("B").equals(theirs.group_index("B"))
    exchange = SharedFolder(pair_of_jobs["A"].root.parent / "exchange")
    assert sorted(exchange.look("A")) == sorted(exchange.look("B")) == [2, 3]


def test_report_and_viewer_show_what_the_peer_wrote(pair_of_jobs):
    root = pair_of_jobs["A"].root
    written = pl.read_parquet(root.parent / "B" / "rollouts" / "*.parquet")
    moved = exchanged(pair_of_jobs["A"]).row(0, named=True)
    here = written.filter(step=moved["step"], prompt_id=moved["prompt_id"]).sort("response_index")["text"].to_list()
    for graft in example_grafts(read_runs([root])):
        theirs = written.filter(step=graft.step).filter(pl.col("text").is_in(graft.peer["text"].to_list()))
        assert graft.source == "B" and len(theirs) >= len(graft.peer)
    (viewed,) = open_runs([root])
    columns = viewed.prompt(moved["step"], moved["prompt_id"])["columns"]
    assert [response["text"] for response in columns[-1]["responses"]] == here and columns[-1]["stored"]


def test_the_record_is_a_stored_peer_that_repeats_the_run(recipe_of, content_of, tmp_path):
    method = {"name": "graft-no-floor", "balanced": False}
    live = side_by_side({name: recipe_of(name, tmp_path / "x", method) for name in "AB"}, tmp_path)["A"]
    again = content_of("A", tmp_path / "x", method)
    again["peers"] = {"B": {"log": str(live.root / "received")}}
    stored = run_recipe(parse_recipe(again, "test"), tmp_path / "again")
    assert same_weights(weights(live, "A"), weights(stored, "A"))
    assert exchanged(live).equals(exchanged(stored))


# Alone ----------------------------------------------------------------------------------------------------------------


def test_without_a_peer_it_trains_alone_and_says_so(recipe_of, tmp_path):
    run = run_recipe(recipe_of("A", tmp_path / "x", peer={"timeout_s": 0.6}), tmp_path / "run")
    waits = [line["peers"]["B"]["waited_s"] for line in run.read_metrics()]
    assert waits[0] >= 0.6 > waits[1] >= 0.3 > waits[2] >= 0.15
    for line in run.read_metrics():
        of_peer = line["peers"]["B"]
        assert (of_peer["alone"], of_peer["groups"], of_peer["missing"], of_peer["staleness"]) == (1, 0, 8, None)
        assert any("ALONE in this step" in note for note in line["notes"])
        assert line["exchange"]["B->A"]["candidates"] == 0
    assert [pl.read_parquet(file).height for file in sorted((run.root / "received").glob("*.parquet"))] == [0, 0, 0]


def test_a_folder_that_goes_away_costs_the_peer_and_not_the_run(recipe_of, tmp_path):
    class Unmounts(Silent):
        def step(self, metrics):
            if metrics["step"] == 1:
                (tmp_path / "x").rename(tmp_path / "gone")

    run = run_recipe(recipe_of("A", tmp_path / "x", peer={"timeout_s": 0.05}), tmp_path / "run", Unmounts())
    line = run.read_metrics()[-1]
    assert line["step"] == STEPS and line["peers"]["B"]["bytes_published"] == 0
    assert any("this step was not published" in note for note in line["notes"])
    assert any("cannot be used: No such file" in note for note in line["notes"])


# Resuming -------------------------------------------------------------------------------------------------------------


class StopsAfter(Silent):
    def __init__(self, step):
        self._step = step

    def step(self, metrics):
        if metrics["step"] == self._step:
            raise KeyboardInterrupt


def test_steps_that_are_done_again_get_what_they_got_although_the_peer_is_gone(recipe_of, tmp_path):
    recipes = {name: recipe_of(name, tmp_path / "x", checkpoint={"keep": 5}) for name in "AB"}
    run = side_by_side(recipes, tmp_path)["A"]
    before, lines = weights(run, "A"), run.read_metrics()
    for step in (2, 3):
        shutil.rmtree(run.checkpoint(step))
    shutil.rmtree(tmp_path / "x" / "B")
    train(run, run.recipe(), Silent())
    assert same_weights(weights(run, "A"), before)
    assert [line["peers"] for line in run.read_metrics()] == [line["peers"] for line in lines]
    assert sorted(SharedFolder(tmp_path / "x").look("A")) == [2, 3]  # published again


def test_a_job_that_is_killed_and_resumed_meets_its_peer_again(pair_of_jobs, recipe_of, tmp_path):
    """A loses step 2 and does it again, while B waits with step 3: both end as if nothing had happened."""
    recipes = {name: recipe_of(name, tmp_path / "x") for name in "AB"}
    other = threading.Thread(target=run_recipe, args=(recipes["B"], tmp_path / "B"))
    other.start()
    run = RunFolder.create(tmp_path / "A", recipes["A"])
    with pytest.raises(KeyboardInterrupt):
        train(run, recipes["A"], StopsAfter(2))
    shutil.rmtree(run.checkpoint(2))
    train(RunFolder.open(tmp_path / "A"), recipes["A"], Silent())
    other.join(timeout=120)
    for name in "AB":
        assert same_weights(weights(RunFolder(tmp_path / name), name), weights(pair_of_jobs[name], name))


def test_a_run_that_starts_over_forgets_what_it_had_received(recipe_of, tmp_path):
    recipe = recipe_of("A", tmp_path / "x", peer={"timeout_s": 0.01}, checkpoint={"every": 5})
    run = RunFolder.create(tmp_path / "run", recipe)
    with pytest.raises(KeyboardInterrupt):
        train(run, recipe, StopsAfter(2))
    stale = (run.root / "received" / "step-000002.parquet").stat().st_ino
    train(run, recipe, Silent())  # what lies in the exchange is its own: it has kept its identity
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3]
    assert (run.root / "received" / "step-000002.parquet").stat().st_ino != stale


# Bad input ------------------------------------------------------------------------------------------------------------


def refusal(recipe, root, error):
    with pytest.raises(error) as caught:
        run_recipe(recipe, root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        ({"model": "A"}, "peers.B.model is 'A', a model of this recipe"),
        ({"live": "ray"}, "peers.B.live is 'ray', but ray.address is not set"),
        ({"live": "ray:1234"}, "peers.B.live: is 'ray:1234'; write ray://HOST:PORT"),
        ({"live": ""}, "peers.B.live: "),
        ({"timeout_s": 0}, "peers.B.timeout_s: "),
        ({"match": "prompt"}, "peers.B.match: unknown key"),
        ({"model": "../A"}, "peers.B.model: "),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(recipe_of, tmp_path, peer, said):
    with pytest.raises(ConfigError) as caught:
        recipe_of("A", tmp_path, peer=peer)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_place_that_another_run_uses_or_that_cannot_be_reached_is_one_line(pair_of_jobs, recipe_of, tmp_path):
    place = pair_of_jobs["A"].root.parent / "exchange"
    message = refusal(recipe_of("A", place), tmp_path / "other", RunError)
    assert "another run has published as 'A'" in message and "choose another place" in message
    (tmp_path / "file").write_text("")
    assert "file/x: the folder of the exchange cannot be used" in refusal(
        recipe_of("A", tmp_path / "file" / "x"), tmp_path / "run", RunError
    )


def test_a_peer_on_another_task_ends_the_run_before_anything_is_learned(recipe_of, tmp_path, pair_of_jobs):
    shutil.copytree(pair_of_jobs["A"].root.parent / "exchange", tmp_path / "x")
    shutil.rmtree(tmp_path / "x" / "A")
    held = tmp_path / "x" / "B" / "rollouts"
    (held / "step-000002.parquet").rename(held / "step-000001.parquet")
    message = refusal(recipe_of("A", tmp_path / "x"), tmp_path / "run", DataError)
    assert "holds no responses of 'B' in step 1" in message
    file = held / "step-000001.parquet"
    renamed = pl.read_parquet(file).with_columns(step=pl.lit(1, pl.Int32), prompt_id=pl.format("x{}", "prompt_id"))
    renamed.write_parquet(file, metadata={"graftrl": '{"schema_version": 1}'})
    message = refusal(recipe_of("A", tmp_path / "x"), tmp_path / "run", ConfigError)
    assert "none of its prompts is one of this step's" in message


def test_dry_run_says_where_a_live_peer_is_met_and_touches_nothing(recipe_of, tmp_path, capsys):
    print_dry_run(recipe_of("A", tmp_path / "x", peer={"max_staleness": 2}))
    assert f"live peer B: B at {tmp_path / 'x'}, waits 60 s, groups up to 2 steps old" in capsys.readouterr().out
    assert not (tmp_path / "x").exists()


# Two processes --------------------------------------------------------------------------------------------------------


def start(recipe, root):
    """`graftrl train` in a process of its own."""
    path = root.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(recipe))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "graftrl", "train", str(path), "--run", str(root)]
    with root.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def test_one_of_two_processes_is_killed_and_the_other_goes_on_alone(content_of, tmp_path):
    b = start(content_of("B", tmp_path / "x", steps=1000, peer={"timeout_s": 120}), tmp_path / "B")
    exchange = SharedFolder(tmp_path / "x")
    try:
        while not exchange.look("B"):
            assert b.poll() is None, tmp_path.joinpath("B.log").read_text()
            time.sleep(0.1)
        a = start(content_of("A", tmp_path / "x", steps=9, peer={"timeout_s": 4}), tmp_path / "A")
        run = RunFolder(tmp_path / "A")
        while len(run.read_metrics()) < 3:
            assert a.poll() is None, tmp_path.joinpath("A.log").read_text()
            time.sleep(0.05)
    finally:
        b.kill()
        b.wait()
    assert a.wait(timeout=120) == 0, tmp_path.joinpath("A.log").read_text()
    lines = run.read_metrics()
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert lines[0]["peers"]["B"]["groups"] == 8
    assert [line["peers"]["B"]["alone"] for line in lines[-2:]] == [1, 1]
    assert sum(line["peers"]["B"]["waited_s"] for line in lines[3:]) < 20
    assert "ALONE in this step" in " ".join(tmp_path.joinpath("A.log").read_text().split())

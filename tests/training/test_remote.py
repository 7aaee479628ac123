"""Runs at URLs: what a reader and another machine find there, whenever the writer is killed."""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import asdict
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner

import graftrl
from graftrl.cli import app
from graftrl.errors import ConfigError, RunError
from graftrl.evaluation.models import find_models
from graftrl.training import remote
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.remote import Remote, create_run, open_run, read_run, working_folder
from graftrl.training.run_folder import RunFolder


class Kill(BaseException):
    """A process that ends here."""


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """`machine(name)`: from now on this process is on the machine of that name, with its own disk."""

    def move(name):
        monkeypatch.setenv("GRAFTRL_CACHE", str(tmp_path / name))

    move("first")
    monkeypatch.setattr(remote, "_WAITS_S", ())
    return move


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    name = uuid.uuid4().hex
    return f"memory://{name}/run" if request.param == "memory" else f"file://{tmp_path}/there/run"


@pytest.fixture
def memory_url():
    return f"memory://{uuid.uuid4().hex}/run"


# Stand-ins for steps: small files with a known content ----------------------------------------------------------------


KEEP = 1


def content(kind, step):
    return f"{kind} of step {step}" * (50 + step)


def save(step):
    def write(folder):
        (folder / "A").mkdir()
        (folder / "A" / "model.safetensors").write_text(content("A", step))

    return write


def work(run, last):
    """Steps up to `last`, with a checkpoint after each but the first."""
    with run.locked():
        _, state, _ = run.rewind()
        while state.step < last:
            state.step += 1
            for kind in ("rollouts", "exchange"):
                file = run.step_file(kind, state.step)
                file.parent.mkdir(exist_ok=True)
                file.write_text(content(kind, state.step))
            state.metrics = {"step": state.step, "loss": 0.5 * state.step}
            if state.step == 2:
                state.best_step = 2
            if state.step > 1:
                run.save_checkpoint(state, save(state.step), keep=KEEP)
            run.append_metrics(state.metrics)
            run.settle(wait=False)
            run.upload()


def check(url):
    """What must hold whenever somebody reads; the last finished step and the newest checkpoint."""
    there = Remote(url)
    files = there.files()
    lines = there.read("metrics.jsonl").splitlines() if "metrics.jsonl" in files else []
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == list(range(1, len(steps) + 1))
    for step in steps:
        for kind in ("rollouts", "exchange"):
            assert there.read(f"{kind}/step-{step:06d}.parquet") == content(kind, step)
    whole = remote.whole_checkpoints(files)
    for step in whole:
        folder = f"checkpoints/step-{step:06d}"
        assert json.loads(there.read(f"{folder}/state.json"))["step"] == step
        assert there.read(f"{folder}/A/model.safetensors") == content("A", step)
    return len(steps), max(whole, default=0)


def snapshot(url):
    there = Remote(url)
    return {name: there.read(name) for name in there.files() if name != remote.OWNER}


@pytest.fixture
def recipe(make_recipe):
    return make_recipe("grpo", checkpoint={"keep": KEEP})


@pytest.fixture
def killed(monkeypatch):
    """`killed(n)`: the n-th thing that is done to a store from now on ends the process, half done."""
    left = {"n": None}

    def wrap(cls, name, half=None):
        real = getattr(cls, name)

        def wrapped(self, *args, **kwargs):
            if left["n"] is not None:
                left["n"] -= 1
                if left["n"] < 0:
                    if half is not None:
                        half(*args)
                    raise Kill
            return real(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, wrapped)

    def half_a_copy(source, target, *_):
        Path(target).write_text(Path(source).read_text()[:20])

    wrap(LocalFileSystem, "put_file", half_a_copy)
    wrap(LocalFileSystem, "mv")
    wrap(LocalFileSystem, "rm_file")
    wrap(MemoryFileSystem, "put_file")
    wrap(MemoryFileSystem, "rm_file")
    return lambda n: left.update(n=n)


def test_a_kill_at_any_moment_leaves_whole_steps_and_another_machine_ends_with_the_same_files(
    url, recipe, machine, killed, tmp_path
):
    whole_url = f"{url}-whole"
    work(create_run(whole_url, recipe), 4)
    assert check(whole_url) == (4, 4)
    wanted = snapshot(whole_url)
    assert remote.whole_checkpoints(wanted) == [2, 4]  # the newest and the best
    moment = 0
    while True:
        here = f"{url}-{moment}"
        machine(f"first-{moment}")
        killed(moment)
        try:
            work(create_run(here, recipe), 4)
            break
        except Kill:
            killed(None)
        finished, newest = check(here)
        assert newest <= finished <= max(newest, 1) + 1
        machine(f"second-{moment}")  # nothing of the first machine's disk is left
        if "config.yaml" in Remote(here).files():
            run = open_run(here)
            assert run.rewind()[1].step == newest
        else:
            run = create_run(here, recipe)
        work(run, 4)
        assert check(here) == (4, 4)
        assert snapshot(here) == wanted
        moment += 1
    assert moment > 20


def test_a_kill_while_another_machine_fetches_is_made_good(memory_url, recipe, machine, monkeypatch):
    work(create_run(memory_url, recipe), 4)
    real, count = MemoryFileSystem.get_file, 0
    for moment in range(100):
        machine(f"second-{moment}")
        left = [moment]

        def dies(self, source, target, *args, left=left, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                Path(target).write_text("torn")
                raise Kill
            return real(self, source, target, *args, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, "get_file", dies)
        try:
            open_run(memory_url)
            break
        except Kill:
            count += 1
        monkeypatch.setattr(MemoryFileSystem, "get_file", real)
        run = open_run(memory_url)
        assert run.latest_checkpoint() == run.checkpoint(4) and len(run.read_metrics()) == 4
        assert (run.checkpoint(4) / "A" / "model.safetensors").read_text() == content("A", 4)
    assert count >= 4


def test_what_could_not_be_put_is_put_by_resume_on_the_same_machine(memory_url, recipe, monkeypatch):
    run = create_run(memory_url, recipe)
    work(run, 2)
    real = MemoryFileSystem.put_file

    def put_file(self, source, target, **options):
        if "step-000003" in target:
            raise OSError("no route\nto host")
        real(self, source, target, **options)

    with monkeypatch.context() as broken:
        broken.setattr(MemoryFileSystem, "put_file", put_file)
        with pytest.raises(RunError) as error:
            work(run, 4)
    told = str(error.value)
    assert "cannot be written: OSError: no route" in told and "\n" not in told
    assert f"lies in {run.root}, and 'graftrl resume {memory_url}' goes on from there" in told
    assert check(memory_url) == (2, 2)
    again = open_run(memory_url)
    assert again.rewind()[1].step == 3  # the third step's checkpoint was not lost
    work(again, 4)
    assert check(memory_url) == (4, 4)


def test_a_failed_request_is_repeated(memory_url, recipe, monkeypatch):
    monkeypatch.setattr(remote, "_WAITS_S", (0.0, 0.0))
    real, failures = MemoryFileSystem.put_file, []

    def flaky(self, *args, **kwargs):
        failures.append(1)
        if len(failures) % 3:
            raise TimeoutError("slow")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put_file", flaky)
    work(create_run(memory_url, recipe), 2)
    assert check(memory_url) == (2, 2)


def test_the_working_folder_is_left_alone_where_it_is_as_far_and_known_by_its_own_path(memory_url, recipe, monkeypatch):
    work(create_run(memory_url, recipe), 2)
    monkeypatch.setattr(MemoryFileSystem, "get_file", None)  # nothing is fetched
    run = open_run(working_folder(memory_url))
    assert run.mirror is not None and run.place == memory_url
    work(run, 3)
    assert check(memory_url) == (3, 3)


def test_who_took_a_run_over_is_told_to_the_one_before(memory_url, recipe, machine):
    first = create_run(memory_url, recipe)
    work(first, 2)
    machine("second")
    second = open_run(memory_url)
    work(second, 3)
    with pytest.raises(RunError, match=r"process \d+ on .* has taken the run over"):
        work(first, 4)
    work(second, 4)
    assert check(memory_url) == (4, 4)


def test_another_run_at_the_same_url_is_not_mixed_with_an_old_working_folder(memory_url, recipe, machine):
    work(create_run(memory_url, recipe), 2)
    with pytest.raises(
        RunError, match=f"{memory_url} already holds a run; continue it with 'graftrl resume {memory_url}'"
    ):
        create_run(memory_url, recipe)
    fsspec.filesystem("memory").rm(memory_url, recursive=True)
    with pytest.raises(RunError, match="that is not there; 'graftrl resume"):
        create_run(memory_url, recipe)
    machine("second")
    work(create_run(memory_url, recipe), 2)
    machine("first")
    with pytest.raises(RunError, match="is of another run than the one that lies at"):
        open_run(memory_url)


def test_urls_that_cannot_work_are_one_line(recipe, tmp_path):
    with pytest.raises(ConfigError, match="nonsense"):
        create_run("nonsense://bucket/run", recipe)
    with pytest.raises(RunError, match="is no run folder"):
        open_run(f"file://{tmp_path}/nothing")
    with pytest.raises(RunError, match="is no run folder"):
        read_run(f"memory://{uuid.uuid4().hex}")
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    with pytest.raises(RunError, match="cannot be written"):
        create_run(f"file://{blocked}/run", recipe)
    result = CliRunner().invoke(app, ["logs", "score", "memory://x/run", "--model", "m"])
    assert "copy them here first" in str(result.exception)


def test_a_copy_follows_what_it_was_made_of(memory_url, recipe):
    run = create_run(memory_url, recipe)
    work(run, 3)
    copy = read_run(memory_url, remote.is_small)
    assert copy.checkpoint_steps() == [2, 3] and not (copy.root / "rollouts").exists()
    assert not (copy.checkpoint(2) / "A").exists()
    assert (copy.fetch(copy.checkpoint(2) / "A") / "model.safetensors").read_text() == content("A", 2)
    work(run, 5)
    copy = read_run(memory_url, remote.is_of_tables)
    assert copy.checkpoint_steps() == [2, 5] and copy.best_step() == 2 and len(copy.read_metrics()) == 5
    assert (copy.root / "rollouts" / "step-000005.parquet").read_text() == content("rollouts", 5)
    read_run(memory_url, remote.is_small)
    assert not (copy.root / "rollouts" / "step-000005.parquet").exists()


# Whole runs -----------------------------------------------------------------------------------------------------------


class Stop(Silent):
    def step(self, metrics):
        if metrics["step"] == 2:
            raise KeyboardInterrupt


def numbers(run):
    return [(line["step"], line["models"]["A"]["loss"], line["cost"]["sampled_tokens"]) for line in run.read_metrics()]


@pytest.mark.parametrize("method", ["graft-no-floor", "replay"])
def test_a_run_goes_on_elsewhere_to_the_same_numbers(memory_url, make_recipe, machine, tmp_path, method):
    recipe = make_recipe(method, steps=4)
    whole = RunFolder.create(tmp_path / "whole", recipe)
    train(whole, recipe, Silent())
    run = create_run(memory_url, recipe)
    with pytest.raises(KeyboardInterrupt):
        train(run, run.recipe(), Stop())
    shutil.rmtree(run.root)
    machine("second")
    again = open_run(memory_url)
    train(again, again.recipe(), Silent())
    assert numbers(again) == numbers(whole)
    files = Remote(memory_url).files()
    assert {f"rollouts/step-{step:06d}.parquet" for step in range(1, 5)} <= files.keys()
    for model in recipe.models:
        there = Remote(memory_url)
        there.get(f"checkpoints/step-000004/{model}/model.safetensors", tmp_path / "weights")
        ours = (tmp_path / "weights").read_bytes()
        assert ours == (whole.checkpoint(4) / model / "model.safetensors").read_bytes()


def test_commands_read_a_run_at_its_url(memory_url, content, machine, tmp_path, monkeypatch):
    sections = {"task": {**content()["task"], "validation_prompts": "toy_task:prompts"}, "evaluation": {"prompts": 4}}
    run = graftrl.train(content("graft-no-floor", steps=2, **sections), run=memory_url)
    machine("second")
    monkeypatch.chdir(tmp_path)
    there = graftrl.Run(memory_url)
    assert there.last_step == 2 and there.metrics.equals(run.metrics) and there.rollouts(2).equals(run.rollouts(2))
    last = there.last_checkpoint
    assert last is not None and (last / "A" / "model.safetensors").is_file()
    for command in (["logs", "inspect"], ["logs", "validate"], ["report"]):
        result = CliRunner().invoke(app, [*command, memory_url])
        assert result.exit_code == 0, (command, result.output, result.exception)
    assert (tmp_path / "report.html").is_file()
    machine("third")
    subject = find_models([f"{memory_url}:A@last"], {})[0]
    assert subject.origin == f"{memory_url}:A@2" and (Path(subject.settings.path) / "model.safetensors").is_file()
    assert len(find_models([memory_url], {})) == 2
    result = CliRunner().invoke(app, ["export", f"{memory_url}:B", "--out", str(tmp_path / "B")])
    assert result.exit_code == 0 and (tmp_path / "B" / "model.safetensors").is_file()
    state = RunFolder(read_run(memory_url).root).rewind()[1]
    assert asdict(state)["step"] == 2

"""Kills, full disks, two processes in one folder: through the command line, as a user meets them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from graftrl.errors import RunError
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder, disk_errors

HERE = Path(__file__).parent


def graftrl(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "graftrl", *map(str, arguments)],
        cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


@pytest.fixture
def recipe_file(content, tmp_path):
    def write(*args, **sections):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(content(*args, **sections)))
        return path

    return write


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def test_a_killed_run_resumes_and_finishes_with_the_same_numbers(recipe_file, new_run, tmp_path):
    path = recipe_file("graft-no-floor", steps=6)
    killed = graftrl("train", path, "--run", new_run)
    metrics = new_run / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    killed.kill()
    killed.communicate()
    whole = graftrl("train", path, "--run", tmp_path / "whole", "--quiet")
    resumed = graftrl("resume", new_run)
    out, err = resumed.communicate()
    assert resumed.returncode == 0 and "resuming from step" in out, err
    assert whole.wait() == 0

    def numbers(folder):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(line["step"], line["models"], line["exchange"]) for line in lines]

    assert numbers(new_run) == numbers(tmp_path / "whole") and len(numbers(new_run)) == 6


def test_ctrl_c_finishes_the_step_and_saves(recipe_file, new_run):
    process = graftrl("train", recipe_file("grpo", steps=2000), "--run", new_run)
    metrics = new_run / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "everything is saved" in out, err
    run = RunFolder.open(new_run)
    assert run.checkpoint_steps()[-1] == run.read_metrics()[-1]["step"]


def test_a_checkpoint_cut_off_while_written_is_dropped_and_said(make_recipe, new_run):
    recipe = make_recipe("grpo", steps=2)
    run = RunFolder.create(new_run, recipe)

    class Stop(Silent):
        def step(self, metrics):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, recipe, Stop())
    torn = run.checkpoints / ".step-000002.tmp" / "A"
    torn.mkdir(parents=True)
    (torn / "model.safetensors").write_bytes(b"half of it")
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "mod')  # and a torn line
    _, state, notes = run.rewind()
    assert state.step == 1 and not torn.exists()
    assert any("cut off" in note for note in notes) and any("step 1" in note for note in notes)
    assert [line["step"] for line in run.read_metrics()] == [1]


def test_a_line_lost_between_checkpoint_and_metrics_is_restored(make_recipe, new_run):
    recipe = make_recipe("grpo", steps=1)
    run = RunFolder.create(new_run, recipe)
    train(run, recipe, Silent())
    line = run.read_metrics()
    run.metrics.write_text("")
    run.rewind()
    assert run.read_metrics() == line


def test_a_folder_in_use_by_another_process_is_refused(recipe_file, new_run):
    first = graftrl("train", recipe_file("grpo", steps=2000), "--run", new_run, "--quiet")
    try:
        wait_for(lambda: (new_run / "metrics.jsonl").exists())
        second = graftrl("resume", new_run)
        _, err = second.communicate()
        assert second.returncode == 3
        assert err.startswith("error:") and "in use by another process" in err and err.count("\n") == 1
    finally:
        first.kill()
        first.communicate()


def test_a_full_disk_is_one_clear_line_and_keeps_the_last_checkpoint(make_recipe, new_run, monkeypatch):
    recipe = make_recipe("grpo", steps=3)
    run = RunFolder.create(new_run, recipe)
    original = Path.write_text

    def full(self, *args, **kwargs):
        if self.name == "state.json" and ".step-000002" in str(self):
            raise OSError(28, "No space left on device")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RunError, match="disk is full") as caught:
        train(run, recipe, Silent())
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert run.checkpoint_steps() == [1]
    assert train(run, recipe, Silent()).step == 3


@pytest.mark.skipif(os.name != "posix", reason="needs file size limits")
def test_writes_that_fail_in_native_code_are_recognised_as_a_full_disk(recipe_file, new_run):
    # A file size limit makes safetensors, torch and Parquet writers fail where a full disk would.
    import resource

    process = graftrl(
        "train", recipe_file("grpo", steps=2), "--run", new_run,
        preexec_fn=lambda: (
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
        ),
    )  # fmt: skip
    _, err = process.communicate()
    assert process.returncode == 3 and err.count("\n") == 1 and "disk is full" in err


def test_other_errors_pass_through_the_disk_check(tmp_path):
    with pytest.raises(ZeroDivisionError), disk_errors(tmp_path):
        _ = 1 / 0


def test_a_new_run_does_not_overwrite_an_old_one(make_recipe, new_run):
    recipe = make_recipe("grpo", steps=1)
    RunFolder.create(new_run, recipe)
    run = RunFolder.create(new_run, recipe)  # nothing is lost: no step was finished
    train(run, recipe, Silent())
    with pytest.raises(RunError, match="already holds a run"):
        RunFolder.create(new_run, recipe)


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path):
    process = graftrl("resume", tmp_path)
    _, err = process.communicate()
    assert process.returncode == 3 and "no config.yaml" in err

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from graftrl.config import load_recipe
from graftrl.errors import ConfigError, RunError
from graftrl.lab.jobs import LOG_FILE, Job, duration, finished_steps, run_jobs
from graftrl.training.run_folder import RunFolder

RECIPE = {
    "name": "tiny",
    "method": "grpo",
    "models": {"A": {"path": "models/a"}},
    "task": {"kind": "hidden_programs"},
    "training": {"steps": 3, "prompts_per_step": 2, "group_size": 2, "minibatch_prompts": 1},
}

# Stands for the command line: notes how it was called, then writes the steps that are missing.
STUB = """
import json, os, signal, sys, time
from pathlib import Path
assert sys.argv[1] == "resume"
folder = Path(sys.argv[2])
with (folder.parent / "calls.txt").open("a") as calls:
    calls.write(f"{folder.name} {os.environ['OMP_NUM_THREADS']}\\n")
if "bad" in folder.name:
    print("reading the data")
    print("error: the disk is full", file=sys.stderr)
    sys.exit(3)
def save(*_):
    (folder / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
metrics = folder / "metrics.jsonl"
done = metrics.read_text().count("\\n") if metrics.exists() else 0
last = 2 if "early" in folder.name else 3
for step in range(done + 1, last + 1):
    with metrics.open("a") as file:
        file.write(json.dumps({"step": step}) + "\\n")
    if "slow" in folder.name:
        time.sleep(60)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "stub.py").write_text(STUB)
    return [sys.executable, "-S", str(tmp_path / "stub.py")]


def _job(tmp_path: Path, name: str, *overrides: str, after: tuple[str, ...] = ()) -> Job:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    return Job(name, recipe, overrides, tmp_path / name, tuple(tmp_path / folder for folder in after))


def _calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "calls.txt"
    return path.read_text().splitlines() if path.exists() else []


def _quiet() -> Console:
    return Console(file=io.StringIO())


def _begin(job: Job, steps: int, torn: bool = False) -> None:
    """What a run leaves behind that was interrupted after some steps."""
    RunFolder.create(job.folder, load_recipe(job.recipe, job.overrides))
    lines = "".join(json.dumps({"step": step}) + "\n" for step in range(1, steps + 1))
    (job.folder / "metrics.jsonl").write_text(lines + ('{"step": 99' if torn else ""))


def test_new_jobs_are_trained_finished_ones_skipped_interrupted_ones_resumed(
    tmp_path: Path, command: list[str]
) -> None:
    new, finished, cut = (_job(tmp_path, name, "seed=1") for name in ("new", "finished", "cut"))
    _begin(finished, 3)
    _begin(cut, 1)
    assert run_jobs([new, finished, cut], 2, _quiet(), command) == 2
    assert sorted(_calls(tmp_path)) == ["cut 1", "new 1"]
    assert [finished_steps(job.folder) for job in (new, finished, cut)] == [3, 3, 3]
    assert RunFolder.open(new.folder).recipe().seed == 1
    assert str(new.folder) in (new.folder / LOG_FILE).read_text()


def test_a_torn_last_line_is_no_finished_step(tmp_path: Path) -> None:
    job = _job(tmp_path, "torn")
    _begin(job, 2, torn=True)
    assert finished_steps(job.folder) == 2
    assert finished_steps(tmp_path / "nothing") == 0


def test_one_failure_does_not_stop_the_others(tmp_path: Path, command: list[str]) -> None:
    jobs = [_job(tmp_path, name) for name in ("bad", "good", "early")]
    with pytest.raises(RunError, match="2 of 3 runs failed") as caught:
        run_jobs(jobs, 1, _quiet(), command)
    assert caught.value.exit_code != 0
    message = str(caught.value)
    assert "bad failed at step 0 of 3" in message
    assert "error: the disk is full" in message
    assert "early failed at step 2 of 3" in message  # it ended without an error, but not at its last step
    assert finished_steps(tmp_path / "good") == 3


def test_a_job_waits_for_the_runs_that_it_reads(tmp_path: Path, command: list[str]) -> None:
    jobs = [_job(tmp_path, "log"), _job(tmp_path, "reader", after=("log",)), _job(tmp_path, "free")]
    run_jobs(jobs, 3, _quiet(), command)
    assert _calls(tmp_path).index("log 1") < _calls(tmp_path).index("reader 1")
    assert {call.split()[0] for call in _calls(tmp_path)} == {"log", "reader", "free"}
    with pytest.raises(ConfigError, match="reader waits for a run that is not among the jobs before it"):
        run_jobs([jobs[1], jobs[0]], 3, _quiet(), command)


def test_a_job_fails_with_the_run_that_it_reads(tmp_path: Path, command: list[str]) -> None:
    jobs = [_job(tmp_path, "bad"), _job(tmp_path, "reader", after=("bad",)), _job(tmp_path, "good")]
    with pytest.raises(RunError, match="2 of 3 runs failed") as caught:
        run_jobs(jobs, 1, _quiet(), command)
    assert "it needs bad, which failed" in str(caught.value)
    assert not (tmp_path / "reader").exists()
    assert finished_steps(tmp_path / "good") == 3


@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_of_other_settings_is_not_reused(tmp_path: Path, command: list[str], steps: int) -> None:
    _begin(_job(tmp_path, "run"), steps)
    jobs = [_job(tmp_path, "other"), _job(tmp_path, "run", "method.clip_high=0.3")]
    with pytest.raises(RunError, match=r"other settings \(method\.clip_high 0\.28 -> 0\.3\)"):
        run_jobs(jobs, 2, _quiet(), command)
    assert _calls(tmp_path) == []


def test_jobs_that_cannot_be_told_apart_or_followed_are_refused(tmp_path: Path, command: list[str]) -> None:
    job = _job(tmp_path, "run")
    with pytest.raises(ConfigError, match="share a run folder"):
        run_jobs([job, job], 2, _quiet(), command)
    with pytest.raises(ConfigError, match=r"training\.steps"):
        run_jobs([_job(tmp_path, "run", "training.steps=null", "training.epochs=1")], 2, _quiet(), command)


def test_interrupt_lets_every_run_save(tmp_path: Path, command: list[str]) -> None:
    jobs = [_job(tmp_path, name) for name in ("slow1", "slow2", "waiting")]

    def interrupt() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not all(finished_steps(job.folder) for job in jobs[:2]):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run_jobs(jobs, 2, _quiet(), command)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert all((job.folder / "saved").exists() for job in jobs[:2])
    assert sorted(_calls(tmp_path)) == ["slow1 1", "slow2 1"]


def test_progress_reads_well_on_a_terminal_and_elsewhere(tmp_path: Path, command: list[str]) -> None:
    plain = io.StringIO()
    run_jobs([_job(tmp_path, "one")], 1, Console(file=plain), command)
    assert plain.getvalue().startswith("one: started\none: finished at step 3/3 after ")
    several = io.StringIO()
    run_jobs([_job(tmp_path, "three"), _job(tmp_path, "four")], 1, Console(file=several), command)
    assert "three: finished at step 3/3 after 0 s; 1 of 2 runs done, about " in several.getvalue()
    assert several.getvalue().endswith("; 2 of 2 runs done\n")
    terminal = io.StringIO()
    run_jobs([_job(tmp_path, "two")], 1, Console(file=terminal, force_terminal=True, width=100), command)
    assert "step 3/3" in terminal.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (100, "2 min"), (3599, "1 h 00 min"), (7500, "2 h 05 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_of_many_jobs_only_those_that_run_or_failed_are_shown(tmp_path: Path, command: list[str]) -> None:
    jobs = [_job(tmp_path, f"job{i:02d}") for i in range(13)] + [_job(tmp_path, "bad")]
    for job in jobs[:13]:
        _begin(job, 3)
    terminal = io.StringIO()
    with pytest.raises(RunError):
        run_jobs(jobs, 1, Console(file=terminal, force_terminal=True, width=100), command)
    assert "bad" in terminal.getvalue()
    assert "job05" not in terminal.getvalue()
    assert "13 of 14 runs done, 1 failed" in terminal.getvalue()

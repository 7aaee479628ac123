"""Many runs, a few at a time: each in a process of its own, resumable, one failure not stopping the others."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from graftrl.config import Recipe, load_recipe
from graftrl.errors import ConfigError, RunError
from graftrl.training.run_folder import RunFolder

LOG_FILE = "job.log"
COMMAND = (sys.executable, "-m", "graftrl")
_POLL_S = 0.2
_LOG_LINES = 8  # of a failed run, shown to the user
_MOST_BARS = 12  # more jobs than that do not fit on a screen

State = Literal["waiting", "running", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class Job:
    """One run: a recipe with overrides (`key=value`), and the folder that it fills.

    after: folders of jobs that must have finished before this one starts, because it reads what they wrote.
    expected_s: how long it should take, from nothing; what the time left is told from, corrected by how fast jobs go.
    """

    name: str
    recipe: Path
    overrides: tuple[str, ...]
    folder: Path
    after: tuple[Path, ...] = ()
    expected_s: float = 60.0


@dataclass
class _Task:
    """A job under way. `resumes`: its folder already holds a run."""

    job: Job
    recipe: Recipe
    steps: int
    resumes: bool
    step: int
    state: State
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    ended: float = 0.0
    error: list[str] = field(default_factory=list)
    step_before: int = 0

    @property
    def left_s(self) -> float:
        """Expected seconds of the steps that are missing."""
        return self.job.expected_s * (1 - self.step / self.steps) if self.state in ("waiting", "running") else 0.0

    @property
    def done_s(self) -> float:
        """Expected seconds of the steps that this call made."""
        return self.job.expected_s * (self.step - self.step_before) / self.steps


def finished_steps(folder: Path) -> int:
    """The last step in `metrics.jsonl`, 0 without one. A line that is still being written does not count."""
    try:
        lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")
    except FileNotFoundError:
        return 0
    whole = [line for line in lines[:-1] if line]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `1 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


def run_jobs(
    jobs: Sequence[Job], workers: int = 2, console: Console | None = None, command: Sequence[str] = COMMAND
) -> int:
    """Run all jobs, `workers` at a time with one thread each, in the order given; returns how many had to run.

    A finished job is skipped, an interrupted one resumed. One that reads another's run waits for it, and fails with it.
    A failed one is reported when all others have ended. A run's output goes to `job.log` in its folder. On Ctrl-C every
    run saves its step under way; KeyboardInterrupt follows.

    Args:
        command: the graftrl command line; `resume FOLDER` is appended. A new run's folder is made here, from the recipe
            as it was read when all jobs were checked, so that editing the file meanwhile changes nothing.

    Raises:
        ConfigError: a recipe that is wrong or counts its length in epochs; a job that waits for one not before it.
        RunError: a folder holds a run of other settings (found before anything starts), or a job failed.
    """
    console = console or Console(stderr=True)
    if len({job.folder.resolve() for job in jobs}) < len(jobs):
        raise ConfigError("two jobs share a run folder")
    tasks = [_prepare(job) for job in jobs]
    earlier: set[Path] = set()
    for job in jobs:
        if not earlier.issuperset(job.after):
            raise ConfigError(f"{job.name} waits for a run that is not among the jobs before it")
        earlier.add(job.folder)
    pending = [task for task in tasks if task.state != "finished"]
    if not pending:
        return 0
    with _Board(tasks, console, workers) as board, _termination_interrupts():
        try:
            _work(tasks, workers, command, board)
        except KeyboardInterrupt:
            _stop(tasks, board)
            raise
        finally:
            for task in tasks:
                if task.process is not None and task.process.poll() is None:
                    task.process.terminate()
    failed = [task for task in tasks if task.state == "failed"]
    if failed:
        reports = [
            f"{task.job.name} failed at step {task.step} of {task.steps}:\n"
            + "\n".join(f"    {line}" for line in task.error)
            for task in failed
        ]
        raise RunError(
            f"{len(failed)} of {len(jobs)} runs failed; the others are kept, and the same command runs these again\n"
            + "\n".join(reports)
        )
    return len(pending)


def _prepare(job: Job) -> _Task:
    recipe = load_recipe(job.recipe, job.overrides)
    steps = recipe.training.steps
    if steps is None:
        raise ConfigError(
            f"{job.recipe}: set training.steps rather than training.epochs, so that progress can be shown"
        )
    resumes = (job.folder / "config.yaml").exists()
    if resumes:
        _refuse_other_settings(job, recipe)
    step = finished_steps(job.folder)
    return _Task(job, recipe, steps, resumes, step, "finished" if step >= steps else "waiting", step_before=step)


def _refuse_other_settings(job: Job, recipe: Recipe) -> None:
    """Raises RunError when the run in the folder is not the one that the job asks for."""
    ours = _flat(recipe.model_dump(mode="json"))
    theirs = _flat(RunFolder.open(job.folder).recipe().model_dump(mode="json"))
    changed = [
        f"{key} {theirs.get(key)!r} -> {ours.get(key)!r}"
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    ]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise RunError(
            f"{job.folder} holds a run of other settings ({', '.join(changed[:3])}{more}); remove it or choose another "
            "--run"
        )


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(settings, dict):
        return {prefix: settings}
    return {
        name: value
        for key, inner in settings.items()
        for name, value in _flat(inner, f"{prefix}.{key}" if prefix else key).items()
    }


def _work(tasks: Sequence[_Task], workers: int, command: Sequence[str], board: _Board) -> None:
    of_folder = {task.job.folder: task for task in tasks}
    running: list[_Task] = []
    while True:
        for task in tasks:
            if task.state != "waiting":
                continue
            needed = [of_folder[folder] for folder in task.job.after]
            failed = next((other for other in needed if other.state == "failed"), None)
            if failed is not None:
                task.state, task.error = "failed", [f"it needs {failed.job.name}, which failed"]
                board.tell(f"{task.job.name}: not started, {task.error[0]}")
            elif len(running) < workers and all(other.state == "finished" for other in needed):
                _start(task, command)
                running.append(task)
                board.tell(f"{task.job.name}: {'resumed' if task.resumes else 'started'}")
        if not running:
            return
        time.sleep(_POLL_S)
        for task in list(running):
            task.step = finished_steps(task.job.folder)
            if task.process is not None and task.process.poll() is not None:
                _settle(task, task.process.returncode)
                running.remove(task)
                seconds = task.ended - task.started
                ended = f"{task.job.name}: {task.state} at step {task.step}/{task.steps} after {seconds:.0f} s"
                board.tell(f"{ended}; {board.summary()}" if len(tasks) > 1 else ended)
        board.refresh()


def _start(task: _Task, command: Sequence[str]) -> None:
    job = task.job
    if not task.resumes:
        RunFolder.create(job.folder, task.recipe)
    arguments = [*command, "resume", str(job.folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "NO_COLOR": "1"}
    task.started, task.state = time.monotonic(), "running"
    with (job.folder / LOG_FILE).open("ab") as log:
        log.write(f"$ {shlex.join(arguments)}\n".encode())
        log.flush()
        task.process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # the terminal's Ctrl-C reaches this process alone, which passes it on once
        )


def _settle(task: _Task, code: int) -> None:
    task.ended = time.monotonic()
    task.step = finished_steps(task.job.folder)
    task.state = "finished" if code == 0 and task.step >= task.steps else "failed"
    if task.state == "failed":
        log = task.job.folder / LOG_FILE
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        task.error = [*lines[-_LOG_LINES:], f"exit code {code}; all of its output: {log}"]


def _stop(tasks: Sequence[_Task], board: _Board) -> None:
    """Ask every run to save and end; a second Ctrl-C kills them."""
    running = [(task, task.process) for task in tasks if task.state == "running" and task.process is not None]
    board.tell("stopping: every run saves after its step under way; Ctrl-C once more stops at once")
    for _, process in running:
        process.terminate()
    try:
        for _, process in running:
            process.wait()
    except KeyboardInterrupt:
        for _, process in running:
            process.kill()
            process.wait()
    for task, _ in running:
        task.step, task.state, task.ended = finished_steps(task.job.folder), "stopped", time.monotonic()
    board.refresh()


@contextlib.contextmanager
def _termination_interrupts() -> Iterator[None]:
    """SIGTERM acts like Ctrl-C, so that children are never left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class _Board:
    """What a person sees: on a terminal a bar per job (of many jobs, those that run and those that failed) and a line
    for all; plain lines elsewhere (progress every `line_s` seconds)."""

    def __init__(self, tasks: Sequence[_Task], console: Console, workers: int, line_s: float = 15.0) -> None:
        self.tasks, self.console, self.workers, self.line_s = tasks, console, workers, line_s
        self.live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self.began = self.last_line = time.monotonic()

    def __enter__(self) -> _Board:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live is not None:
            self.live.update(self._view())
            self.live.stop()

    def tell(self, line: str) -> None:
        if self.live is None:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self.refresh()

    def refresh(self) -> None:
        if self.live is not None:
            self.live.update(self._view())
        elif time.monotonic() - self.last_line >= self.line_s:
            self.last_line = time.monotonic()
            line = ", ".join(f"{t.job.name} step {t.step}/{t.steps}" for t in self.tasks if t.state == "running")
            if line:
                self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def summary(self) -> str:
        """`37 of 180 runs done, 1 failed, about 41 min left`."""
        counts = Counter(task.state for task in self.tasks)
        failed = f", {counts['failed']} failed" if counts["failed"] else ""
        left = sum(task.left_s for task in self.tasks)
        time_left = f", about {duration(left / self._speed())} left" if left else ""
        return f"{counts['finished']} of {len(self.tasks)} runs done{failed}{time_left}"

    def _speed(self) -> float:
        """Expected seconds done per second of this call; `workers` until there is enough to tell."""
        done = sum(task.done_s for task in self.tasks)
        elapsed = time.monotonic() - self.began
        return done / elapsed if done > 30 and elapsed > 0 else float(self.workers)

    def _view(self) -> Group:
        table = Table(box=None, pad_edge=False, show_header=False)
        few = len(self.tasks) <= _MOST_BARS
        for task in self.tasks:
            if not few and task.state not in ("running", "failed"):
                continue
            now = task.ended or time.monotonic()
            table.add_row(
                task.job.name,
                ProgressBar(total=task.steps, completed=task.step, width=30),
                f"step {task.step}/{task.steps}",
                task.state,
                f"{now - task.started:.0f} s" if task.started else "",
            )
        return Group(table, Text(self.summary())) if len(self.tasks) > 1 else Group(table)

"""Verification in killable worker processes, each item under its own wall-clock limit.

Workers are plain child processes on a pipe, not `multiprocessing` ones: those import the caller's main module again
(which runs an unguarded training script a second time) and outlive a killed parent while they hang in C code.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

from graftrl.errors import ConfigError, RunError
from graftrl.rollout import FinishReason, Group, Prompt
from graftrl.tasks.base import TIME_LIMIT, Grade, Task, Verifier
from graftrl.tasks.worker import grade_guarded

logger = logging.getLogger(__name__)

Item = tuple[Prompt, str, FinishReason]
DEFAULT_MEMORY_BYTES = 4 * 1024**3
_START_LIMIT_S = 120.0  # importing a user's module may import a whole framework


class VerificationPool:
    """Grades responses in `workers` processes; an item that takes longer than `limit_s` seconds scores 0.

    limit_s: wall-clock seconds of grading alone; waiting in the queue and process start do not count. Longer for a
        verifier with a clock of its own.
    memory_bytes: address-space limit of each worker in bytes; None for no limit.
    outcomes: counts since the pool was opened: "graded", "timeouts", "deaths".

    Workers start on first use and are gone after `close()` or when this process ends, however it ends.
    """

    def __init__(self, workers: int, limit_s: float, memory_bytes: int | None = DEFAULT_MEMORY_BYTES) -> None:
        if workers < 1 or limit_s <= 0:
            raise ConfigError(f"verification needs workers >= 1 and limit_s > 0, not {workers} and {limit_s}")
        self.workers = workers
        self.limit_s = limit_s
        self.memory_bytes = memory_bytes
        self.outcomes: Counter[str] = Counter()
        self._lock = threading.Lock()  # one batch at a time; also guards `outcomes`
        # Worker processes are started from these threads, which live as long as the pool: Linux sends the parent-death
        # signal when the starting thread ends, not only when the process does.
        self._threads: ThreadPoolExecutor | None = None
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._all: set[_Worker] = set()

    def __enter__(self) -> VerificationPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill every worker. The pool can be used again; it then starts new ones."""
        threads, self._threads = self._threads, None
        if threads is None:
            return
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._all):
            worker.kill()  # wakes a thread that waits for its answer
        threads.shutdown(wait=True)
        for worker in self._all:
            worker.kill()
        self._all.clear()
        self._idle = SimpleQueue()

    def grade(self, verifier: Verifier, items: Sequence[Item]) -> list[Grade]:
        """One grade per item, in order. Equal (prompt id, response, finish reason) items are graded once.

        Raises ConfigError when the verifier cannot be sent to a worker, RunError when no worker can be started.
        """
        if not items:
            return []
        blob = _pickled(verifier)
        limit_s = max(self.limit_s, float(getattr(verifier, "limit_s", 0.0)))
        keys = [(prompt.id, response, finish_reason) for prompt, response, finish_reason in items]
        distinct = dict(zip(keys, items, strict=True))
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="verify")
            graded = self._threads.map(lambda item: self._grade_one(blob, item, limit_s), distinct.values())
            grades = dict(zip(distinct, graded, strict=True))
            self.outcomes["graded"] += len(distinct)
            self.outcomes.update(outcome for _, outcome in grades.values() if outcome)
        return [grades[key][0] for key in keys]

    def _grade_one(self, blob: bytes, item: Item, limit_s: float) -> tuple[Grade, str]:
        try:
            worker = self._idle.get_nowait()
        except Empty:
            worker = _Worker(self.memory_bytes)
            self._all.add(worker)
        try:
            worker.prepare(blob)
            return worker.grade(item, limit_s)
        finally:
            self._idle.put(worker)


def grade_groups(task: Task, groups: Iterable[Group], pool: VerificationPool) -> None:
    """Fill `reward` and `grade_reason` of every response of the groups, of all models in one batch, in place.

    A task that says `in_process` is graded right here, without the pool. What is graded is the whole answer: with the
    beginning that the prompt gave, if it gave one.
    """
    pairs = [(group.prompt, response) for group in groups for response in group.responses]
    items: list[Item] = [(prompt, prompt.prefix + response.text, response.finish_reason) for prompt, response in pairs]
    if task.in_process:
        grades = [grade_guarded(task.verifier, *item) for item in items]
    else:
        grades = pool.grade(task.verifier, items)
    for (_, response), grade in zip(pairs, grades, strict=True):
        response.reward, response.grade_reason = grade.reward, grade.reason


def _pickled(verifier: Verifier) -> bytes:
    module = getattr(verifier, "__module__", None) or type(verifier).__module__
    if module == "__main__":
        raise ConfigError(
            "the verifier is defined in the main script; move it to a module of its own, workers import it"
        )
    try:
        return pickle.dumps(verifier)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(f"the verifier cannot be sent to a worker process: {error}") from error


class _Worker:
    """One worker process and the pipe to it; replaced in place after a kill. Used by one thread at a time."""

    def __init__(self, memory_bytes: int | None) -> None:
        self._memory_bytes = memory_bytes or 0
        self._process: subprocess.Popen[bytes] | None = None
        self._blob: bytes | None = None
        self._connection: Any = None

    def prepare(self, blob: bytes) -> None:
        """Have a live process that holds the verifier. Raises ConfigError or RunError when that cannot be had."""
        if self._process is not None and self._process.poll() is not None:
            self.kill()
        if self._process is None:
            self._start()
        if self._blob == blob:
            return
        try:
            error = self._ask(("verifier", sys.path, blob), _START_LIMIT_S)
        except (EOFError, OSError) as problem:  # TimeoutError included
            self.kill()
            raise RunError(
                f"a verification worker did not start or died while loading the verifier ({type(problem).__name__})"
            ) from problem
        if error is not None:
            raise ConfigError(f"a worker process cannot load the verifier: {error}")
        self._blob = blob

    def grade(self, item: Item, limit_s: float) -> tuple[Grade, str]:
        """The grade, and "" or the outcome to count."""
        try:
            reward, reason = self._ask(("grade", *item), limit_s)
        except TimeoutError:
            self.kill()
            return Grade(0.0, f"{TIME_LIMIT} of {limit_s:g} s"), "timeouts"
        except (EOFError, OSError):
            self.kill()
            return Grade(0.0, "verifier process died"), "deaths"
        return Grade(reward, reason), "timeouts" if reason == TIME_LIMIT else ""

    def kill(self) -> None:
        """End the process and the children it left in its process group; no-op without one."""
        process, self._process, self._blob = self._process, None, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        arguments = [str(theirs.fileno()), str(self._memory_bytes), str(os.getpid())]
        # One thread per worker: numeric libraries would reserve address space for a thread per core. A fixed hash seed:
        # computer algebra may take another path under another set order, and grades must not change between runs.
        environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment["PYTHONHASHSEED"] = "0"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "graftrl.tasks.worker", *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=environment,
            start_new_session=True,  # its own process group: kill() reaches its children, Ctrl-C does not reach it
        )
        theirs.close()

    def _ask(self, request: tuple[Any, ...], limit_s: float) -> Any:
        self._connection.send(request)
        if not self._connection.poll(limit_s):
            raise TimeoutError
        return self._connection.recv()

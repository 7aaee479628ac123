"""A verification worker: one process that grades what it is sent over a pipe, one item at a time.

Started by `graftrl.tasks.pool` as `python -m graftrl.tasks.worker FD MEMORY_BYTES PARENT_PID`; nothing else runs it.
Keep the imports light: a worker is started anew after every time-out.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection

from graftrl.rollout import FinishReason, Prompt
from graftrl.tasks.base import Grade, Verifier

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def grade_guarded(verifier: Verifier, prompt: Prompt, response: str, finish_reason: FinishReason) -> Grade:
    """The verifier's grade; an exception or a result that is no grade in [0, 1] becomes reward 0 with the reason."""
    try:
        grade: object = verifier(prompt, response, finish_reason)
    except Exception as error:  # noqa: BLE001  # a verifier may raise anything, and one item must not end the run
        return Grade(0.0, f"verifier raised {type(error).__name__}: {str(error)[:200]}")
    if not isinstance(grade, Grade):
        return Grade(0.0, f"verifier returned {type(grade).__name__}, not a Grade")
    if not 0.0 <= grade.reward <= 1.0:
        return Grade(0.0, f"verifier returned reward {grade.reward!r} outside [0, 1]")
    return grade


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies, even while it is stuck in C code (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the request was in place
        os._exit(1)


def limit_memory(limit_bytes: int) -> None:
    """Cap this process's address space in bytes, so that a memory bomb fails alone; 0 means no cap."""
    if limit_bytes > 0:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


def serve(connection: Connection) -> None:
    """Answer requests until the parent closes its end.

    Requests are `("verifier", sys.path, pickled verifier)`, answered by None or an error line, and
    `("grade", prompt, response, finish_reason)`, answered by a (reward, reason) pair.
    """
    verifier: Verifier | None = None
    while True:
        try:
            request = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        if request[0] == "verifier":
            sys.path[:] = request[1]
            try:
                verifier = pickle.loads(request[2])
            except Exception as error:  # noqa: BLE001  # unpickling imports the user's module: anything can be raised
                connection.send(f"{type(error).__name__}: {error}")
            else:
                connection.send(None)
        else:
            assert verifier is not None, "the pool sends the verifier first"
            grade = grade_guarded(verifier, *request[1:])
            connection.send((float(grade.reward), str(grade.reason)))


def main() -> None:
    descriptor, memory_bytes, parent_pid = (int(argument) for argument in sys.argv[1:4])
    die_with_parent(parent_pid)
    limit_memory(memory_bytes)
    # a verifier that prints or reads must touch neither the terminal's input nor the run's standard output
    os.dup2(2, 1)
    serve(Connection(descriptor))


if __name__ == "__main__":
    main()

"""A service of exchange at ray://, called from a process of its own.

Ray is either a driver or a client in a process, and a client leaves its mode behind: `engine: ray` beside it would ask
the wrong cluster. So whoever meets others at ray:// does so through a child that does nothing else.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Hashable
from multiprocessing.connection import Connection
from typing import Any

from graftrl.live.ray_service import RayService
from graftrl.live.service import Unreachable

_ANSWER_S = 300.0  # the child's own limits are shorter; this is for a child that hangs
_END_S = 10.0


def _answer(pipe: Connection, address: str, name: str) -> None:
    """What the child does: one call after the other, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the job, which ends this process when it ends
    service = RayService(address, name)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(service, method)(*arguments)))
        except Unreachable as error:
            pipe.send((False, str(error)))
        if method == "close":
            return


class ClientProcess:
    """As `RayService`, for addresses of the form ray://HOST:PORT. A child that has died is started again by the next
    call.

    Raises:
        ConfigError: Ray is not installed.
    """

    def __init__(self, address: str, name: str) -> None:
        described = RayService(address, name)  # connects to nothing
        self.where, self._place = described.where, described.place
        self._arguments = address, name
        self._child: Any = None
        self._pipe: Connection | None = None

    def open(self) -> None:
        self._call("open")

    def look(self, model: str) -> dict[int, Hashable]:
        found: dict[int, Hashable] = self._call("look", model)
        return found

    def fetch(self, model: str, step: int) -> bytes | None:
        content: bytes | None = self._call("fetch", model, step)
        return content

    def publish(self, model: str, step: int, content: bytes, keep: int) -> None:
        self._call("publish", model, step, content, keep)

    def drop(self, model: str, steps: list[int]) -> None:
        self._call("drop", model, steps)

    def place(self, model: str, step: int) -> str:
        return self._place(model, step)

    def close(self) -> None:
        if self._child is not None and self._child.is_alive():
            self._call("close")
            self._child.join(_END_S)
        self._end()

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._child is None:
            spawn = multiprocessing.get_context("spawn")
            self._pipe, far = spawn.Pipe()
            self._child = spawn.Process(target=_answer, args=(far, *self._arguments), daemon=True)
            self._child.start()
            far.close()  # so that a dead child is seen as the end of the pipe
        assert self._pipe is not None
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(_ANSWER_S):
                raise TimeoutError("no answer")
            good, answer = self._pipe.recv()
        except (EOFError, OSError) as error:  # TimeoutError is an OSError
            self._end()
            raise Unreachable(f"{self.where} does not answer: its client's process has died or hangs") from error
        if not good:
            raise Unreachable(answer)
        return answer

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.join()
        if self._pipe is not None:
            self._pipe.close()
        self._child = self._pipe = None

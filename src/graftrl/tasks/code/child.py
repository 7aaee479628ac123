"""What runs inside the sandbox: confine yourself, read a job, run it. Started by `graftrl.tasks.code.sandbox` alone.

Two roles. `solution` loads the program of a response and calls its function as often as it is asked to; `tests` runs
test code whose function under test is a stand-in that asks a solution process. Lines of `plain` data go in between:

- to a solution: the job, then one line `[[argument, ...], {name: argument}]` for each call.
- from a solution: `=` once the program is loaded, or `!` and a fault; then for each call `+` and the value, `-` and the
  exception, or `#` if the value cannot be written down.
- from tests: `+` and the verdict.

A process in which a layer of protection that it needs does not hold says so in a fault, and runs nothing.
"""

from __future__ import annotations

import builtins
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from graftrl.tasks.code.confine import confine, die_with
from graftrl.tasks.code.plain import dumps, loads

MAX_LINE_BYTES = 32 * 1024**2  # of one value; the largest result that a test of MBPP+ can expect takes 12 MB
_MESSAGE_CHARS = 200
_STOPPERS = (StopIteration, StopAsyncIteration, GeneratorExit)  # would end a test's loop as if all had passed


def main() -> None:
    settings = loads(sys.argv[1])
    for path in settings["remove_from_path"]:
        sys.path.remove(path)
    sys.path.extend(settings["packages"])
    sys.argv = [""]
    die_with(settings["parent"])
    reply: int = settings["reply"]
    job_file = os.fdopen(settings["job"], "rb")
    asked = settings["requests"]
    requests = job_file if asked is None else os.fdopen(asked, "rb")
    answers = os.fdopen(settings["answers"], "rb") if settings["answers"] is not None else None
    ask: int | None = settings["ask"]
    held = confine(settings)
    job = loads(job_file.readline())
    if job["role"] == "probe":
        _send(reply, b"+", {"held": held, "stopped": _probe(job)})
    elif broken := [layer for layer in settings["required"] if held[layer]]:
        _send(reply, b"!", {"kind": "sandbox", "layers": broken})
    elif job["role"] == "solution":
        _solution(job, requests, reply)
    else:
        assert answers is not None and ask is not None, "the sandbox gives tests their two pipes"
        _send(reply, b"+", _tests(job, answers, ask))
    os._exit(0)  # no exit handlers: they would be the program's


def _solution(job: dict[str, Any], requests: BinaryIO, reply: int) -> None:
    calls = list(requests) if job["all_calls_follow"] else iter(requests.readline, b"")
    try:
        function = _load(job["program"], "solution").get(job["entry_point"])
    except BaseException as error:  # noqa: BLE001  # code of a model: SystemExit and KeyboardInterrupt are results too
        _send(reply, b"!", _described(error))
        return
    if not callable(function):
        _send(reply, b"!", {"kind": "missing"})
        return
    _send(reply, b"=", None)
    for line in calls:
        positional, named = loads(line)
        try:
            value = function(*positional, **named)
        except BaseException as error:  # noqa: BLE001  # as above
            _send(reply, b"-", _described(error))
            continue
        try:
            _send(reply, b"+", value)
        except BaseException:  # noqa: BLE001  # too large, too deep, or a container whose own methods raise
            _send(reply, b"#", None)


def _tests(job: dict[str, Any], answers: BinaryIO, ask: int) -> dict[str, Any]:
    """The verdict: `passed`, and `fault` if not. Only values that the solution returned can have an influence on it."""
    calls = 0
    raised: list[tuple[BaseException, dict[str, Any]]] = []  # by the solution: as tests see it, and as it was
    loaded = answers.readline(MAX_LINE_BYTES)
    if loaded[:1] != b"=":
        return {"passed": False, "fault": loads(loaded[1:]) if loaded[:1] == b"!" else {"kind": "ended"}}

    def stand_in(*positional: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        _send(ask, b"", [list(positional), named])
        line = answers.readline(MAX_LINE_BYTES)
        kind, content = line[:1], line[1:]
        if kind == b"+" and line.endswith(b"\n"):
            try:
                return loads(content)
            except (ValueError, TypeError, RecursionError) as error:
                raise _Over({"kind": "malformed"}) from error
        if kind == b"-":
            described = loads(content)
            raised.append((_raised(described), described))
            raise raised[-1][0]
        raise _Over({"kind": "unwritable" if kind == b"#" else "ended"})

    try:
        space = _load([*job["setup"]], "tests")
        space[job["entry_point"]] = stand_in
        exec(compile(job["tests"], "<tests>", "exec"), space)
    except _Over as over:
        return {"passed": False, "fault": over.fault}
    except BaseException as error:  # noqa: BLE001  # whatever ends the tests early, they have not passed
        for own, described in raised:
            if error is own:
                return {"passed": False, "fault": described}
        # what tests raise on a value, of a wrong type say, is the value's fault, unless they never got one
        return {"passed": False, "fault": {"kind": "wrong"} if calls else _described(error) | {"tests": True}}
    return {"passed": calls > 0, "fault": {"kind": "no calls"}}


class _Over(BaseException):
    """Ends tests, past every `except Exception` of theirs."""

    def __init__(self, fault: dict[str, Any]) -> None:
        super().__init__()
        self.fault = fault


def _load(program: Sequence[str], name: str) -> dict[str, Any]:
    """The names that a program defines. Its parts are compiled one by one: each may begin with __future__ imports."""
    module = types.ModuleType(name)  # dataclasses and others look up the module of a class
    sys.modules[name] = module
    for part in program:
        exec(compile(part, f"<{name}>", "exec"), module.__dict__)
    return module.__dict__


def _described(error: BaseException) -> dict[str, Any]:
    """An exception by the nearest type that everyone has, and its message."""
    known = next(kind for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
    try:
        message = str(error)[:_MESSAGE_CHARS]
    except BaseException:  # noqa: BLE001  # its __str__ is the program's
        message = ""
    return {"kind": "raised", "type": known.__name__, "message": message}


def _raised(described: Any) -> BaseException:
    kind = getattr(builtins, str(described["type"]), None)
    message = str(described["message"])
    if not (isinstance(kind, type) and issubclass(kind, BaseException)) or issubclass(kind, _STOPPERS):
        return RuntimeError(f"{described['type']}: {message}")
    if not issubclass(kind, Exception):  # such as SystemExit
        return _Over(described)
    try:
        return kind(message)
    except TypeError:  # UnicodeError and others need more than a message
        return RuntimeError(f"{described['type']}: {message}")


def _send(descriptor: int, kind: bytes, value: Any) -> None:
    line = kind + dumps(value) + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise OverflowError("too large to be written down")
    left = memoryview(line)
    while left:
        left = left[os.write(descriptor, left) :]


def _probe(job: dict[str, Any]) -> dict[str, str]:
    """Try what must not work: by the name of each attempt, what stopped it, or "" if nothing did."""
    import socket
    import threading

    def start_process() -> None:
        if os.fork() == 0:
            os._exit(0)

    def start_thread() -> None:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

    def read_file() -> None:
        with open(job["secret"], "rb") as file:  # noqa: PTH123  # nothing is imported here that is not needed
            file.read()

    def write_file() -> None:
        with open(f"{job['outside']}/written", "w"):  # noqa: PTH123
            pass

    def talk() -> None:
        for family in (socket.AF_INET, socket.AF_UNIX):
            socket.socket(family).close()

    attempts: dict[str, Callable[[], Any]] = {
        "start processes": start_process,
        "start threads": start_thread,
        "use the network": talk,
        "read files of the user": read_file,
        "write files outside its folder": write_file,
        "change permissions of files": lambda: os.chmod(job["outside"], 0o700),  # noqa: PTH101
        "send signals to other processes": lambda: os.kill(job["parent"], 0),
        "use more memory than its limit": lambda: bytearray(job["memory"]),
    }
    return {name: _stopped(attempt) for name, attempt in attempts.items()}


def _stopped(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except (OSError, RuntimeError, MemoryError) as error:
        return str(error) or type(error).__name__
    return ""

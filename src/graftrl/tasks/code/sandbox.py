"""Starting, watching and killing the processes that run code of models and of data sets."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import graftrl
from graftrl.errors import ConfigError
from graftrl.tasks.code.child import MAX_LINE_BYTES
from graftrl.tasks.code.confine import LAYERS
from graftrl.tasks.code.plain import dumps, loads

_HOME = str(Path(graftrl.__file__).parents[1])
_BOOT = "import sys; sys.path.append({home!r}); from graftrl.tasks.code.child import main; main()"
_MIB = 1024**2
_FILE_BYTES, _OPEN_FILES, _FOLDER_FILES, _FOLDER_BYTES = _MIB, 64, 256, 16 * _MIB
_SCRATCH = "graftrl-code-"
_STALE_S = 60.0
_WATCH_S = 0.05  # between two looks at the folder
_SYSTEM_PATHS = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo",
    "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom",
)  # fmt: skip


class TimeLimit(Exception):
    """A child did not answer in time."""


class TooMuch(Exception):
    """A child wrote more than it may: into a line, or into its folder."""


@dataclass(frozen=True)
class Sandbox:
    """What the code in a child may use. It runs in an interpreter of the same version, without site-packages.

    memory_mib: address space of each child.
    packages: names of installed distributions that may be imported besides the standard library.
    weaker: run although the machine lacks a layer of protection; `require` says which.
    """

    memory_mib: int = 1024
    packages: tuple[str, ...] = ("numpy",)
    weaker: bool = False

    def require(self) -> list[str]:
        """Try on this machine, now, what must not work inside.

        Returns:
            what does work; empty unless `weaker`.

        Raises:
            ConfigError: something works that must not, or a child cannot be started.
        """
        held, open_doors = _probe(self)
        if not open_doors or self.weaker:
            return open_doors
        missing = "; ".join(f"{layer}: {fault}" for layer, fault in held.items() if fault and layer != "namespaces")
        raise ConfigError(
            f"code of models could {', '.join(open_doors)} on this machine ({missing or 'no layer says why'}); the "
            "sandbox needs Linux 5.13 or newer with Landlock and seccomp, on x86_64 or aarch64. `sandbox: weaker` in "
            "the task does without"
        )

    def holds(self) -> bool:
        """Whether all layers that must hold do so on this machine; tried once in a process."""
        held, _ = _probe(self)
        return not any(held[layer] for layer in LAYERS[:3])


class Child:
    """One confined process and the line on which it answers. A context manager: at its end nothing of it is left."""

    def __init__(self, process: subprocess.Popen[bytes], reply: int, folder: Path, deadline: float) -> None:
        self._process, self._reply = process, reply
        self.deadline = deadline
        self.watched = [(folder, process.pid)]  # what they fill is looked at now and then
        self._next_look = time.monotonic() + _WATCH_S
        self._buffer = bytearray()
        self._searched = 0

    def lines(self) -> Iterator[bytes]:
        """Its lines without their ends, until it closes its end.

        Raises:
            TimeLimit: `deadline` (of time.monotonic) passes.
            TooMuch: a line or the child's folder grows beyond its limit.
        """
        while True:
            end = self._buffer.find(b"\n", self._searched)
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                self._searched = 0
                yield line
                continue
            self._searched = len(self._buffer)
            if self._searched > MAX_LINE_BYTES:
                raise TooMuch
            if not self._read():
                return

    def _read(self) -> bool:
        while True:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise TimeLimit
            answered = select.select([self._reply], [], [], min(left, _WATCH_S))[0]
            if time.monotonic() >= self._next_look:  # whether it answers or not: it may do so without end
                for folder, process in self.watched:
                    _check(folder, process)
                self._next_look = time.monotonic() + _WATCH_S
            if answered:
                part = os.read(self._reply, 1 << 18)
                self._buffer += part
                return bool(part)

    def kill(self) -> None:
        """End the process, and whatever it left in its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _check(folder: Path, process: int) -> None:
    """Raises TooMuch where the files that a process has in its folder are too many or too large; those too that it
    removed and closed, but still maps into its memory."""
    sizes, mapped = [], 0
    with os.scandir(folder) as entries:
        for entry in islice(entries, _FOLDER_FILES + 1):
            with suppress(FileNotFoundError):  # removed between the two calls
                sizes.append(entry.stat(follow_symlinks=False).st_size)
    with suppress(OSError):  # it has ended, or there is no /proc
        mapped = Path(f"/proc/{process}/maps").read_bytes().count(os.fsencode(folder) + b"/")
    if len(sizes) > _FOLDER_FILES or sum(sizes) > _FOLDER_BYTES or mapped > _FOLDER_FILES:
        raise TooMuch


@contextmanager
def confined(
    sandbox: Sandbox,
    job: dict[str, Any],
    calls: bytes = b"",
    *,
    limit_s: float,
    pipes: tuple[int, int] | None = None,
    reply_to: int | None = None,
) -> Iterator[Child]:
    """A child that runs a job of `graftrl.tasks.code.child`.

    Args:
        calls: lines that follow the job.
        limit_s: wall-clock seconds from now; its processor may use as many.
        pipes: for tests, where they ask and where they hear; for a solution, where it hears (twice the same number).
        reply_to: write answers there, instead of to this process.

    Raises:
        ConfigError: the process could not be started.
    """
    sweep()
    started = time.monotonic()
    with _folder() as folder, tempfile.TemporaryFile() as job_file:
        job_file.write(dumps(job) + b"\n" + calls)
        job_file.seek(0)
        ours, theirs = os.pipe()
        tests = job["role"] == "tests"
        given = [job_file.fileno(), theirs if reply_to is None else reply_to, *(pipes or ())]
        settings = {
            "parent": os.getpid(),
            "job": given[0],
            "reply": given[1],
            "requests": None if pipes is None or tests else pipes[0],
            "ask": pipes[0] if pipes is not None and tests else None,
            "answers": pipes[1] if pipes is not None and tests else None,
            "memory": sandbox.memory_mib * _MIB,
            "cpu": int(limit_s) + 2,
            "file_size": _FILE_BYTES,
            "files": _OPEN_FILES,
            "read": _readable(sandbox.packages),
            "write": str(folder),
            "packages": sorted({str(_package_root(name)) for name in sandbox.packages}),
            "remove_from_path": [_HOME],
            "required": () if sandbox.weaker else LAYERS[:3],
        }
        environment = {
            "HOME": str(folder), "TMPDIR": str(folder), "PATH": "", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
            "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
        }  # fmt: skip
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-B", "-c", _BOOT.format(home=_HOME), dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=given,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        except OSError as error:
            os.close(ours)
            raise ConfigError(f"no process for code of models can be started: {error.strerror or error}") from error
        finally:
            os.close(theirs)
        child = Child(process, ours, folder, started + limit_s)
        try:
            yield child
        finally:
            child.kill()
            os.close(ours)


def sweep() -> None:
    """Remove the folders of children whose owners were killed. Once for each process."""
    _sweep(os.getpid())


@lru_cache(maxsize=1)
def _sweep(_: int) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        try:
            place = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            status = os.fstat(place)
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _STALE_S:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its owner holds it while it lives
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(place)


@contextmanager
def _folder() -> Iterator[Path]:
    try:
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH)).resolve()
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(place, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"no folder for code of models in {tempfile.gettempdir()} ({error.strerror or error}); TMPDIR names another"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(place)


@lru_cache
def _readable(packages: tuple[str, ...]) -> list[str]:
    """What Python itself reads: its library, the system's shared libraries, and the packages."""
    paths = {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix}),  # not of a virtual environment
        str(Path(sys.base_prefix, "lib")),
    }
    for name in packages:
        root = _package_root(name)
        parts = {Path(str(file)).parts[0] for file in metadata.files(name) or ()}
        paths |= {str(root / part) for part in parts if part not in ("..", "__pycache__")}
    return sorted({os.path.realpath(path) for path in paths} | set(_SYSTEM_PATHS))


@lru_cache
def _package_root(name: str) -> Path:
    try:
        return Path(str(metadata.distribution(name).locate_file("")))
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"the package {name!r} is not installed; code of models cannot import it") from error


@lru_cache
def _probe(sandbox: Sandbox) -> tuple[dict[str, str], list[str]]:
    with _folder() as outside:
        secret = outside / "secret"
        secret.write_text("secret")
        job = {
            "role": "probe", "secret": str(secret), "outside": str(outside), "parent": os.getpid(),
            "memory": sandbox.memory_mib * _MIB,
        }  # fmt: skip
        with confined(sandbox, job, limit_s=30.0) as child:
            try:
                line = next(child.lines(), b"")
            except (TimeLimit, TooMuch):
                line = b""
    if not line:
        raise ConfigError("a confined Python process does not run on this machine: it ended before it could be tried")
    answer = loads(line[1:])
    return answer["held"], [attempt for attempt, fault in answer["stopped"].items() if not fault]

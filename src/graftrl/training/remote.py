"""A run folder at a URL that fsspec knows (s3://, gs://, memory://, ...).

The run works in a folder of this machine. After every step, what is new there is put to the URL, in this order:

1. files of steps (rollouts, exchange, ...), then `metrics.jsonl`, whose lines say which steps are there;
2. files of checkpoints, of each its `state.json` last: without it there is no checkpoint;
3. then what the run has dropped is removed, of a checkpoint its `state.json` first.

Every file is there as a whole or not at all. So a reader, and whoever goes on after a kill at any moment, sees finished
steps and whole checkpoints alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fsspec  # type: ignore[import-untyped]

from graftrl.config import Recipe
from graftrl.errors import ConfigError, RunError
from graftrl.training.run_folder import STEP_KINDS, RunFolder, write_text
from graftrl.urls import is_url

T = TypeVar("T")

ORIGIN = ".origin.json"  # in the working folder: where its run lies, and which run that is
OWNER = ".owner.json"  # at the URL: which run lies there, and who writes to it
# Stores in which a file appears when it has been sent as a whole. Elsewhere it is sent under another name and renamed.
_WHOLE_PUTS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "memory"}
_STAYS = ("wandb", "job.log")
_NOT_FOR_RESUME = ("rollouts", "exchange", "checkpoints", "tensorboard")
_IMMUTABLE = ("rollouts/", "exchange/", "checkpoints/")  # of one content once they are there
_FACTS = ("ETag", "etag", "mtime", "LastModified", "updated", "created", "size")  # as the stores call them
_WAITS_S = (2.0, 10.0)  # before a failed request is repeated


def create_run(where: Path | str, recipe: Recipe) -> RunFolder:
    """A new run in a folder, or at a URL.

    Raises:
        RunError: a run already lies there, or the URL cannot be written to.
    """
    if not is_url(where):
        return RunFolder.create(Path(where), recipe)
    url = str(where)
    remote, work = Remote(url), working_folder(url)
    files = remote.files()
    if whole_checkpoints(files) or ("metrics.jsonl" in files and files["metrics.jsonl"].size):
        raise RunError(f"{url} already holds a run; continue it with 'graftrl resume {url}' or choose another --run")
    if RunFolder(work).read_metrics() or RunFolder(work).checkpoint_steps():
        raise RunError(
            f"{work} holds a run of {url} that is not there; 'graftrl resume {url}' goes on with it, else remove that "
            "folder"
        )
    run = RunFolder.create(work, recipe)
    identity = uuid.uuid4().hex
    _write_origin(work, url, identity)
    run.remote, run.mirror = remote, Mirror(remote, work, identity, recipe.checkpoint.keep)
    run.mirror.claim()
    run.mirror.push()  # what cannot be written to is told before any model loads
    return run


def open_run(where: Path | str) -> RunFolder:
    """A run to go on with: a run folder, a URL, or the working folder of one.

    Of a URL, this machine's working folder goes on if it is as far as what lies at the URL; else that is fetched.

    Raises:
        RunError: no run there; or the working folder is of another run.
    """
    if not is_url(where):
        run = RunFolder.open(Path(where))
        if not (run.root / ORIGIN).is_file():
            return run
        where = str(json.loads((run.root / ORIGIN).read_text())["url"])
    url = str(where)
    remote, work = Remote(url), working_folder(url)
    files = remote.files()
    here = (work / "config.yaml").is_file() and (work / ORIGIN).is_file()
    if "config.yaml" not in files and not here:
        raise RunError(f"{url} is no run folder (it has no config.yaml)")
    there = json.loads(remote.read(OWNER))["run"] if OWNER in files else None
    mine = json.loads((work / ORIGIN).read_text())["run"] if here else None
    if there is not None and mine is not None and there != mine:
        raise RunError(f"{work} is of another run than the one that lies at {url} now; remove that folder, then resume")
    identity = str(mine or there or uuid.uuid4().hex)
    work.mkdir(parents=True, exist_ok=True)
    run = RunFolder(work)
    with run.locked():
        if not here or max(whole_checkpoints(files), default=0) > max(run.checkpoint_steps(), default=0):
            _fetch_to_go_on(remote, files, work)
            _write_origin(work, url, identity)
    run = RunFolder.open(work)
    run.remote, run.mirror = remote, Mirror(remote, work, identity, run.recipe().checkpoint.keep)
    run.mirror.claim()
    return run


def read_run(url: str, wanted: Callable[[str], bool] = lambda name: True) -> RunFolder:
    """A copy on this machine of what is wanted of a run at a URL, to be read alone; it is brought up to date.

    wanted: of a file's name, such as "metrics.jsonl". Of checkpoints not wanted, only the `state.json` is there, and
        `RunFolder.fetch` brings the rest.

    Raises:
        RunError: no run there.
    """
    remote = Remote(url)
    files = remote.files()
    if "config.yaml" not in files:
        raise RunError(f"{url} is no run folder (it has no config.yaml)")
    copy = _cache() / "copies" / _folder_name(url)
    run = RunFolder(copy)
    copy.mkdir(parents=True, exist_ok=True)
    with run.locked():
        index = copy / ".fetched.json"
        fetched: dict[str, str] = json.loads(index.read_text()) if index.is_file() else {}
        kept = {name for name in files if _kept(name, files) and (wanted(name) or name.endswith("/state.json"))}
        for name in sorted(fetched.keys() - kept):  # dropped there, or perhaps changed since it was fetched
            (copy / name).unlink(missing_ok=True)
        for step in run.checkpoint_steps():
            mark = f"checkpoints/step-{step:06d}/state.json"
            if mark not in files or files[mark].version != fetched.get(mark):
                shutil.rmtree(run.checkpoint(step))
        for name in sorted(kept):
            if fetched.get(name) != files[name].version or not (copy / name).is_file():
                remote.get(name, copy / name)
        write_text(index, json.dumps({name: files[name].version for name in sorted(kept)}))
    run.remote = remote
    return run


def is_of_tables(name: str) -> bool:
    """For `read_run`: everything but weights. Tokenizers are wanted by who looks at tokens."""
    return not _checkpoint_of(name) or name.endswith("/tokenizer.json")


def is_of_responses(name: str) -> bool:
    """For `read_run`: what a rollout log consists of."""
    return name == "config.yaml" or name.startswith(("rollouts/", "exchange/"))


def is_small(name: str) -> bool:
    """For `read_run`: neither weights nor responses."""
    return not name.startswith(("checkpoints/", "rollouts/", "exchange/", "tensorboard/", "received/"))


def is_copy(folder: Path) -> bool:
    """Whether `read_run` made it, so that nobody looks for files there."""
    return folder.is_relative_to(_cache() / "copies")


def working_folder(url: str) -> Path:
    """Of a run at this URL, on this machine."""
    return _cache() / "runs" / _folder_name(url)


def _cache() -> Path:
    named = os.environ.get("GRAFTRL_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "graftrl"


def _folder_name(url: str) -> str:
    url = url.rstrip("/")
    return f"{url.rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


def whole_checkpoints(names: Iterable[str]) -> list[int]:
    """The steps whose checkpoints are there as a whole."""
    return sorted(_checkpoint_of(name) for name in names if name.startswith("checkpoints/") and _is_mark(name))


def _checkpoint_of(name: str) -> int:
    """The step of a checkpoint's file; 0 for any other."""
    found = re.match(r"checkpoints/step-(\d+)/", name)
    return int(found[1]) if found else 0


def _is_mark(name: str) -> bool:
    return name.endswith("/state.json") and name.count("/") == 2


def _kept(name: str, files: Iterable[str]) -> bool:
    """Not of a checkpoint that was cut off."""
    step = _checkpoint_of(name)
    return not step or f"checkpoints/step-{step:06d}/state.json" in files


# Files at a URL -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """version: changes when the content does."""

    size: int
    version: str


class Remote:
    """The files below a URL. Every failure is a RunError that names the file; requests are repeated first.

    Raises:
        ConfigError: a URL of a kind that is not known, or whose package is missing.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{url}: {str(error).splitlines()[0]}") from error
        kinds = self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        self._whole_puts = bool(_WHOLE_PUTS & {*kinds})

    def files(self) -> dict[str, File]:
        """By their names below the URL; hidden ones only of this module."""

        def look() -> dict[str, Any]:
            self._fs.invalidate_cache()
            found: dict[str, Any] = self._fs.find(self._root, detail=True)
            return found

        found = {}
        for path, info in self._try("be listed", "", look).items():
            name = path[len(self._root) :].lstrip("/")
            if name == OWNER or not any(part.startswith(".") for part in name.split("/")):
                facts = [
                    info.get(key) for key in ("ETag", "etag", "mtime", "LastModified", "updated", "created", "size")
                ]
                found[name] = File(int(info.get("size") or 0), str(facts))
        return found

    def read(self, name: str) -> str:
        content: bytes = self._try("be read", name, lambda: self._fs.cat_file(self._path(name)))
        return content.decode()

    def write(self, name: str, text: str) -> None:
        def send() -> None:
            if not self._whole_puts:
                self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(self._path(name), text.encode())

        self._try("be written", name, send)

    def put(self, local: Path, name: str) -> None:
        """The file appears when it is there as a whole."""

        def send() -> None:
            target = self._path(name)
            if self._whole_puts:
                self._fs.put_file(str(local), target)
                return
            parent, _, leaf = target.rpartition("/")
            self._fs.makedirs(parent, exist_ok=True)
            self._fs.put_file(str(local), f"{parent}/.{leaf}.tmp")
            self._fs.mv(f"{parent}/.{leaf}.tmp", target)

        self._try("be written", name, send)

    def get(self, name: str, local: Path) -> None:
        """The local file appears when it is there as a whole."""
        temporary = local.with_name(f".{local.name}.tmp")
        local.parent.mkdir(parents=True, exist_ok=True)
        self._try("be read", name, lambda: self._fs.get_file(self._path(name), str(temporary)))
        temporary.replace(local)

    def complete(self, name: str, local: Path) -> None:
        """Bring the file of that name, or what is not here yet of the folder."""
        for found in self.files():
            target = local / found[len(name) + 1 :] if found.startswith(f"{name}/") else local
            if (found == name or target != local) and not target.exists():
                self.get(found, target)

    def remove(self, name: str) -> None:
        def drop() -> None:
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:  # a first attempt got through
                return

        self._try("be removed", name, drop)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _try(self, what: str, name: str, call: Callable[[], T]) -> T:
        for wait_s in (*_WAITS_S, None):
            try:
                return call()
            except Exception as error:  # every store has its own
                if wait_s is None or isinstance(error, FileNotFoundError | PermissionError):
                    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                    place = f"{self.url}/{name}" if name else self.url
                    raise RunError(f"{place} cannot {what}: {type(error).__name__}: {reason}") from error
                time.sleep(wait_s)
        raise AssertionError  # the last attempt returns or raises


# A run's copy ---------------------------------------------------------------------------------------------------------


class Mirror:
    """Puts what a run has finished in its working folder to its URL.

    Args:
        identity: of the run. keep: checkpoints that stay, as the recipe says.
    """

    def __init__(self, remote: Remote, work: Path, identity: str, keep: int) -> None:
        self.remote, self._work, self._identity, self._keep = remote, work, identity, keep
        self._writer = uuid.uuid4().hex
        self._there: set[str] = set()
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of what was put

    @property
    def url(self) -> str:
        return self.remote.url

    def claim(self) -> None:
        """From now on only this process writes there; another that does finds out before its next step is put."""
        owner = {"run": self._identity, "writer": self._writer, "host": socket.gethostname(), "pid": os.getpid()}
        with self._resumable():
            self.remote.write(OWNER, json.dumps(owner))
            files = self.remote.files()
        self._there = {*files}
        for name, (size, when) in _listing(self._work).items():
            # Only what never changes once it is there: the rest is put again.
            if name in files and files[name].size == size and _kept(name, files) and name.startswith(_IMMUTABLE):
                self._sent[name] = size, when

    def push(self) -> None:
        """Put what is new, remove what is gone.

        Raises:
            RunError: it does not work, or another process has taken the run over. The working folder is whole.
        """
        with self._resumable():
            self._check_owner()
            local = _listing(self._work)
            for name in sorted((name for name in local if self._sent.get(name) != local[name]), key=_order):
                self.remote.put(self._work / name, name)
                self._sent[name] = local[name]
                self._there.add(name)
            for name in sorted(self._gone(), key=_order, reverse=True):
                self.remote.remove(name)
                self._there.discard(name)
                self._sent.pop(name, None)

    def _gone(self) -> set[str]:
        """Checkpoints that are not kept or were cut off, and files of steps that will be made again."""
        run = RunFolder(self._work)
        lines = run.read_metrics()
        last = int(lines[-1]["step"]) if lines else 0
        whole = whole_checkpoints(self._there)
        kept = {*whole[-self._keep :], run.best_step()}
        gone = set()
        for name in self._there:
            step = _checkpoint_of(name)
            if step and (step not in kept or step not in whole):
                gone.add(name)
            found = re.match(rf"({'|'.join(STEP_KINDS)})/step-(\d+)\.", name)
            if found and int(found[2]) > last:
                gone.add(name)
        return gone

    def _check_owner(self) -> None:
        owner = json.loads(self.remote.read(OWNER))
        if owner.get("writer") != self._writer:
            raise RunError(f"process {owner.get('pid')} on {owner.get('host')} has taken the run over")

    @contextmanager
    def _resumable(self) -> Iterator[None]:
        try:
            yield
        except RunError as error:
            raise RunError(
                f"{error}; what is finished lies in {self._work}, and 'graftrl resume {self.url}' goes on from there"
            ) from error


def _write_origin(work: Path, url: str, identity: str) -> None:
    write_text(work / ORIGIN, json.dumps({"url": url, "run": identity}))


def _listing(root: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file that is put, by its name below the folder."""
    found = {}
    for parent, folders, files in os.walk(root):
        folders[:] = [folder for folder in folders if not folder.startswith(".")]
        for file in files:
            path = Path(parent) / file
            name = path.relative_to(root).as_posix()
            if not file.startswith(".") and name.split("/")[0] not in _STAYS:
                facts = path.stat()
                found[name] = facts.st_size, facts.st_mtime_ns
    return found


def _order(name: str) -> tuple[int, str]:
    if _checkpoint_of(name):
        return (3 if _is_mark(name) else 2), name
    return (1 if name == "metrics.jsonl" else 0), name


def _fetch_to_go_on(remote: Remote, files: dict[str, File], work: Path) -> None:
    """The newest whole checkpoint and what is small; `RunFolder.fetch` brings rollouts that a method looks back at."""
    run = RunFolder(work)
    newest = max(whole_checkpoints(files), default=0)
    if newest:
        folder = run.checkpoint(newest)
        temporary = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        for name in files:
            if _checkpoint_of(name) == newest:
                remote.get(name, temporary / name.split("/", 2)[2])
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    for name in sorted(files, key=lambda name: name == "config.yaml"):  # last: it makes the folder a run's
        if name != OWNER and name.split("/")[0] not in _NOT_FOR_RESUME:
            remote.get(name, work / name)

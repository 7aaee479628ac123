"""The folder of a run: what it holds, who may write to it, and how a killed run finds its last whole state."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from graftrl.config import Recipe, dump_recipe, load_recipe
from graftrl.engines.base import Writing
from graftrl.errors import RunError

if TYPE_CHECKING:
    from graftrl.training.remote import Mirror, Remote

STEP_KINDS = ("rollouts", "exchange", "evaluations")  # folders with a file a step, made again after a kill


@dataclass
class TrainingState:
    """Everything besides weights and optimizers that a resumed run needs.

    step: finished steps. batches: prompt batches consumed (more than steps under dynamic sampling). wall_s: accumulated
    seconds of finished steps. The token counts are accumulated over steps and models. mean_rewards: per model, of
    every step. memory: what the method left for the next step. exact_generation: per model, whether generation
    log-probabilities serve as `old_logprobs`. lost: models that no longer train, each with the last step that trained
    it. metrics: the line of the last finished step.
    """

    step: int = 0
    batches: int = 0
    wall_s: float = 0.0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    passed_tokens: int = 0
    mean_rewards: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    exact_generation: dict[str, bool] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    best_step: int | None = None
    best_score: float | None = None
    metrics: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Unsettled:
    """A checkpoint in its temporary folder. writing: None when all its files are there."""

    folder: Path
    step: int
    best_step: int | None
    keep: int
    writing: Writing | None


class RunFolder:
    """config.yaml, metrics.jsonl, rollouts/, exchange/, evaluations/, checkpoints/: see docs/run-folder.md."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.metrics = root / "metrics.jsonl"
        self.checkpoints = root / "checkpoints"
        self._unsettled: _Unsettled | None = None
        self.remote: Remote | None = None  # where the run lies, if this folder is a copy or only where it works
        self.mirror: Mirror | None = None  # puts what is finished there, if it works here

    @classmethod
    def create(cls, root: Path, recipe: Recipe) -> RunFolder:
        """Raises RunError where a run already lies. A folder in which no step was finished is used again."""
        run = cls(root)
        with disk_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            with run.locked():
                if run.read_metrics() or run.checkpoint_steps():
                    raise RunError(
                        f"{root} already holds a run; continue it with 'graftrl resume {root}' or choose another --run"
                    )
                write_text(root / "config.yaml", dump_recipe(recipe))
        return run

    @classmethod
    def open(cls, root: Path) -> RunFolder:
        if not (root / "config.yaml").is_file():
            raise RunError(f"{root} is no run folder (it has no config.yaml)")
        return cls(root)

    def recipe(self) -> Recipe:
        return load_recipe(self.root / "config.yaml")

    @contextlib.contextmanager
    def locked(self, option: str = "--run") -> Iterator[None]:
        """Raises RunError while another process works in this folder. The lock dies with its process.

        option: of the command line, names another folder.
        """
        lock = FileLock(self.root / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise RunError(
                f"{self.root} is in use by another process; wait for it or choose another {option}"
            ) from error
        try:
            yield
        finally:
            lock.release()

    # Steps ----------------------------------------------------------------------------------------------------------

    def step_file(self, kind: str, step: int) -> Path:
        return self.root / kind / f"step-{step:06d}.{'json' if kind == 'evaluations' else 'parquet'}"

    def write_json(self, path: Path, content: dict[str, Any]) -> None:
        write_text(path, json.dumps(content, allow_nan=False))

    def append_metrics(self, line: dict[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole lines; a torn last line (a kill while it was written) is left out.

        Raises:
            RunError: another line is torn; it is named.
        """
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text(encoding="utf-8", errors="replace").split("\n")
        found = []
        for number, line in enumerate(lines[:-1], start=1):
            try:
                if line:
                    found.append(dict(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise RunError(f"{self.metrics}, line {number}: torn or no JSON; remove this line") from error
        return found

    # A run at a URL -------------------------------------------------------------------------------------------------

    @property
    def place(self) -> str:
        """The name that people know the run by: its URL or its folder."""
        return str(self.root) if self.remote is None else self.remote.url

    def upload(self) -> None:
        """Put what is finished to the run's URL, if it has one. Raises RunError as `Mirror.push`."""
        if self.mirror is not None:
            self.mirror.push()

    def fetch(self, path: Path) -> Path:
        """A file or folder of the run, brought here from its URL if it is only there."""
        if self.remote is not None and not path.is_file():
            self.remote.complete(path.relative_to(self.root).as_posix(), path)
        return path

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def save_checkpoint(self, state: TrainingState, save: Callable[[Path], Writing | None], keep: int) -> None:
        """Write to a temporary folder, rename, then drop all but the `keep` newest and the best.

        Args:
            save: writes the policies into the folder it is given, or begins to; `settle` then renames it.
        """
        self.settle(wait=True)
        temporary = self.checkpoints / f".step-{state.step:06d}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        writing = save(temporary)
        (temporary / "state.json").write_text(json.dumps(asdict(state)))
        self._unsettled = _Unsettled(temporary, state.step, state.best_step, keep, writing)
        if writing is None:
            self.settle(wait=True)

    def settle(self, *, wait: bool) -> None:
        """Make a checkpoint that was begun the newest one, if all its files are written. wait: until they are.

        Raises:
            GraftrlError: waiting, that they never will be; the older checkpoints are whole.
        """
        begun = self._unsettled
        if begun is None or not (begun.writing is None or begun.writing.done(wait=wait)):
            return
        self._unsettled = None
        final = self.checkpoint(begun.step)
        shutil.rmtree(final, ignore_errors=True)
        begun.folder.rename(final)
        kept = {*self.checkpoint_steps()[-begun.keep :], begun.best_step}
        for step in self.checkpoint_steps():
            if step not in kept:
                shutil.rmtree(self.checkpoint(step))

    def checkpoint_steps(self) -> list[int]:
        return sorted(int(folder.name.removeprefix("step-")) for folder in self.checkpoints.glob("step-*"))

    def latest_checkpoint(self) -> Path | None:
        steps = self.checkpoint_steps()
        return self.checkpoint(steps[-1]) if steps else None

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def best_step(self) -> int | None:
        """The step with the best validation so far (docs/run-folder.md says by which rule), whose checkpoint is kept.

        None without a checkpoint, or where nothing was validated.
        """
        folder = self.latest_checkpoint()
        return None if folder is None else self._state(folder).best_step

    def rewind(self) -> tuple[Path | None, TrainingState, list[str]]:
        """Go back to the last whole checkpoint: what was written after it is dropped, to be done again.

        Returns:
            its folder (None: from the start), its state, and notes on what was found.
        """
        notes = []
        self._unsettled = None
        for torn in self.checkpoints.glob(".step-*.tmp"):
            shutil.rmtree(torn)
            notes.append(f"{torn.name.strip('.').removesuffix('.tmp')}: checkpoint was cut off while being written")
        folder = self.latest_checkpoint()
        state = TrainingState() if folder is None else self._state(folder)
        notes.append(f"resuming from {'the start' if folder is None else f'step {state.step}'}")
        lines = [line for line in self.read_metrics() if line["step"] <= state.step]
        if state.metrics is not None and (not lines or lines[-1]["step"] < state.step):
            lines.append(state.metrics)  # killed between the checkpoint and the line
        write_text(self.metrics, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        for kind in STEP_KINDS:
            for file in (self.root / kind).glob("step-*"):
                if int(file.stem.removeprefix("step-")) > state.step:
                    file.unlink()
        self.upload()
        return folder, state, notes

    @staticmethod
    def _state(folder: Path) -> TrainingState:
        return TrainingState(**json.loads((folder / "state.json").read_text()))


def write_text(path: Path, text: str) -> None:
    """Write to a temporary name and rename: a reader sees the old file or the new one."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_text`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


@contextlib.contextmanager
def disk_errors(root: Path, *, again: str | None = None, option: str = "--run") -> Iterator[None]:
    """Turn a full or read-only disk into one clear line. Libraries report it in different exception types.

    again: what goes on from what was saved, once there is space; None: resuming the run. option: names another folder.
    """
    again = again or f"'graftrl resume {root}' goes on from the last checkpoint"
    try:
        yield
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        full = full or any(phrase in str(error) for phrase in ("No space left", "os error 28", "File too large"))
        if full:
            raise RunError(f"{root}: the disk is full; free some space, then {again}") from error
        if isinstance(error, PermissionError):
            raise RunError(f"{root}: cannot be written: {error.strerror}; choose another {option}") from error
        raise

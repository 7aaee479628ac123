"""Sampling that takes hours and may stop at any time: prompts in chunks, and a record of what a folder holds.

A chunk is written as a whole, so that the same command goes on where it stopped. The record says what the responses are
a function of; responses of other models, settings or prompts are never mixed with them.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from graftrl.errors import RunError
from graftrl.logs.reader import RolloutLog
from graftrl.policies.config import ModelSettings
from graftrl.training.run_folder import write_text

CHUNK = 32  # prompts that are sampled, graded and written together
LINE_S = 5.0
_SAMPLES = (  # what decides responses
    "path", "dtype", "trust_remote_code", "chat_template", "chat_template_options", "bos", "extra_stop_tokens",
)  # fmt: skip

Progress = Callable[[int, int], None]  # done, wanted


def chunk_sizes(prompts: int, size: int = CHUNK) -> list[int]:
    """`[size, size, ..., rest]`."""
    return [min(size, prompts - start) for start in range(0, prompts, size)]


def prompts_in(file: Path) -> int:
    """How many prompts a chunk's file has of every model in it; 0 where there is no such file."""
    if not file.exists():
        return 0
    log = RolloutLog(file)
    return min(log.group_index(model).height for model in log.models)


def fill(
    wanted: Sequence[int], finished: Callable[[int], int], answer: Callable[[int, int], None], progress: Progress
) -> None:
    """Have every chunk answered that holds fewer prompts than it should; the others stay as they are.

    Args:
        wanted: prompts of each chunk.
        finished: how many chunk i has on disk.
        answer: sample, grade and write the first `size` prompts of chunk i, in place of what is there.
    """
    done = 0
    for index, size in enumerate(wanted):
        if finished(index) < size:
            answer(index, size)
        done += size
        progress(done, sum(wanted))


# The record -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """The file `<name>.yaml` of a folder: under `<name>` what was asked, under `weights` the models' files then.

    noun: what messages call such a folder.
    """

    name: str
    noun: str

    @property
    def file(self) -> str:
        return f"{self.name}.yaml"

    def read(self, root: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """What was asked and the models' files; None where the folder holds nothing yet.

        Raises:
            RunError: the folder holds something else.
        """
        file = root / self.file
        if not file.is_file():
            if (root / "rollouts").exists() or (root / "config.yaml").exists():
                raise RunError(f"{root} holds something else than {self.noun}; choose another --out")
            return None
        try:
            held = yaml.safe_load(file.read_text(encoding="utf-8"))
            asked, files = held[self.name], held["weights"]
        except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise RunError(
                f"{file}: not what {self.noun} writes; choose another --out or remove that folder"
            ) from error
        if not isinstance(asked, dict) or not isinstance(files, dict):
            raise RunError(f"{file}: not what {self.noun} writes; choose another --out or remove that folder")
        return asked, files

    def write(self, root: Path, asked: dict[str, Any], files: dict[str, Any]) -> None:
        held = {self.name: asked, "weights": files}
        write_text(root / self.file, yaml.safe_dump(held, sort_keys=False, allow_unicode=True))

    def refuse_other(self, root: Path, held: dict[str, Any], asked: dict[str, Any]) -> None:
        """Raises RunError, naming the first key of the two whose values differ."""
        difference = _first_difference(held, asked)
        if difference:
            raise RunError(
                f"{root} holds {self.noun} with another {difference}; choose another --out or remove that folder"
            )

    def refuse_changed(self, root: Path, held: dict[str, Any], files: dict[str, Any]) -> None:
        """Raises RunError where a model's files are not those that its responses come from.

        Models that are not at their place any more do not matter: what they said is here.
        """
        for name, found in files.items():
            if held.get(name, found) != found:
                raise RunError(
                    f"{root}: the files of model {name!r} have changed since its responses were sampled; choose "
                    "another --out or remove that folder"
                )


EVALUATION = Record("eval", "an evaluation")


def model_record(settings: ModelSettings) -> dict[str, Any]:
    """The settings of a model that decide what it answers."""
    content = settings.model_dump(mode="json")
    return {key: content[key] for key in _SAMPLES if content[key] != {}}  # folders of old lack the options


def model_files(path: str) -> list[list[Any]]:
    """Name, size in bytes and time of change of a local model's files; none for a hub id."""
    place = Path(path).expanduser()
    files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _first_difference(old: Any, new: Any, where: str = "") -> str:
    """The dotted key of the first value that differs, with both values; "" if none does."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            below = f"{where}.{key}" if where else str(key)
            found = _first_difference(old.get(key), new.get(key), below)
            if found:
                return found
        return ""
    return "" if old == new else f"{where} ({old!r} there, {new!r} here)"


# For people -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def told_where(root: Path, noun: str) -> Iterator[None]:
    """On Ctrl-C, say that what was finished is kept. noun: of the things counted, such as "prompts"."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"{root} keeps the {noun} that were finished; the same command goes on from there", file=sys.stderr)
        raise


@contextlib.contextmanager
def shown(noun: str, console: Console | None = None) -> Iterator[Progress]:
    """A bar on a terminal; elsewhere a line, at most one every LINE_S seconds. On standard error if no console."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn(noun), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Bar(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, wanted: bar.update(task, completed=done, total=wanted)
        return
    last = time.monotonic()

    def line(done: int, wanted: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_S:
            last = time.monotonic()
            console.print(f"{done} of {wanted} {noun}", highlight=False)

    yield line

"""A folder that all jobs reach.

    FOLDER/A/rollouts/step-000001.parquet    what A sampled in step 1, complete once it is there
    FOLDER/B/rollouts/step-000001.parquet

Files are written under another name and renamed, and each is written by one job only, so that it needs no locks and
works on network file systems. Nothing is read from the order of times.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterator
from pathlib import Path

from graftrl.live.service import Unreachable
from graftrl.logs.rollouts import step_file_name
from graftrl.training.run_folder import write_bytes


class SharedFolder:
    """A service of exchange in a folder, which is made if it is not there."""

    def __init__(self, root: Path) -> None:
        self.root, self.where = root, str(root)
        self._opened = False

    def file(self, model: str, step: int) -> Path:
        return self.root / model / "rollouts" / step_file_name(step)

    def place(self, model: str, step: int) -> str:
        return str(self.file(model, step))

    def open(self) -> None:
        with self._reached():
            self.root.mkdir(parents=True, exist_ok=True)
        self._opened = True

    def look(self, model: str) -> dict[int, Hashable]:
        found: dict[int, Hashable] = {}
        folder = self.file(model, 0).parent
        with self._reached(), contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                number = entry.name.removeprefix("step-").removesuffix(".parquet")
                if number.isdecimal() and entry.name == step_file_name(int(number)):
                    with contextlib.suppress(FileNotFoundError):  # removed since
                        of = entry.stat()
                        found[int(number)] = (of.st_ino, of.st_size, of.st_mtime_ns)
        return found

    def fetch(self, model: str, step: int) -> bytes | None:
        with self._reached():
            try:
                return self.file(model, step).read_bytes()
            except FileNotFoundError:
                return None

    def publish(self, model: str, step: int, content: bytes, keep: int) -> None:
        with self._reached():
            write_bytes(self.file(model, step), content)
        self.drop(model, [held for held in self.look(model) if held <= step - keep])

    def drop(self, model: str, steps: list[int]) -> None:
        with self._reached():
            for step in steps:
                self.file(model, step).unlink(missing_ok=True)

    def close(self) -> None: ...

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            if self._opened:
                self.root.stat()  # a folder that went away, such as an unmounted one, is not made again
            yield
        except OSError as error:
            raise Unreachable(f"{self.root}: the folder of the exchange cannot be used: {error.strerror}") from error

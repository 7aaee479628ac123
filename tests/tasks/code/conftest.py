from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from graftrl.tasks.code.sandbox import Sandbox

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def holds() -> None:
    """These tests need a machine on which the sandbox holds."""
    if sys.platform != "linux" or Sandbox(weaker=True).require():
        pytest.skip("the sandbox does not hold on this machine", allow_module_level=True)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every folder of a sandboxed process is gone after the test, whatever happened in it."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield
    assert list(place.iterdir()) == []

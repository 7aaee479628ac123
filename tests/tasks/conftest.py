from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graftrl.tasks.pool import VerificationPool

# Workers import the helpers by name, so the folder has to be importable, not only readable by pytest.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    shared = Path(os.environ.get("GRAFTRL_SHARED", Path(__file__).parents[2].parent / "shared"))
    if not (shared / "data").is_dir():
        pytest.skip(f"the shared benchmark files are not at {shared}; set GRAFTRL_SHARED")
    return shared / "data"


@pytest.fixture(scope="session")
def pool() -> Iterator[VerificationPool]:
    """One pool of two workers with a generous limit for every test that does not kill workers."""
    with VerificationPool(workers=2, limit_s=20.0) as shared_pool:
        yield shared_pool

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graftrl.tasks.pool import VerificationPool

# Workers import the helpers by name, so the folder has to be importable, not only readable by pytest.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def pool() -> Iterator[VerificationPool]:
    """One pool of two workers with a generous limit for every test that does not kill workers."""
    with VerificationPool(workers=2, limit_s=20.0) as shared_pool:
        yield shared_pool

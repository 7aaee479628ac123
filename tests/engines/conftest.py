"""The tiny models of the policies' tests, and this folder's helpers."""

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "policies"), str(Path(__file__).parent)]


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

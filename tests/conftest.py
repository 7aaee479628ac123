"""What several folders of tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from transformers.utils import logging as transformers_logging

from graftrl import cli
from graftrl.lab.cache import SHIPPED
from graftrl.lab.models import LAB_MODELS, build_model, save_model

transformers_logging.disable_progress_bar()
hypothesis.settings.register_profile("same-every-time", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same-every-time")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny matrices: threads cost more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> dict[str, str]:
    """Two tiny untrained models, Llama and GPT-2, with different tokenizers: name -> folder."""
    root = tmp_path_factory.mktemp("pair")
    for name in "AB":
        save_model(build_model(LAB_MODELS[name], seed=3), LAB_MODELS[name], root / name)
    return {name: str(root / name) for name in "AB"}


@pytest.fixture(scope="session")
def shared_data() -> Path:
    shared = Path(os.environ.get("GRAFTRL_SHARED", Path(__file__).parents[1].parent / "shared"))
    if not (shared / "data").is_dir():
        pytest.skip(f"the shared benchmark files are not at {shared}; set GRAFTRL_SHARED")
    return shared / "data"


@pytest.fixture(scope="session")
def warm() -> dict[str, str]:
    """The laboratory's warmed-up models that come with the package."""
    return {name: str(next(SHIPPED.glob(f"{name}-*"))) for name in "AB"}


@pytest.fixture
def graftrl(capsys, monkeypatch):
    """Run a command in this process: exit code, standard output, standard error."""

    def run(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["graftrl", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return run

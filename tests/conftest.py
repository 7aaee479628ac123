"""What several folders of tests share."""

from __future__ import annotations

import sys

import pytest
from transformers.utils import logging as transformers_logging

from graftrl import cli
from graftrl.lab.models import LAB_MODELS, build_model, save_model

transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> dict[str, str]:
    """Two tiny untrained models, Llama and GPT-2, with different tokenizers: name -> folder."""
    root = tmp_path_factory.mktemp("pair")
    for name in "AB":
        save_model(build_model(LAB_MODELS[name], seed=3), LAB_MODELS[name], root / name)
    return {name: str(root / name) for name in "AB"}


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

"""What several folders of tests share."""

from __future__ import annotations

import pytest
from transformers.utils import logging as transformers_logging

from graftrl.lab.models import LAB_MODELS, build_model, save_model

transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> dict[str, str]:
    """Two tiny untrained models, Llama and GPT-2, with different tokenizers: name -> folder."""
    root = tmp_path_factory.mktemp("pair")
    for name in "AB":
        save_model(build_model(LAB_MODELS[name], seed=3), LAB_MODELS[name], root / name)
    return {name: str(root / name) for name in "AB"}

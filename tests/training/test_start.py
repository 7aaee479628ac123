"""A run as the command line starts it, where memory is not enough."""

from __future__ import annotations

import pytest
import torch
import yaml

from graftrl.training import start


def raise_(error):
    raise error


@pytest.mark.parametrize(
    "fail",
    [
        lambda: torch.empty(1 << 50),  # what a CPU says
        lambda: raise_(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
        lambda: bytearray(1 << 60),
    ],
    ids=["CPU", "GPU", "Python"],
)
def test_too_little_memory_is_one_line_that_says_what_to_lower(graftrl, content, tmp_path, monkeypatch, fail):
    monkeypatch.setattr(start, "train", lambda *_, **__: fail())
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(content()))
    code, _, err = graftrl("train", recipe, "--run", tmp_path / "run", "-q")
    assert code == 2 and err.count("\n") == 1 and err.startswith("error: out of memory: ")
    assert "--dry-run" in err and "microbatch_tokens" in err and str(tmp_path / "run") in err


def test_other_errors_are_not_taken_for_it(tmp_path):
    with pytest.raises(RuntimeError, match="shapes"), start.memory_errors(tmp_path):
        raise RuntimeError("shapes do not match")

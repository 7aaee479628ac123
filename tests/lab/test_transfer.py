"""The laboratory's proxy and target come with the package, share a tokenizer, and fit their recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from graftrl.config import load_recipe
from graftrl.exchange import same_tokenizer
from graftrl.lab import cache
from graftrl.lab.models import build_model, build_tokenizer
from graftrl.lab.transfer import PROXY, TARGET, prepare
from graftrl.lab.warmup import WarmupReport

RECIPE = Path(__file__).parents[2] / "recipes" / "transfer-lab.yaml"


def test_the_models_come_with_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_build_all", lambda specs, parent: pytest.fail("nothing is built") if specs else None)
    folders = prepare(tmp_path)
    assert set(folders) == {"P", "A", "B"} and (tmp_path / "P").resolve() == folders["P"].resolve()
    report = WarmupReport.read(tmp_path / "P")
    assert report.execution > 0.98 and report.strong > 0.38 and report.weak < 0.03


def test_the_proxy_is_smaller_and_strong_elsewhere():
    sizes = [sum(p.numel() for p in build_model(model, 0).parameters()) for model in (PROXY, TARGET)]
    assert sizes[0] < sizes[1] / 2
    assert same_tokenizer(build_tokenizer(PROXY), build_tokenizer(TARGET))


def test_the_recipe_trains_the_proxy():
    recipe = load_recipe(RECIPE)
    assert recipe.method.name == "grpo" and {n: s.path for n, s in recipe.models.items()} == {"P": "runs/lab-cache/P"}

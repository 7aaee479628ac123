from __future__ import annotations

import builtins
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from run_builder import HOSTILE, make_run

from graftrl.config import parse_recipe
from graftrl.errors import ConfigError
from graftrl.lab.models import LAB_MODELS, build_model, save_model
from graftrl.report.data import complementarity_table, learning_table, read_runs, scores, validation_table
from graftrl.report.html import render_report, report_folders
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder

FINALS = {"A": 0.5, "B": 0.6}


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href", "srcset")]
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _parse(text: str) -> _Page:
    page = _Page()
    page.feed(text)
    assert page.open == []
    return page


def test_page_is_self_contained_and_escapes_what_models_wrote(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "graft", "graft", 0, FINALS, before={"v1": 1}, grafts=True, text=HOSTILE),
        make_run(tmp_path / "grpo", "grpo", 0, FINALS, text=HOSTILE),
    ]
    text = report_folders(folders, tmp_path / "report.html", "A & B").read_text()
    page = _parse(text)
    assert not {"script", "img", "link", "iframe", "object", "embed"} & set(page.tags)
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"@import|url\((?!#)", text)
    assert "&lt;script&gt;alert" in text
    assert "<title>A &amp; B</title>" in text
    assert page.tags.count("svg") == 9
    assert page.tags.count("article") == 3
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_page_shows_what_became_of_a_peer_response(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "graft", "graft", 0, FINALS, grafts=True)
    text = render_report(read_runs([folder]), "t")
    assert "Step 2: B → A" in text
    row = r"answer 0</td><td[^>]*>1</td><td>0.900</td><td>0.900</td><td>\+0.700</td><td[^>]*>admitted</td>"
    assert re.search(row, text)
    assert "gated (score)" in text
    assert "δ = 0.8" in text


@pytest.mark.parametrize("steps", [1, 3])
def test_page_without_any_graft_or_evaluation(tmp_path: Path, steps: int) -> None:
    text = render_report(read_runs([make_run(tmp_path / "r", "grpo", steps=steps)]), "t")
    _parse(text)
    assert "No group was replaced" in text
    assert "No run has been validated" in text


def test_page_of_a_run_without_a_finished_step(tmp_path: Path) -> None:
    _parse(render_report(read_runs([make_run(tmp_path / "r", "grpo", steps=0, planned_steps=3)]), "t"))


def test_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = read_runs([make_run(tmp_path / "r")])
    original = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'graftrl\[report\]'"):
        render_report(runs, "t")


def test_report_of_a_real_run(tmp_path: Path) -> None:
    """Untrained models solve nothing, so nothing is exchanged; every file comes from the training loop itself."""
    for name in ("A", "B"):
        save_model(build_model(LAB_MODELS[name], seed=0), LAB_MODELS[name], tmp_path / name)
    recipe = parse_recipe(
        {
            "name": "real",
            "method": "graft",
            "threads": 1,
            "models": {name: {"path": str(tmp_path / name), "optimizer": {"lr": 1e-4}} for name in ("A", "B")},
            "task": {"kind": "hidden_programs", "validation_size": 12},
            "sampling": {"max_prompt_tokens": 32, "max_response_tokens": 6},
            "training": {"steps": 2, "prompts_per_step": 4, "group_size": 2, "minibatch_prompts": 2},
        },
        "test",
    )
    run = RunFolder.create(tmp_path / "run", recipe)
    train(run, recipe, Silent())
    runs = read_runs([run.root])
    assert learning_table(runs).select("step", "model").rows() == [(1, "A"), (1, "B"), (2, "A"), (2, "B")]
    assert complementarity_table(runs)["prompts"].to_list() == [4.0] * 4
    assert validation_table(runs)["step"].unique().sort().to_list() == [0, 2]
    assert set(scores(runs)) == {"A", "B"}
    text = render_report(runs, "real")
    _parse(text)
    assert "No peer response was transferred" in text

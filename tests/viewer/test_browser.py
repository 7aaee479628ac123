"""What models wrote does not run: the page in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_builder import group, make_run

from graftrl.chunks import EVALUATION
from graftrl.logs.rollouts import write_rollouts, write_transfers
from graftrl.methods import Transfer
from graftrl.policies.config import SamplingSettings
from graftrl.rollout import Group, Prompt, Response
from graftrl.viewer import server as serving_module
from graftrl.viewer.runs import open_runs
from graftrl.viewer.server import ViewServer

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

HOSTILE = (
    "</script></style><script>document.title='ran';fetch('/ran-script')</script>"
    "<img src='/ran-image' onerror=\"document.title='ran'\"><svg onload=\"document.title='ran'\"></svg>"
    "<iframe srcdoc=\"<script>parent.document.title='ran'</script>\"></iframe>"
)


@contextmanager
def serving(path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[ViewServer]:
    monkeypatch.setattr(serving_module._Handler, "log_request", lambda self, *_: asked.append(self.path))
    with ViewServer(open_runs([path])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def page_after_running(address: str, profile: Path) -> str:
    """The page's elements as HTML once its scripts have run."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
            "--virtual-time-budget=3000", "--dump-dom", address,
        ],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert "<html" in done.stdout, done.stderr[-2000:]
    return done.stdout


def hostile_run(root: Path) -> Path:
    run = make_run(root, "graft", steps=1)
    prompt = Prompt(HOSTILE, ({"role": HOSTILE, "content": HOSTILE},), HOSTILE, HOSTILE)
    tokens = {"token_ids": np.array([1, 2]), "logprobs": np.array([-0.1, -3.0], np.float32), "finish_reason": "stop"}
    groups = {
        model: [Group(model, prompt, [Response(HOSTILE, reward=r, grade_reason=HOSTILE, **tokens) for r in rewards])]
        for model, rewards in (("A", (0.0, 0.0)), ("B", (1.0, 0.0)))
    }  # fmt: skip
    write_rollouts(
        run / "rollouts" / "step-000001.parquet", run=HOSTILE, step=1, groups=groups, sampling=SamplingSettings(),
        fingerprints={"A": "a", "B": "b"},
    )  # fmt: skip
    moved = [Transfer("A", "B", HOSTILE, i, HOSTILE, HOSTILE, 1.0, 0.5, 0.9, 0.9, 3) for i in (0, 1)]
    write_transfers(run / "exchange" / "step-000001.parquet", 1, moved)
    return run


def test_hostile_texts_are_shown_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    with serving(hostile_run(tmp_path / "run"), asked, monkeypatch) as server:
        page = page_after_running(server.url, tmp_path / "profile")
    assert "<title>graftrl view</title>" in page
    assert not [path for path in asked if "ran-" in path.partition("?")[0]]
    assert {path.partition("?")[0] for path in asked} <= {
        "/", "/view.js", "/view.css", "/favicon.ico", "/api/runs", "/api/prompts", "/api/prompt",
    }  # fmt: skip
    assert not re.search(r"<(img|iframe|svg)\b", page)
    assert page.count("<script") == 1
    shown = unescape(page)
    # prompt, role, reference, task, id, two responses a model, their verdicts, and what became of them
    assert shown.count(HOSTILE) >= 12


@pytest.mark.parametrize("policy", [True, False], ids=["with the policy", "without it"])
def test_the_policy_would_hold_where_the_page_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: bool
) -> None:
    """Were a text ever read as markup, the policy would still stop it; without the policy this one runs."""
    careless: Any = serving_module._Handler._answer

    def with_markup(self: Any, body: bytes, kind: str, *more: Any) -> None:
        if kind.startswith("text/html"):
            body = body.replace(b"</body>", f"{HOSTILE}</body>".encode())
        careless(self, body, kind, *more)

    monkeypatch.setattr(serving_module._Handler, "_answer", with_markup)
    if not policy:
        monkeypatch.delitem(serving_module.HEADERS, "Content-Security-Policy")
    asked: list[str] = []
    with serving(make_run(tmp_path / "run", steps=1), asked, monkeypatch) as server:
        page = page_after_running(server.url, tmp_path / "profile")
    assert ("<title>ran</title>" in page) is not policy
    assert ("/ran-script" in asked) is not policy
    assert ("/ran-image" in asked) is not policy


CONTROL = "\x1b[2J\x1b[31mred\x1b]8;;http://evil.example\x07link \u202eoverride \u2066isolate \x00nul \u0085 \u2028"
LINKS = (
    "[a](javascript:document.title='ran') javascript:document.title='ran' http://evil.example data:text/html,<b>x</b>"
)
LONG = "x" * 60_000


def test_links_control_characters_and_long_lines_stay_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", steps=1, text=f"{CONTROL}{LINKS}{LONG}")
    with serving(run, [], monkeypatch) as server:
        page = page_after_running(server.url, tmp_path / "profile")
    links = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert links and all(link.startswith("#") or link in ("view.css", "view.js") for link in links)
    assert "<title>graftrl view</title>" in page
    shown = unescape(page)
    for text in (LINKS, LONG, "\u202eoverride", "\x1b[31mred", "nul"):
        assert text in shown
    # What turns the direction of writing is kept inside of its element, and a long line is broken.
    style = (Path(serving_module.__file__).parent / "static" / "view.css").read_text()
    (isolated,) = re.findall(r"([^\n]*) { unicode-bidi: isolate; }", style)
    assert {"pre", "code", ".tokens", ".where"} <= {name.strip() for name in isolated.split(",")}
    assert re.search(r"pre, \.tokens {[^}]*overflow-wrap: anywhere", style)


def test_an_evaluation_speaks_of_runs_and_hides_what_only_training_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "eval"
    for model, reward in (("A", 0.0), ("B", 1.0)):
        write_rollouts(
            root / "rollouts" / model / "sums" / "run-01-chunk-0001.parquet",
            run="eval", step=1, groups={model: [group(model, "p1", [reward], "said")]}, sampling=SamplingSettings(),
            fingerprints={model: model}, policy_version=40,
        )  # fmt: skip
    EVALUATION.write(root, {"models": {}, "benchmarks": {"sums": {}}}, {})
    with serving(root, [], monkeypatch) as server:
        page = page_after_running(server.url, tmp_path / "profile")
    for text in ("Run 1 · p1", "run 1 · p1", "only this run", "pass@1 of A 0.0 %, pass@1 of B 100.0 %"):
        assert text in page
    assert "checkpoint of step 40" in page and "weights after" not in page and "advantage" not in page
    assert re.search(r'id="exchange-choice" hidden', page)


def test_the_page_shows_a_prompt_and_follows_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(make_run(tmp_path / "run", "graft", grafts=True), [], monkeypatch) as server:
        page = page_after_running(f"{server.url}#exchange=taken&model=A&first=2", tmp_path / "profile")
    assert "2 prompts" in page
    assert "Step 2 · p1" in page
    assert "exchanged: the group of B took the place of A's own; 1 admitted, 1 gated by score" in page
    assert re.search(r"s 0\.900 · w 0\.900 · advantage \+0\.70", page)
    assert "log-probability −0.2000 (81.9 %)" in page

"""The Python of the guides runs as it is printed, from top to bottom, in a fresh folder."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import torch

import graftrl
from graftrl.lab.cache import SHIPPED
from graftrl.logs.reader import RolloutLog

ROOT = Path(__file__).parents[2]
READ_A_RUN = ("lab.md", "run-folder.md", "how-to/logs.md")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def blocks(page):
    """Python blocks in order; one whose first line names a file, such as `# task.py`, with that name."""
    found = []
    for code in re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE):
        name = re.match(r"# (\w+\.py)\b", code)
        found.append((name and name[1], code))
    return found


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder as `make quickstart` leaves it, as far as the guides use it."""
    for name in "AB":
        shutil.copytree(next(SHIPPED.glob(f"{name}-*")), tmp_path / "runs" / "lab-cache" / name)
    (tmp_path / "recipes").mkdir()
    shutil.copy(ROOT / "recipes" / "quickstart.yaml", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)
    for name in ("task", "pair", "shortest", "my_task", "my_reward"):
        sys.modules.pop(name, None)


def run(page, place):
    """Execute the page in one namespace; blocks that are files are written instead. Returns the files."""
    namespace = {"__name__": "__main__"}
    files = {}
    for name, code in blocks(page):
        if name:
            (place / name).write_text(code)
            files[name] = code
        else:
            exec(compile(code, page, "exec"), namespace)
    return files


def test_python(place, capsys):
    run("how-to/python.md", place)
    out = capsys.readouterr().out
    assert "graft on A, B, step 4" in out and "after 0" in out and "temperature" in out
    assert "{'A': {'p': 'B'}, 'B': {'q': 'A'}}" in out


def test_trl(place, capsys):
    """Both ways to a peer: the log of a run that is over, and the same script side by side."""
    pytest.importorskip("trl")
    files = run("how-to/trl.md", place)
    log = RolloutLog(place / "runs" / "trl-B")
    assert log.models == ("B",) and log.steps("B") == [1, 2, 3]
    exchange = pl.read_parquet(place / "runs" / "trl-A" / "exchange" / "*.parquet")
    assert "admitted" in set(exchange["status"]) and "admitted" in capsys.readouterr().out
    assert "sys.argv[1:]" in files["pair.py"]

    # Two processes, as on the page: loading a model is not safe in two threads of one.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(place)}
    sides = [
        subprocess.Popen([sys.executable, "pair.py", *names], env=environment, stderr=subprocess.PIPE, text=True)
        for names in ("AB", "BA")
    ]
    for process in sides:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-2000:]
        assert "GOES ON ALONE" not in err
    for name in "AB":
        assert RolloutLog(place / "runs" / "pair" / name).steps(name) == [2, 3]  # the folder keeps the last two


def test_own_method(place, capsys):
    """The class of the page trains, from the working directory, and what it imitates is counted and logged."""
    run("how-to/own-method.md", place)
    assert "trained_tokens/imitated" in capsys.readouterr().out
    exchange = pl.read_parquet(place / "runs" / "shortest" / "exchange" / "*.parquet")
    assert set(exchange["status"]) == {"admitted"} and (exchange["reward"] == 1).all()
    assert exchange.select("step", "receiver", "prompt_id").is_duplicated().sum() == 0


def test_own_reward(place, capsys):
    """The verifiers of the page grade what the page says, and a run with one of them trains."""
    run("how-to/tasks.md", place)
    assert capsys.readouterr().out == "1.0 correct\n0.0 wrong answer\n0.5 right, but not at once\n"


def test_blocks_that_read_a_run(place, capsys):
    """The blocks of other pages, on a short run under the names that they use."""
    graftrl.train(
        "recipes/quickstart.yaml",
        {"training.steps": 2, "training.prompts_per_step": 8, "evaluation.prompts": 12, "checkpoint.every": 2},
        run="runs/first",
    )
    for page in READ_A_RUN:
        for _, code in blocks(page):
            code = code.replace("FOLDER", "runs/first").replace("step-000060", "step-000002")
            exec(compile(code, page, "exec"), {"__name__": "__main__"})
    assert "[" in capsys.readouterr().out  # rewards of the log's groups


def test_the_python_of_every_page_is_run():
    """By a test of this file, or of test_commands.py: the tutorial's."""
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    with_code = {page for page in pages if blocks(page)}
    tested = {"how-to/python.md", "how-to/trl.md", "how-to/own-method.md", "how-to/tasks.md", "how-to/live-peers.md"}
    tested.add("tutorial.md")
    assert with_code == tested | set(READ_A_RUN)


def test_every_guide_that_is_linked_exists():
    for page in (ROOT / "docs").rglob("*.md"):
        for link in re.findall(r"\]\(([^)#:]+\.(?:md|png|svg))\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page}: {link}"


def test_a_script_meets_the_prompts_of_a_recipe_in_its_order(place):
    pytest.importorskip("datasets")
    namespace = {}
    ((_, code),) = blocks("how-to/live-peers.md")
    exec(compile(code, "live-peers.md", "exec"), namespace)
    recipe, data = namespace["recipe"], namespace["data"]
    size = recipe.training.prompts_per_step
    assert len(data) == 100 * size and len(set(data[:size]["id"])) == size
    assert data[size]["id"] == namespace["stream"].batch(1)[0].id

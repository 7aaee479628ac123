"""The script that compares methods on two real models, with tiny ones in their place."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_runs import RECIPE

from graftrl.config import load_recipe
from graftrl.errors import RunError
from graftrl.lab.jobs import Job, finished_steps
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder

SCRIPT = RECIPE.parent / "real_pair" / "compare.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("compare_real_pair", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where its dataclass looks its types up
    spec.loader.exec_module(module)
    return module


def test_its_recipe_takes_every_method_of_the_comparison(script: Any) -> None:
    named = ("grpo", "scion", "scion-no-damping", "sgt", "graft", "sgt-0.3", "grpo-n32", "hacpo")
    recipes = {}
    for method in named:
        job = script.job_of(method, 2, 4, Path("unused"))
        recipes[method] = load_recipe(job.recipe, job.overrides)
    found = [recipe.method.name for recipe in recipes.values()]
    assert found == ["grpo", "scion", "scion", "sgt", "graft", "sgt", "grpo", "hacpo"]
    assert recipes["scion-no-damping"].method.tau == 0
    training = {method: recipe.training for method, recipe in recipes.items()}
    assert training["grpo-n32"].group_size == 4 * training["grpo"].group_size
    assert training["hacpo"].minibatch_prompts == 2 * training["grpo"].minibatch_prompts


def test_it_writes_a_row_per_model_method_and_seed_and_goes_on_where_it_stopped(
    script: Any, tmp_path: Path, pair: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "VALIDATION_PROMPTS", 24)
    small = ["training.prompts_per_step=2", "training.group_size=2",
             "training.minibatch_prompts=2", "sampling.max_response_tokens=6"]  # fmt: skip
    models = {name: {"path": path} for name, path in pair.items()}
    recipe = load_recipe(RECIPE, [f"models={json.dumps(models)}", *small])
    monkeypatch.setattr(script, "RECIPE", tmp_path / "recipe.yaml")
    script.RECIPE.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    trained = []

    def in_this_process(jobs: Sequence[Job], workers: int, console: Any) -> int:
        for job in jobs:
            if finished_steps(job.folder) == 0:
                wanted = load_recipe(job.recipe, job.overrides)
                train(RunFolder.create(job.folder, wanted), wanted, Silent())
                trained.append(job.name)
        return len(trained)

    monkeypatch.setattr(script, "run_jobs", in_this_process)
    command = ["compare.py", "--methods", "grpo,scion", "--seeds", "1", "--steps", "1", "--run", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", command)
    script.main()
    script.main()
    assert trained == ["grpo seed 0", "scion seed 0"]
    table = list(csv.DictReader((tmp_path / "runs" / "real-pair.csv").read_text().splitlines()))
    assert list(table[0]) == [
        "regime", "pair", "model", "method", "seed", "pass1", "pass8", "wall_s", "steps", "before", "entropy", "damped",
        *"abcdefghijkl",
    ]  # fmt: skip
    assert [(row["method"], row["model"]) for row in table] == [
        ("grpo", "A"), ("grpo", "B"), ("scion", "A"), ("scion", "B"),
    ]  # fmt: skip
    page = (tmp_path / "runs" / "real-pair.md").read_text().splitlines()
    of_both = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page if line.startswith("| both |")]
    assert [row[1:3] for row in of_both] == [["`grpo`", "1"], ["`scion`", "1"]]
    grpo, scion = ((float(table[i]["pass1"]) + float(table[i + 1]["pass1"])) / 2 for i in (0, 2))
    assert of_both[0][3:5] == [f"{grpo:.3f}", ""] and of_both[1][3:5] == [f"{scion:.3f}", f"{scion - grpo:+.3f}"]
    (header,) = [line for line in page if line.startswith("| model |")]
    named = dict(zip([cell.strip() for cell in header.split("|")[1:-1]], of_both[1], strict=True))
    by_family = [float(named[family]) for family in "abcdefghijkl"]
    assert sum(by_family) / len(by_family) == pytest.approx(scion, abs=2e-3)  # all have as many prompts
    assert page[4].startswith("pass@1 before training: A 0.")
    assert not list((tmp_path / "runs").glob("*/checkpoints"))  # 5 GB each
    assert all(0 <= float(row["pass1"]) <= float(row["pass8"]) <= 1 and float(row["wall_s"]) > 0 for row in table)

    shutil.rmtree(tmp_path / "runs" / "grpo-seed0")  # the table is enough, and is not lost
    written = (tmp_path / "runs" / "real-pair.csv").read_text()
    script.main()
    assert trained == ["grpo seed 0", "scion seed 0"]
    assert (tmp_path / "runs" / "real-pair.csv").read_text() == written
    assert (tmp_path / "runs" / "real-pair.md").read_text().splitlines() == page
    monkeypatch.setattr(sys, "argv", [*command[:-4], "--steps", "2", *command[-2:]])
    with pytest.raises(RunError, match="has runs of 1 steps, not of 2: give --out another folder, or --steps"):
        script.main()


def test_the_stored_table_makes_the_stored_page(script: Any, tmp_path: Path) -> None:
    stored = RECIPE.parent.parent / "docs" / "results"
    script.write_tables(tmp_path, script.read_table(stored / "real-pair.csv", 20), script.METHODS, 20)
    for name in ("real-pair.csv", "real-pair.md"):
        assert (tmp_path / name).read_text() == (stored / name).read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((",before,", ",former,"), "has no column 'before': give --out another folder, or mend the table"),
        ((",20,", ",20 steps,"), "line 2: invalid literal for int.*: remove the row, and its run is measured anew"),
    ],
)
def test_a_damaged_table_is_refused_in_one_line(
    script: Any, tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    stored = (RECIPE.parent.parent / "docs" / "results" / "real-pair.csv").read_text()
    (tmp_path / "real-pair.csv").write_text(stored.replace(*change, 1))
    with pytest.raises(RunError, match=message):
        script.read_table(tmp_path / "real-pair.csv", 20)


def test_the_damped_share_counts_tokens_not_steps(script: Any) -> None:
    def step(tokens: int, means: dict[str, float]) -> dict[str, Any]:
        return {"trained_tokens": {"own": 50, "sft": tokens}, "token_means": means}

    scion = [step(10, {"damped": 0.2}), step(0, {}), step(30, {"damped": 0.4})]
    assert script.damped_share(scion) == pytest.approx((2 + 12) / 40)
    assert script.damped_share([step(10, {"peer_loss": 1.0})]) is None

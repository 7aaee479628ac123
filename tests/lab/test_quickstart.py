from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rich.console import Console

from graftrl.config import dump_recipe, load_recipe
from graftrl.errors import ConfigError, RunError
from graftrl.lab import quickstart
from graftrl.lab.jobs import Job
from graftrl.lab.models import LAB_MODELS, build_model, save_model
from graftrl.lab.warmup import WarmupReport
from graftrl.report.data import read_runs, scores

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def _hand_made(root: Path, method: str, seed: int, final: float, prompts: list[str]) -> Path:
    recipe = load_recipe(RECIPE, [f"method={method}", f"seed={seed}", "training.steps=1"])
    folder = root / f"{method}{seed}"
    for name in ("evaluations", "rollouts"):
        (folder / name).mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_recipe(recipe))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "models": {}, "exchange": {}}) + "\n")
    for step, score, right in ((0, 0.25, [1, 0, 0, 0]), (1, final, [])):
        evaluation = {
            "step": step,
            "results": {model: {"pass_at_1": score, "samples": 1} for model in "AB"},
            "successes": {model: {f"v{i}": k for i, k in enumerate(right)} for model in "AB"},
        }
        (folder / "evaluations" / f"step-{step:06d}.json").write_text(json.dumps(evaluation))
    log = pl.DataFrame({"step": [1] * len(prompts), "model": ["A"] * len(prompts), "prompt_id": prompts})
    log.write_parquet(folder / "rollouts" / "step-000001.parquet")
    return folder


def test_summary_by_hand(tmp_path: Path) -> None:
    finals = {("grpo", 0): 0.60, ("graft", 0): 0.70, ("grpo", 1): 0.70, ("graft", 1): 0.90}
    folders = [_hand_made(tmp_path, *key, final, ["p"]) for key, final in finals.items()]
    runs = read_runs(folders)
    summary = quickstart.summarize(runs, wall_s=12.5)
    assert summary["wall_s"] == 12.5
    assert list(summary["models"]) == ["A", "B"]
    a = summary["models"]["A"]
    assert a["before"] == 0.25
    assert a["before_interval"][0] <= 0.25 <= a["before_interval"][1]
    assert a["grpo"]["seeds"] == [0.60, 0.70]
    assert a["grpo"]["mean"] == pytest.approx(0.65)
    assert a["grpo"]["half_width"] == pytest.approx(0.63531, abs=1e-5)  # t(1) = 12.7062, times 0.05
    assert a["graft"]["mean"] == pytest.approx(0.80)
    assert a["gain"]["mean"] == pytest.approx(0.15)
    assert a["gain"]["seeds"] == pytest.approx([0.1, 0.2])
    assert a["gain"]["half_width"] == pytest.approx(0.63531, abs=1e-5)
    console = Console(record=True, width=120)
    console.print(quickstart.comparison_table(scores(runs)))
    shown = console.export_text()
    assert "0.650 ± 0.635" in shown
    assert "+0.150 ± 0.635" in shown


def test_same_prompts_are_checked(tmp_path: Path) -> None:
    one = _hand_made(tmp_path, "grpo", 0, 0.5, ["p1", "p1", "p2"])
    same = _hand_made(tmp_path, "graft", 0, 0.5, ["p1", "p2", "p2"])
    other = _hand_made(tmp_path, "graft", 1, 0.5, ["p2", "p1"])
    quickstart.check_same_prompts(read_runs([one, same, other]))  # another seed may differ
    swapped = _hand_made(tmp_path / "swapped", "graft", 0, 0.5, ["p2", "p1"])
    with pytest.raises(RunError, match="saw different prompts"):
        quickstart.check_same_prompts(read_runs([one, swapped]))


def test_both_methods_get_the_same_budget_and_options(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, ["method.clip_high=0.3", "method.threshold=0.7"])
    jobs = quickstart.plan_jobs(RECIPE, recipe, tmp_path, range(2), {"A": tmp_path / "a", "B": tmp_path / "b"})
    assert [job.name for job in jobs] == ["grpo seed 0", "graft seed 0", "grpo seed 1", "graft seed 1"]
    grpo, graft = (load_recipe(job.recipe, job.overrides) for job in jobs[2:])
    assert grpo.method.clip_high == graft.method.clip_high == 0.3
    assert graft.method.threshold == 0.7
    assert graft.models["A"].path == str(tmp_path / "a")
    different = {
        key for key, value in grpo.model_dump(mode="json").items() if value != graft.model_dump(mode="json")[key]
    }
    assert different == {"name", "method"}
    assert grpo.seed == 1


def test_recipes_without_the_laboratory_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.read_text().replace("  A:\n    path", "  Z:\n    path"))
    with pytest.raises(ConfigError, match="unknown laboratory model 'Z'"):
        quickstart.run_quickstart(path, tmp_path / "q", seeds=1, console=Console(quiet=True))


def test_from_nothing_to_a_report_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Untrained models stand for warmed-up ones; training is the real thing, in two processes."""
    recipe = tmp_path / "tiny.yaml"
    text = RECIPE.read_text().replace("validation_size: 720", "validation_size: 12")
    text = text.replace("max_response_tokens: 30", "max_response_tokens: 6").replace("steps: 60", "steps: 2")
    text = text.replace("prompts_per_step: 32", "prompts_per_step: 8").replace("group_size: 8", "group_size: 2")
    recipe.write_text(text)

    def untrained(cache: Path, task: Any, models: Any) -> dict[str, Path]:
        folders = {model.name: cache / f"{model.name}-0" for model in models}
        for name, folder in folders.items():
            if not folder.exists():
                folder.mkdir(parents=True)
                save_model(build_model(LAB_MODELS[name], seed=0), LAB_MODELS[name], folder)
                report = WarmupReport(
                    model=name, losses=[1.0], pass_at_1={"a": 0.0}, strong=0.0, weak=0.0, execution=0.0, cpu_seconds=0.0
                )
                (folder / "warmup.json").write_text(report.model_dump_json())
        return folders

    monkeypatch.setattr(quickstart, "ensure_warm_pair", untrained)
    root = tmp_path / "runs" / "quickstart"
    summary = quickstart.run_quickstart(recipe, root, seeds=1, workers=2, console=Console(quiet=True))
    assert json.loads((root / "summary.json").read_text()) == summary
    assert {"before", "grpo", "graft"} <= set(summary["models"]["B"])
    assert len(summary["models"]["B"]["grpo"]["seeds"]) == 1
    assert (root / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert (root.parent / "lab-cache" / "A" / "config.json").exists()

    def no_training(jobs: list[Job], *arguments: Any) -> int:
        assert all((job.folder / "metrics.jsonl").read_text().count("\n") == 2 for job in jobs)
        return 0

    monkeypatch.setattr(quickstart, "run_jobs", no_training)
    again = quickstart.run_quickstart(recipe, root, seeds=1, workers=2, console=Console(quiet=True))
    assert again == summary

"""The command line as a user meets it: what is printed, what is on standard error, the exit code."""

import json
from pathlib import Path

import pytest
import yaml

from graftrl import __version__
from graftrl.config import load_recipe

ROOT = Path(__file__).parent.parent
TOY = ROOT / "tests" / "training"


@pytest.fixture
def recipe(tmp_path, monkeypatch, pair):
    """Writes a toy recipe with the given sections; the toy task is importable."""
    monkeypatch.syspath_prepend(str(TOY))

    def write(**sections) -> Path:
        content = {
            "name": "toy",
            "threads": 1,
            "method": "graft",
            "models": {name: {"path": path} for name, path in pair.items()},
            "task": {"kind": "function", "prompts": "toy_task:prompts", "verifier": "toy_task:verify"},
            "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 6},
            "training": {"steps": 1, "prompts_per_step": 4, "group_size": 2, "minibatch_prompts": 4},
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({**content, **sections}))
        return path

    return write


def refused(result: tuple[int, str, str], code: int) -> str:
    """The one line on standard error."""
    assert result[0] == code and result[1] == ""
    assert result[2].startswith("error: ") and result[2].count("\n") == 1
    return result[2]


def test_version(graftrl):
    assert graftrl("--version") == (0, f"graftrl {__version__}\n", "")


def test_train_prints_progress_and_writes_a_run_folder(graftrl, recipe, tmp_path):
    code, out, _ = graftrl("train", recipe(), "--run", tmp_path / "run", "training.steps=2")
    assert code == 0
    assert "toy: graft on A, B, 2 steps of 4 prompts x 2 responses" in out
    assert "step 2/2" in out and "reward" in out and "grafted" in out and "tokens/s" in out and "s left" in out
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert load_recipe(tmp_path / "run" / "config.yaml").training.steps == 2


def test_a_dry_run_reports_models_data_and_memory_without_training(graftrl, recipe, tmp_path):
    code, out, _ = graftrl("train", recipe(), "--dry-run", "--run", tmp_path / "run")
    assert code == 0 and not (tmp_path / "run").exists()
    assert "LlamaForCausalLM" in out and "GPT2LMHeadModel" in out
    assert "24 training" in out and "fits" in out


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_bad_input_is_one_line_and_a_non_zero_exit(graftrl, recipe, tmp_path, arguments):
    def train(**sections) -> str:
        return refused(graftrl("train", recipe(**sections), "--run", tmp_path / "run", *arguments), 2)

    assert "no directory" in train(models={"A": {"path": str(tmp_path / "missing")}, "B": {"path": "/none/of/it"}})
    assert "unknown key; did you mean 'threshold'?" in train(method={"name": "graft", "thresold": 0.5})
    empty = {"kind": "function", "prompts": "toy_task:nothing", "verifier": "toy_task:verify"}
    assert "no prompts" in train(task=empty)
    assert "no such" in train(task={"kind": "math", "train": {"path": str(tmp_path / "none.jsonl")}})
    assert "only 24 usable" in train(training={"steps": 1, "prompts_per_step": 99, "minibatch_prompts": 4})
    assert "max_prompt_tokens" in train(sampling={"max_prompt_tokens": 1, "max_response_tokens": 6})
    assert "positions" in train(sampling={"max_prompt_tokens": 16, "max_response_tokens": 100_000})


def test_grading_prints_every_line_with_reward_and_reason(graftrl, tmp_path):
    file = tmp_path / "responses.jsonl"
    file.write_text(
        json.dumps({"answer": "5", "response": r"\boxed{5}", "id": 1})
        + "\n"
        + json.dumps({"answer": "5", "response": "it is 5"})
        + "\nnot json\n"
    )
    code, out, err = graftrl("grade", file)
    graded = [json.loads(line) for line in out.splitlines()]
    assert [line["reward"] for line in graded] == [1.0, 0.0]  # the lines before the bad one are not lost
    assert graded[0]["id"] == 1 and graded[1]["reason"] == "no boxed answer"
    assert code == 2 and "responses.jsonl" in err and "3" in err and err.count("\n") == 1


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_project_is_valid(path):
    assert load_recipe(path).name


def test_paper_recipes_have_the_papers_settings():
    for path in (ROOT / "recipes" / "paper").glob("*.yaml"):
        r = load_recipe(path)
        assert len(r.models) == 2 and r.method.name == "graft" and r.method.threshold == 0.8
        assert (r.training.epochs, r.training.prompts_per_step, r.training.group_size) == (3, 128, 8)
        assert (r.training.minibatch_prompts, r.sampling.max_response_tokens) == (32, 4096)
        assert {model.optimizer.lr for model in r.models.values()} == {1e-6}
        assert {model.dtype for model in r.models.values()} == {"bfloat16"}

"""The command line as a user meets it: what is printed, what is on standard error, the exit code."""

import json
from pathlib import Path

import pytest
import yaml

from graftrl import __version__
from graftrl.config import load_recipe
from graftrl.lab.cache import CACHE

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


def test_a_dry_run_as_json_has_the_same_numbers(graftrl, recipe, pair):
    code, out, err = graftrl("train", recipe(), "--dry-run", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "") and (found["name"], found["method"], found["fits"]) == ("toy", "graft", True)
    assert [(m["name"], m["architecture"]) for m in found["models"]] == [
        ("A", "LlamaForCausalLM"),
        ("B", "GPT2LMHeadModel"),
    ]
    a = found["models"][0]
    assert a["weights"] == 4 * a["parameters"] and a["optimizer"] == 12 * a["parameters"]
    # The models take turns: what stays of both, and what the greater adds while it works.
    assert max(m["peak"] for m in found["models"]) < found["peak_bytes"] < sum(m["peak"] for m in found["models"])
    assert (found["training_prompts"], found["steps"], found["prompts_per_step"]) == (24, 1, 4)
    assert found["most_sampled_tokens"] == 4 * 2 * 6


def test_json_without_a_dry_run_is_refused_and_nothing_is_trained(graftrl, recipe, tmp_path):
    assert "--dry-run" in refused(graftrl("train", recipe(), "--json", "--run", tmp_path / "run"), 2)
    assert "--dry-run" in refused(graftrl("lab", "main", "--json"), 2)
    assert not (tmp_path / "run").exists()


def test_the_quickstart_as_json_keeps_standard_output_clean(graftrl, monkeypatch):
    from graftrl.lab import quickstart

    def fake(recipe, root, *, seeds, workers, console):
        console.print("1/3 warming up")
        return {"models": {"A": {"before": 0.2}}, "wall_s": 1.0}

    monkeypatch.setattr(quickstart, "run_quickstart", fake)
    code, out, err = graftrl("quickstart", "--json")
    assert code == 0 and json.loads(out)["models"]["A"]["before"] == 0.2 and "warming up" in err
    code, out, err = graftrl("quickstart")
    assert out == "1/3 warming up\n" and err == ""


def test_every_command_that_prints_a_table_has_json(graftrl):
    tables = (
        ["train"], ["transfer"], ["quickstart"], ["lab"], ["eval"], ["probe"], ["doctor"], ["logs", "inspect"],
        ["proxies", "list"],
    )  # fmt: skip
    for command in tables:
        assert "--json" in graftrl(*command, "--help")[1], command


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_bad_input_is_one_line_and_a_non_zero_exit(graftrl, recipe, tmp_path, arguments):
    def train(**sections) -> str:
        return refused(graftrl("train", recipe(**sections), "--run", tmp_path / "run", *arguments), 2)

    assert "no directory" in train(models={"A": {"path": str(tmp_path / "missing")}, "B": {"path": "/none/of/it"}})
    early = train(models={"A": {"path": f"/none/{CACHE}/A"}, "B": {"path": "/none/of/it"}})
    assert "`graftrl quickstart` puts the laboratory's models there" in early
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
    paths = [p for p in (ROOT / "recipes" / "paper").glob("*.yaml") if not p.stem.startswith("p-opd")]  # tests/transfer
    for path in paths:
        r = load_recipe(path)
        assert len(r.models) == 2 and r.method.name == "graft" and r.method.threshold == 0.8
        assert (r.training.epochs, r.training.prompts_per_step, r.training.group_size) == (3, 128, 8)
        assert (r.training.minibatch_prompts, r.sampling.max_response_tokens) == (32, 4096)
        assert {model.optimizer.lr for model in r.models.values()} == {1e-6}
        assert {model.dtype for model in r.models.values()} == {"bfloat16"}

"""`graftrl init`: what it writes passes `train --dry-run`, and what is missing is asked for or named."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from graftrl.config import load_recipe
from graftrl.errors import ConfigError, GraftrlError
from graftrl.init.recipe import Answers, write_recipe


@pytest.fixture
def roomy(pair, tmp_path):
    """The tiny models with 1,024 positions, by their configs."""
    for name, key in (("A", "max_position_embeddings"), ("B", "n_positions")):
        shutil.copytree(pair[name], tmp_path / "roomy" / name)
        config = tmp_path / "roomy" / name / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), key: 1024}))
    return {name: str(tmp_path / "roomy" / name) for name in "AB"}


@pytest.fixture
def data(tmp_path):
    def write(rows, name="math.jsonl"):
        file = tmp_path / name
        file.write_text(
            "".join(json.dumps({"id": f"p{i}", "problem": f"1+{i}", "answer": str(1 + i)}) + "\n" for i in range(rows))
        )
        return str(file)

    return write


def init(graftrl, tmp_path, *flags, code=0):
    file = tmp_path / "made.yaml"
    result = graftrl("init", file, *flags)
    assert result[0] == code, result
    return file, result


def test_the_file_passes_a_dry_run(graftrl, tmp_path, roomy, data):
    flags = ["--model", roomy["A"], "--model", f"other={roomy['B']}", "--task", "math", "--train", data(40)]
    file, (_, out, _) = init(graftrl, tmp_path, *flags, "--validation", data(5, "test.jsonl"))
    assert f"{file}: graft on A, other; next: graftrl train {file} --dry-run" in out
    assert "there are 40 training prompts" in out and "1024 positions" in out
    code, out, err = graftrl("train", file, "--dry-run")
    assert (code, err) == (0, "") and "40 training and 5 validation prompts" in out and "fits" in out


@pytest.mark.parametrize(
    ("flags", "method"),
    [
        (["--task", "hidden_programs", "--method", "scion"], "scion"),
        (["--task", "hidden_programs", "--method", "graft-no-gate", "--epochs", "1"], "graft"),
        (["--task", "hidden_programs", "--max-prompt-tokens", "30", "--lr", "0.001", "--dtype", "bfloat16"], "graft"),
    ],
    ids=["scion", "preset", "options"],
)
def test_other_tasks_and_options_pass_too(graftrl, tmp_path, pair, flags, method):
    file, _ = init(graftrl, tmp_path, "--model", pair["A"], "--model", pair["B"], *flags)
    assert load_recipe(file).method.name == method
    assert graftrl("train", file, "--dry-run")[0] == 0


def test_prompts_and_verifier_of_ones_own(graftrl, tmp_path, pair, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "training"))
    flags = ["--task", "function", "--prompts", "toy_task:prompts", "--verifier", "toy_task:verify"]
    file, _ = init(graftrl, tmp_path, "--model", pair["A"], *flags)
    recipe = load_recipe(file)
    assert recipe.method.name == "grpo"  # one model
    assert (recipe.training.prompts_per_step, recipe.training.minibatch_prompts) == (24, 24)
    assert graftrl("train", file, "--dry-run")[0] == 0


def test_stored_peers_and_scorers_have_their_sections(tmp_path):
    answers = Answers(
        models=["m/a"], peers=["B=runs/first"], task="hidden_programs", scorers=["teacher=m/t"], method="opd"
    )
    recipe, _ = write_recipe(answers, tmp_path / "r.yaml")
    assert recipe.peers["B"].match == "prompt" and recipe.scorers["teacher"].path == "m/t"
    grafted, _ = write_recipe(
        Answers(models=["m/a"], peers=["runs/first"], task="hidden_programs"), tmp_path / "g.yaml"
    )
    assert grafted.method.name == "graft" and list(grafted.peers) == ["first"]


def test_data_sets_of_reasoning_gym(tmp_path):
    answers = Answers(models=["m/a", "m/b"], task="reasoning_gym", datasets=["leg_counting", "gcd"], steps=3)
    recipe, _ = write_recipe(answers, tmp_path / "r.yaml")
    assert [each.name for each in recipe.task.datasets] == ["leg_counting", "gcd"] and recipe.training.steps == 3


def test_hub_models_and_data_need_no_network(tmp_path):
    answers = Answers(models=["Qwen/Qwen3-1.7B-Base", "HuggingFaceTB/SmolLM3-3B-Base"], task="math", train="org/MATH")
    recipe, notes = write_recipe(answers, tmp_path / "r.yaml")
    assert list(recipe.models) == ["Qwen3-1.7B-Base", "SmolLM3-3B-Base"] and notes == []
    assert recipe.task.train.hub == "org/MATH" and recipe.training.prompts_per_step == 128
    assert (recipe.sampling.max_prompt_tokens, recipe.sampling.max_response_tokens) == (2048, 4096)
    text = (tmp_path / "r.yaml").read_text()
    assert (
        text.startswith("# Written by graftrl init") and text.count("\n# ") >= 8 and yaml.safe_load(text)["name"] == "r"
    )


def test_on_a_terminal_it_asks_for_what_is_missing(tmp_path, pair, data):
    file = data(10)
    replies = {"Models": f"{pair['A']} {pair['B']}", "Method": "graft", "Task": "math", "Training": file}
    replies["Validation"] = "none"
    asked = []

    def ask(question, default):
        asked.append((question.split()[0], default))
        return replies[question.split()[0]]

    recipe, _ = write_recipe(Answers(), tmp_path / "r.yaml", ask=ask)
    assert asked == [
        ("Models", None),
        ("Method", "graft"),
        ("Task", "math"),
        ("Training", None),
        ("Validation", "none"),
    ]
    assert recipe.task.validation is None
    replies["Validation"] = other = data(4, "other.jsonl")
    assert str(write_recipe(Answers(), tmp_path / "v.yaml", ask=ask)[0].task.validation.path) == other
    assert list(recipe.models) == ["A", "B"] and recipe.training.prompts_per_step == 10
    asked.clear()
    write_recipe(Answers(models=[pair["A"]], method="grpo", task="hidden_programs"), tmp_path / "s.yaml", ask=ask)
    assert asked == []


def test_a_slip_is_asked_again_and_costs_no_other_answer(tmp_path, pair):
    replies = iter([pair["A"], "gpro", "GRPO!", "grpo", "maths", "hidden_programs"])
    asked = []

    def ask(question, default):
        asked.append(question)
        return next(replies)

    recipe, _ = write_recipe(Answers(), tmp_path / "r.yaml", ask=ask)
    assert (recipe.method.name, recipe.task.kind) == ("grpo", "hidden_programs")
    assert asked[2].startswith("gpro: unknown; did you mean 'grpo'? Known are grpo, ") and asked[2].endswith(". Method")
    assert asked[3].startswith("GRPO!: unknown; ") and asked[5].startswith("maths: unknown; known are math, ")


def test_asking_for_prompts_takes_a_function_or_a_file(tmp_path, pair, data):
    file = data(10)
    given = Answers(models=[pair["A"]], method="grpo", task="function")
    replies = {"Verifier": "toy_task:verify", "Prompts": file}
    recipe, _ = write_recipe(given, tmp_path / "r.yaml", ask=lambda question, _: replies[question.split()[0]])
    assert str(recipe.task.train.path) == file and recipe.task.prompts is None


def test_elsewhere_what_is_missing_is_named_by_its_option(graftrl, tmp_path, monkeypatch):
    def refused(*flags):
        file, (_, out, err) = init(graftrl, tmp_path, *flags, code=2)
        assert out == "" and err.count("\n") == 1 and not file.exists()
        return err

    assert "needs --model, --task" in refused()
    assert "needs --train" in refused("--model", "m/a", "--task", "math")
    assert "needs --dataset" in refused("--model", "m/a", "--task", "reasoning_gym")
    assert "needs --verifier, --prompts" in refused("--model", "m/a", "--task", "function")
    assert "exclude each other" in refused("--steps", "1", "--epochs", "1")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"method": "grafted"}, "--method grafted: unknown"),
        ({"method": "opd"}, "teacher"),
        ({"method": "graft"}, "at least 2"),
        ({"models": ["a/x", "b/x", "x=c/y"]}, "two models are called 'x'"),
        ({"task": "math", "train": "/no/such/file.jsonl"}, "no such file"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_work_is_refused_and_nothing_is_written(tmp_path, answers, words):
    with pytest.raises(GraftrlError, match=words):
        write_recipe(Answers(**{"models": ["m/a"], "task": "hidden_programs", **answers}), tmp_path / "r.yaml")
    assert not (tmp_path / "r.yaml").exists()


def test_a_file_is_written_over_only_when_told_to(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text("mine")
    answers = Answers(models=["m/a"], task="hidden_programs")
    with pytest.raises(ConfigError, match="--force"):
        write_recipe(answers, file)
    assert file.read_text() == "mine"
    write_recipe(answers, file, force=True)
    assert load_recipe(file).name == "r"


def test_limits_that_do_not_fit_a_model_are_refused(tmp_path, pair):
    answers = Answers(models=[pair["A"]], task="hidden_programs", max_prompt_tokens=100, max_response_tokens=100)
    with pytest.raises(ConfigError, match="128 positions"):
        write_recipe(answers, tmp_path / "r.yaml")

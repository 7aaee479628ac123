"""`graftrl doctor` as a user meets it."""

import json

import yaml


def test_without_arguments_it_looks_at_the_machine(graftrl, monkeypatch):
    monkeypatch.setattr("graftrl.doctor.machine.usable_cores", lambda: 64.0)
    code, out, err = graftrl("doctor")
    assert code == 0 and err == ""
    assert "torch " in out and "machine" in out and "threads" in out


def test_a_problem_is_printed_in_full_and_makes_the_exit_code_2(graftrl, tmp_path, monkeypatch):
    monkeypatch.setattr("graftrl.doctor.machine.usable_cores", lambda: 64.0)
    code, out, err = graftrl("doctor", "--model", tmp_path / "none", "--json")
    report = json.loads(out)
    assert code == 2 and err == "error: doctor found 1 problem\n"
    (problem,) = [finding for finding in report["findings"] if finding["level"] == "problem"]
    assert problem["about"] == "none" and "no directory" in problem["message"]
    assert report["packages"]["torch"] and report["torch_threads"] >= 1


def test_a_recipe_is_checked_with_the_space_for_its_checkpoints(graftrl, pair, tmp_path, monkeypatch):
    monkeypatch.setattr("graftrl.doctor.machine.usable_cores", lambda: 64.0)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "name": "r",
                "method": "graft",
                "models": {name: {"path": path} for name, path in pair.items()},
                "task": {"kind": "hidden_programs"},
                "sampling": {"max_prompt_tokens": 32, "max_response_tokens": 30},
                "training": {"steps": 1, "prompts_per_step": 4, "minibatch_prompts": 4},
                "checkpoint": {"keep": 3},
            }
        )
    )
    code, out, _ = graftrl("doctor", recipe)
    assert code == 0
    assert "up to 5 checkpoints" in out and "two tokenizers" in out and "add_generation_prompt" in out


def test_a_recipe_that_cannot_be_read_is_one_line(graftrl, tmp_path):
    code, out, err = graftrl("doctor", tmp_path / "none.yaml")
    assert code == 2 and out == "" and "no such recipe" in err and err.count("\n") == 1

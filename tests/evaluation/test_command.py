"""`graftrl eval` as a user meets it."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import polars as pl
import pytest
import yaml

from graftrl.config import parse_recipe
from graftrl.evaluation import command, sampling
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder

FEW = ("--samples", 2, "--runs", 2)


def refused(result: tuple[int, str, str], code: int = 2) -> str:
    """The one line on standard error."""
    assert result[0] == code and result[1] == "" and result[2].startswith("error: ") and result[2].count("\n") == 1
    return result[2]


@pytest.fixture
def numbers(write_rows) -> Path:
    return write_rows("one.jsonl", [{"id": f"s{i}", "problem": f"{i}+1?", "answer": str(i + 1)} for i in range(6)])


@pytest.fixture
def evaluate(graftrl, numbers, tmp_path):
    """`evaluate("x/a", ...)` on the numbers, into the folder `out`."""
    return lambda *arguments: graftrl("eval", *arguments, "--benchmarks", numbers, *FEW, "--out", tmp_path / "out")


# The unit of truth ----------------------------------------------------------------------------------------------------


def test_references_graded_against_themselves_are_500_of_500(graftrl, speaker, shared_data, tmp_path):
    speaker.say = staticmethod(lambda model, prompt, index: rf"Therefore \boxed{{{prompt.reference}}}.")
    code, printed, _ = graftrl(
        "eval", "x/a", "--benchmarks", "math500,minerva", "--data", shared_data, "--samples", 1, "--runs", 1,
        "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    result = json.loads(printed)
    of = result["models"]["a"]["benchmarks"]
    assert code == 0 and of["math500"]["reasons"] == {"correct": 500} and of["math500"]["pass_at_1"]["mean"] == 1.0
    # the denominator stays the benchmark's own, and the reference that nothing can be graded against counts as wrong
    assert of["minerva"]["problems"] == 272 and of["minerva"]["pass_at_1"]["mean"] == 271 / 272
    (useless,) = result["benchmarks"]["minerva"]["unusable"]
    rows = pl.scan_parquet(tmp_path / "out" / "rollouts" / "a" / "minerva" / "*.parquet")
    kept = rows.filter(pl.col("prompt_id") == useless).select("reference", "reward", "grade_reason").collect()
    assert kept.row(0) == ("np.arcsin(10/13)", 0.0, "unusable reference: empty or not parsable")
    assert result["models"]["a"]["score"]["mean"] == pytest.approx((1 + 271 / 272) / 2)
    assert any("minerva: 1 of 272 references cannot be graded against" in note for note in result["notes"])


# Output ---------------------------------------------------------------------------------------------------------------


def test_two_models_from_command_to_tables(graftrl, speaker, numbers, write_rows, tmp_path):
    """a is right on even numbers, always; b on every number, in one of its two responses."""
    right = {"a": lambda i, index: i % 2 == 0, "b": lambda i, index: index == 1}
    speaker.say = staticmethod(
        lambda model, prompt, index: (
            rf"\boxed{{{prompt.reference}}}"
            if right[model](int(prompt.reference) - 1, index)
            else r"I think \boxed{-7} or..."
        )
    )
    two = write_rows(
        "two.jsonl", [{"id": "s0", "problem": "1+1", "answer": "2"}, {"id": "t", "problem": "?", "answer": "1"}]
    )
    out = tmp_path / "out"
    code, printed, _ = graftrl(
        "eval", "x/a", "y/b", "--benchmarks", f"{numbers},{two}", *FEW, "--k", "2,4", "--out", out, "--latex", "--plots"
    )
    assert code == 0
    names = ["results.json", "results.md", "results.tex", "pass-at-k.svg", "pass-at-k.png"]
    assert printed.split()[-5:] == [str(out / name) for name in names] and all((out / name).is_file() for name in names)
    result = json.loads((out / "results.json").read_text())
    assert result["settings"] == {
        "seed": 0, "samples": 2, "temperature": 0.6, "top_p": 0.95, "max_tokens": 4096, "runs": 2,
    }  # fmt: skip
    assert result["origins"] == {"a": "x/a", "b": "y/b"}
    a, b = (result["models"][name]["benchmarks"]["one"] for name in "ab")
    assert a["pass_at_1"]["mean"] == b["pass_at_1"]["mean"] == 0.5 and a["pass_at_1"]["runs"] == [0.5, 0.5]
    assert [a["pass_at"][k]["value"] for k in "124"] == [0.5, 0.5, 0.5]
    assert [b["pass_at"][k]["value"] for k in "124"] == pytest.approx([0.5, 1 - 1 / 6, 1.0])
    assert a["truncated"] == 0.5 and a["tokens_mean"] == 3.0  # four words cut, or one and its end
    assert a["reasons"] == {"correct": 12, "wrong answer": 12}
    cut = "a, one: 50% of the responses were cut at 4096 tokens and are mostly wrong for that; --max-tokens allows more"
    assert cut in result["notes"] and f"note: {cut}" in printed
    on_one, on_two, score = result["comparisons"]
    assert (on_one["difference"]["value"], on_one["better"], on_one["worse"], on_one["p"]) == (0.0, 3, 3, 1.0)
    assert (on_two["on"], on_two["better"], on_two["worse"]) == ("two", 1, 1)
    assert score["on"] == "score" and score["p_holm"] == 1.0

    for row in ("a 50.0 ± 0.0 50.0 ± 0.0 50.0 ± 0.0", "b − a score +0.0", "pass@2 pass@4 tokens cut %"):
        assert row in " ".join(printed.split())
    assert "| a | 50.0 ± 0.0 | 50.0 ± 0.0 | 50.0 ± 0.0 |" in (out / "results.md").read_text()
    assert r"a & 50.0 $\pm$ 0.0 & 50.0 $\pm$ 0.0 & 50.0 $\pm$ 0.0 \\" in (out / "results.tex").read_text()
    with (out / "problems.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * (6 + 2)
    assert rows[1] == {
        "model": "a", "benchmark": "one", "run": "1", "problem": "s1", "samples": "2", "right": "0", "tokens": "8",
        "cut": "2",
    }  # fmt: skip


def test_json_is_the_results_file_and_a_second_call_samples_nothing(evaluate, speaker, tmp_path):
    assert evaluate("x/a")[0] == 0
    calls = len(speaker.calls)
    code, printed, _ = evaluate("x/a", "--json")
    assert code == 0 and printed == (tmp_path / "out" / "results.json").read_text()
    assert len(speaker.calls) == calls and speaker.loaded_names == ["a"]
    assert not (tmp_path / "out" / "results.tex").exists()


def test_one_run_has_no_deviation_and_a_limit_is_noted(graftrl, speaker, numbers, tmp_path):
    code, printed, _ = graftrl(
        "eval", "x/a", "--benchmarks", numbers, "--samples", 1, "--runs", 1, "--limit", 2, "--temperature", 0,
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0 and "a 100.0 temperature 0" in " ".join(printed.replace("─", "").split())
    assert "one: only the first 2 of 6 problems; not comparable with published scores" in printed
    assert "temperature 0: all responses to a problem are the same" in printed


# Folders --------------------------------------------------------------------------------------------------------------


def test_models_benchmarks_and_runs_add_to_a_folder(graftrl, evaluate, speaker, write_rows, tmp_path):
    out = tmp_path / "out"
    assert evaluate("x/a")[0] == 0
    assert evaluate("y/b")[0] == 0
    more = write_rows("two.jsonl", [{"id": "s0", "problem": "1+1", "answer": "2"}])
    one = tmp_path / "one.jsonl"
    both = f"{one},{more}"
    assert graftrl("eval", "x/a", "y/b", "--benchmarks", both, "--samples", 2, "--runs", 3, "--out", out)[0] == 0
    assert len(speaker.calls) == 2 + 2 + 2 * (1 + 3)
    held = yaml.safe_load((out / "eval.yaml").read_text())["eval"]
    assert list(held["models"]) == ["a", "b"] and list(held["benchmarks"]) == ["one", "two"]
    assert held["report"]["runs"] == 3


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (["--temperature", 1], r"another settings\.temperature \(0\.6 there, 1\.0 here\)"),
        (["--seed", 1], r"another settings\.seed"),
        (["--max-tokens", 10], r"another settings\.max_tokens"),
        (["--dtype", "bfloat16"], r"another models\.a\.dtype"),
        (["--system", "Be brief."], r"another benchmarks\.one\.sha256"),
    ],
)
def test_a_folder_with_other_responses_is_refused(evaluate, speaker, changes, what):
    assert evaluate("x/a")[0] == 0
    assert re.search(what, refused(evaluate("x/a", *changes), 3))
    assert len(speaker.calls) == 2


def test_a_model_of_the_same_name_from_elsewhere_is_refused(evaluate, speaker):
    assert evaluate("x/a")[0] == 0
    assert "another models.a.path ('x/a' there, 'y/a' here)" in refused(evaluate("y/a"), 3)


def test_a_call_that_sampled_nothing_binds_no_later_one(evaluate, speaker, monkeypatch):
    speaker.context = 10
    assert "10 positions" in refused(evaluate("x/a"))
    speaker.context = 100_000

    def broken(*arguments: object) -> None:
        raise command.RunError("does not load")

    with monkeypatch.context() as patched:
        patched.setattr(sampling, "HFPolicy", broken)
        assert "does not load" in refused(evaluate("x/a"), 3)
    assert evaluate("x/a", "--seed", 5)[0] == 0


def test_a_folder_of_something_else_is_left_alone(evaluate, speaker, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").write_text("name: x")
    assert "something else than an evaluation" in refused(evaluate("x/a"), 3)
    assert [file.name for file in (tmp_path / "out").iterdir() if file.name != ".lock"] == ["config.yaml"]


def test_ctrl_c_says_what_is_kept(evaluate, speaker, tmp_path, monkeypatch):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sampling, "grade_groups", interrupted)
    code, _, errors = evaluate("x/a")
    assert code == 130 and f"{tmp_path / 'out'} keeps the problems that were finished" in errors


# Grading again --------------------------------------------------------------------------------------------------------


def test_responses_are_graded_again_without_models_or_data(graftrl, evaluate, speaker, numbers, tmp_path):
    out = tmp_path / "out"
    speaker.say = staticmethod(lambda model, prompt, index: r"\boxed{3}")
    assert evaluate("x/a")[0] == 0
    first = json.loads((out / "results.json").read_text())
    files = sorted((out / "rollouts").glob("*/*/*.parquet"))
    for file in files:  # as if an older verifier had let everything pass
        frame = pl.read_parquet(file).with_columns(reward=pl.lit(1.0), grade_reason=pl.lit("correct"))
        frame.write_parquet(file, metadata={"graftrl": json.dumps({"schema_version": 1})})
    numbers.unlink()
    code, printed, _ = graftrl("eval", "--regrade", out, "--json")
    again = json.loads(printed)
    assert code == 0 and "20 rewards changed" in again["notes"][0]
    assert again["models"] == first["models"] and again["benchmarks"] == first["benchmarks"]
    assert speaker.loaded_names == ["a"]


def test_an_unfinished_evaluation_is_graded_but_has_no_results(graftrl, evaluate, speaker, tmp_path):
    assert evaluate("x/a")[0] == 0
    (tmp_path / "out" / "results.json").unlink()
    (tmp_path / "out" / "rollouts" / "a" / "one" / "run-02-chunk-0001.parquet").unlink()
    message = refused(graftrl("eval", "--regrade", tmp_path / "out"), 3)
    assert "0 rewards changed; the evaluation is not finished" in message
    assert not (tmp_path / "out" / "results.json").exists()


def test_only_an_evaluation_can_be_graded_again(graftrl, tmp_path):
    assert "holds no evaluation" in refused(graftrl("eval", "--regrade", tmp_path / "nowhere"), 3)
    assert "holds no evaluation" in refused(graftrl("eval", "--regrade", tmp_path), 3)
    assert "leave them out" in refused(graftrl("eval", "x/a", "--regrade", tmp_path))


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(pair, tmp_path):
    """A finished run of the toy pair, validated; `trained(A={"lora": ...})` changes a model."""

    def make(**models: dict[str, object]) -> RunFolder:
        recipe = parse_recipe(
            {
                "name": "toy",
                "seed": 5,
                "threads": 1,
                "method": "grpo",
                "models": {n: {"path": p, "optimizer": {"lr": 0.01}, **models.get(n, {})} for n, p in pair.items()},
                "task": {
                    "kind": "function",
                    "prompts": "toy_task:prompts",
                    "validation_prompts": "toy_task:prompts",
                    "verifier": "toy_task:verify",
                },
                "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 6},
                "training": {"steps": 2, "prompts_per_step": 8, "group_size": 4, "minibatch_prompts": 4},
                "evaluation": {"every": 1},
                "checkpoint": {"every": 1, "keep": 2},
            },
            "test",
        )
        run = RunFolder.create(tmp_path / "run", recipe)
        train(run, recipe, Silent())
        return run

    return make


def test_a_run_is_evaluated_on_its_validation_prompts_with_its_limits(graftrl, trained, tmp_path):
    run = trained(A={"lora": {"rank": 2}})
    code, printed, _ = graftrl(
        "eval",
        f"{run.root}:A@0",
        run.root,
        "--samples",
        4,
        "--runs",
        2,
        "--threads",
        1,
        "--out",
        tmp_path / "out",
        "--json",
    )
    result = json.loads(printed)
    assert code == 0 and result["settings"]["max_tokens"] == 6 and list(result["benchmarks"]) == ["validation"]
    best = run.best_step()
    assert list(result["models"]) == ["run-A-step0", f"run-A-step{best}", f"run-B-step{best}"]
    assert result["notes"][0] == f"{run.root}: step {best}, the best in validation"
    assert result["benchmarks"]["validation"] == {
        "kind": "function", "origin": str(run.root), "problems": 24, "of": 24, "unusable": [],
    }  # fmt: skip
    rows = pl.read_parquet(
        tmp_path / "out" / "rollouts" / f"run-B-step{best}" / "validation" / "run-01-chunk-0001.parquet"
    )
    assert rows["policy_version"].unique().to_list() == [best] and 0 < rows["reward"].mean() < 1
    code, printed, _ = graftrl("eval", "--regrade", tmp_path / "out", "--json")
    assert code == 0 and json.loads(printed)["models"] == result["models"]


# Bad input ------------------------------------------------------------------------------------------------------------


def test_bad_input_is_one_clear_line(graftrl, numbers, tmp_path):
    one = ("--benchmarks", numbers, "--out", tmp_path / "out")
    cases = {
        ("x/a", "--benchmarks", "math50"): "unknown benchmark 'math50'; did you mean 'math500'",
        ("x/a",): "say what to evaluate on: --benchmarks math500,...",
        one: "name a model to evaluate",
        ("/no/such/model", *one): "no directory /no/such/model",
        (tmp_path, *one): "neither a model (no config.json) nor a run folder (no config.yaml)",
        ("x/a", *one, "--k", "41"): "--k 41: pass@k needs k between 1 and the 40 responses to a problem",
        ("x/a", *one, "--k", "0"): "--k 0: pass@k needs k between 1",
        ("x/a", *one, "--k", "many"): "'many' is no whole number",
        ("x/a", *one, "--top-p", "0"): "--top-p 0 is not in (0, 1]",
        ("x/a", *one, "--limit-s", "0"): "limit_s > 0",
    }
    for arguments, message in cases.items():
        assert message in refused(graftrl("eval", *arguments)), arguments
    assert not (tmp_path / "out").exists()

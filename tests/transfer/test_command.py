"""`graftrl transfer` and `graftrl proxies` as a user meets them, down to a sequence of transfers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graftrl.errors import ConfigError
from graftrl.transfer.command import transfer_recipe
from graftrl.transfer.pairs import save_pair


@pytest.fixture(scope="session")
def saved(proxy_run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("pairs") / "p"
    save_pair(f"{proxy_run}:P@2", out)
    return out


def test_a_pair_and_a_target_make_a_recipe(saved, pair):
    recipe = transfer_recipe(pair["B"], proxy=saved, calibration=1.5, overrides=["training.steps=7", "seed=9"])
    assert recipe.name == "proxy-transfer" and (recipe.training.steps, recipe.seed) == (7, 9)
    method = recipe.method
    assert (method.name, method.calibration, method.estimator) == ("p_opd", 1.5, "sampled")
    assert list(recipe.models) == ["target"]
    target = recipe.models["target"]
    assert target.path == pair["B"] and target.optimizer.lr == 0.01 and target.microbatch_tokens == 4096
    assert {name: Path(s.path) for name, s in recipe.scorers.items()} == {
        "expert": saved / "expert", "base": saved / "base",
    }  # fmt: skip
    assert recipe.scorers["base"].bos == recipe.scorers["expert"].bos == "keep"
    assert recipe.task.verifier == "toy_task:coin" and recipe.evaluation.samples == 2


def test_base_and_expert_may_be_named_by_themselves(proxy_run, pair, recipe_file):
    checkpoint = proxy_run / "checkpoints" / "step-000002" / "P"
    named = [f"{proxy_run}:P@2", f"{proxy_run}:P@last", str(checkpoint)]
    for expert in named:  # a checkpoint's folder is known as its run's
        recipe = transfer_recipe(pair["A"], expert=expert)
        assert Path(recipe.scorers["expert"].path) == checkpoint
        assert recipe.scorers["base"].path == pair["A"] and recipe.name == "proxy-transfer"
    other = recipe_file(name="other", models={"x": {"path": "unused", "optimizer": {"lr": 0.5}}})
    recipe = transfer_recipe(pair["A"], expert=pair["B"], base=pair["A"], recipe=other)
    assert recipe.name == "other-transfer" and recipe.models["target"].optimizer.lr == 0.5
    assert recipe.scorers["expert"].path == pair["B"]


def test_overrides_reach_the_method_and_the_target(saved, pair):
    overrides = ["method.drift_tau=0.5", "models.target.optimizer.lr=0.002", "scorers.base.dtype=bfloat16"]
    recipe = transfer_recipe(pair["A"], proxy=saved, estimator="full", overrides=overrides)
    assert recipe.method.drift_tau == 0.5 and recipe.method.estimator == "full"
    assert recipe.models["target"].optimizer.lr == 0.002 and recipe.scorers["base"].dtype == "bfloat16"


def test_what_is_missing_or_contradicts_itself_is_said(saved, proxy_run, train_run, pair):
    def refused(**given) -> str:
        with pytest.raises(ConfigError) as caught:
            transfer_recipe(pair["A"], **given)
        return str(caught.value)

    assert "either --proxy" in refused()
    assert "either --proxy" in refused(proxy=saved, expert=pair["A"])
    assert "leave out --proxy-base" in refused(proxy=saved, base=pair["A"])
    assert "--proxy-base must be given" in refused(expert=pair["A"])
    assert "name a recipe with --recipe" in refused(expert=pair["A"], base=pair["B"])
    assert "unknown key" in refused(proxy=saved, overrides=["trainin.steps=3"])
    lora = train_run(models={"P": {"path": pair["A"], "lora": {"rank": 2}}})
    with pytest.raises(ConfigError, match="merge it into its base first"):
        transfer_recipe(f"{lora}:P@2", proxy=saved)


def test_the_whole_way_from_a_proxy_to_a_sequence_of_targets(graftrl, recipe_file, tmp_path, pair):
    """Train a proxy, save the pair, transfer to B, save that pair, transfer to A: other tokenizers on the way."""
    run, pairs = tmp_path / "proxy", tmp_path / "pairs"
    assert graftrl("train", recipe_file(), "--run", run, "-q")[0] == 0
    code, out, _ = graftrl("proxies", "save", f"{run}:P@last", "--out", pairs / "first")
    assert code == 0 and "P of proxy after 2 steps of grpo; pass@1" in out
    second = tmp_path / "second"
    code, out, _ = graftrl("transfer", "--proxy", pairs / "first", "--target", pair["B"], "--run", second)
    assert code == 0 and "p_opd on target" in out and "spans of bytes" in out and "validation pass@1" in out
    assert graftrl("proxies", "save", f"{second}:target@last", "--out", pairs / "second")[0] == 0
    third = tmp_path / "third"
    arguments = ("--proxy", pairs / "second", "--target", pair["A"], "--run", third, "--lambda", "1.5", "-q")
    code, out, _ = graftrl("transfer", *arguments, "training.steps=1")
    assert code == 0 and "run folder" in out
    (line,) = [json.loads(text) for text in (third / "metrics.jsonl").read_text().splitlines()]
    assert line["models"]["target"]["grad_norm"] > 0

    code, out, _ = graftrl("proxies", "list", pairs)
    assert code == 0
    for text in ("first", "second", "grpo", "p_opd", "P ", "0.09 M", "target", "0.11 M", "["):
        assert text in out
    code, out, _ = graftrl("proxies", "list", pairs, "--json")
    listed = json.loads(out)
    assert [of["provenance"]["method"] for of in listed.values()] == ["grpo", "p_opd"]


def test_a_dry_run_of_a_transfer_lists_all_models(graftrl, saved, pair, tmp_path):
    code, out, _ = graftrl("transfer", "--proxy", saved, "--target", pair["A"], "--dry-run", "--run", tmp_path / "x")
    assert code == 0 and not (tmp_path / "x").exists()
    assert all(name in out for name in ("target", "expert (scorer)", "base (scorer)", "target (reference)"))


def test_mistakes_are_one_line_and_a_non_zero_exit(graftrl, saved, pair, tmp_path):
    for arguments, words in {
        ("transfer", "--target", pair["A"]): "either --proxy",
        ("transfer", "--target", tmp_path / "none", "--proxy", saved): "no directory",
        ("transfer", "--target", pair["A"], "--proxy", tmp_path): "is no proxy pair",
        ("transfer", "--target", pair["B"], "--proxy", saved, "--estimator", "full"): "different tokenizers",
        ("proxies", "list", tmp_path): "holds no proxy pair",
        ("proxies", "save", saved, "--out", tmp_path / "x"): "neither a model",
    }.items():
        code, out, err = graftrl(*arguments, *(("--run", tmp_path / "run") if arguments[0] == "transfer" else ()))
        assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and words in err


def test_pairs_that_cannot_be_read_are_named_after_those_that_can(graftrl, saved, tmp_path):
    (tmp_path / "good").symlink_to(saved)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "proxy.json").write_text("{}")
    code, out, err = graftrl("proxies", "list", tmp_path)
    assert code == 2 and "good" in out and "bad/proxy.json" in err and err.count("\n") == 1

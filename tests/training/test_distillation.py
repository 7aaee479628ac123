"""The distillation family through the ordinary loop: scorers in a recipe, what they read, resuming, refusals."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import polars as pl
import pytest
import torch
import yaml
from safetensors.torch import load_file

from graftrl.config import parse_recipe
from graftrl.errors import ConfigError, DataError
from graftrl.lab.models import LAB_MODELS, build_model, save_model
from graftrl.methods import METHODS, build_method
from graftrl.methods.extensions import UsesScorers
from graftrl.policies.passes import Passes
from graftrl.training import loop
from graftrl.training.dry_run import print_dry_run
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder

FAMILY = [name for name in METHODS if isinstance(build_method(name), UsesScorers)]
COIN = {"kind": "function", "prompts": "toy_task:prompts", "verifier": "toy_task:coin"}
TRAINING = {"steps": 1, "prompts_per_step": 8, "group_size": 4, "minibatch_prompts": 4}


@pytest.fixture(scope="session")
def expert(tmp_path_factory):
    """Another model of A's kind and tokenizer."""
    root = tmp_path_factory.mktemp("expert") / "A"
    save_model(build_model(LAB_MODELS["A"], seed=11), LAB_MODELS["A"], root)
    return str(root)


@pytest.fixture
def scorers(pair, expert):
    """For any method of the family: the first scorer it names is the expert, others are the model itself."""

    def of(name, **options):
        names = build_method(name).scorers
        return {scorer: {"path": pair["A"] if i else expert, **options} for i, scorer in enumerate(names)}

    return of


@pytest.fixture
def alone(content, pair):
    """A recipe in which only A trains."""

    def make(method, **sections):
        models = {"A": {"path": pair["A"], "optimizer": {"lr": 0.01}}}
        return content(method, **{"models": models, "training": TRAINING, **sections})

    return make


def run_recipe(content, root, display=None):
    recipe = parse_recipe(content, "test")
    run = RunFolder.create(root, recipe)
    train(run, recipe, display or Silent())
    return run


@pytest.fixture(scope="session")
def log(make_recipe, tmp_path_factory):
    """Responses to every prompt, for methods that need a teacher's."""
    root = tmp_path_factory.mktemp("teacher") / "run"
    recipe = make_recipe("grpo", steps=3, task=COIN)
    train(RunFolder.create(root, recipe), recipe, Silent())
    return root


@pytest.mark.parametrize(
    ("name", "estimator"),
    [(name, e) for name in FAMILY for e in ("sampled", "full", "top_k") if name != "avsd" or e == "sampled"],
)
def test_one_step(name, estimator, alone, scorers, log, new_run):
    peers = {"teacher": {"log": str(log), "model": "B", "match": "prompt"}} if name == "rstg" else {}
    recipe = alone({"name": name, "estimator": estimator}, scorers=scorers(name), peers=peers, task=COIN)
    run = run_recipe(recipe, new_run)
    (line,) = run.read_metrics()
    of_model = line["models"]["A"]
    assert of_model["optimizer_steps"] >= 1 and of_model["skipped_nonfinite"] == 0 and of_model["grad_norm"] > 0
    assert np.isfinite(of_model["loss"]) and np.isfinite(of_model["token_means"]["signal"])
    assert of_model["method"]["distilled"] > 0
    if name != "rstg":
        assert of_model["optimizer_steps"] == 1  # one minibatch whatever training.minibatch_prompts says
    assert run.recipe().build_method().settings == parse_recipe(recipe, "test").build_method().settings


@pytest.mark.parametrize("name", [name for name in FAMILY if name != "rstg"])
def test_one_response_a_prompt_is_enough(name, alone, scorers, new_run):
    """Nothing is relative to a group: one response each of eight prompts is as good as four of two."""
    run = run_recipe(alone(name, scorers=scorers(name), training={**TRAINING, "group_size": 1}, task=COIN), new_run)
    (line,) = run.read_metrics()
    of_model = line["models"]["A"]
    assert of_model["method"]["distilled"] + of_model["method"]["left_out"] == 8
    assert of_model["optimizer_steps"] == 1 and np.isfinite(of_model["loss"]) and of_model["grad_norm"] > 0
    assert pl.read_parquet(sorted((run.root / "rollouts").iterdir())).height == 8


@pytest.mark.parametrize("name", ["opd", "p_opd", "avsd"])
def test_scorers_of_another_tokenizer(name, alone, scorers, pair, new_run, tmp_path):
    several = scorers(name)
    several[next(iter(several))]["path"] = pair["B"]
    if name == "p_opd":  # a proxy is one model, before and after
        save_model(build_model(LAB_MODELS["B"], seed=13), LAB_MODELS["B"], tmp_path / "B")
        several["base"]["path"] = str(tmp_path / "B")
    notes = []

    class Display(Silent):
        def start(self, recipe, steps, state, given):
            notes.extend(given)

    run = run_recipe(alone(name, scorers=several), new_run, Display())
    (line,) = run.read_metrics()
    assert line["models"]["A"]["grad_norm"] > 0 and line["models"]["A"]["method"]["distilled"] > 0
    assert any("spans of bytes" in note for note in notes)


@pytest.fixture
def read(monkeypatch):
    """(model, prompt, response) of every row that a frozen model reads."""
    seen = []
    original = Passes._each

    def counting(self, rows, work):
        if not next(self.loaded.causal_lm.parameters()).requires_grad:
            seen.extend((id(self.loaded), r.prompt_token_ids.tobytes(), r.response_token_ids.tobytes()) for r in rows)
        return original(self, rows, work)

    monkeypatch.setattr(Passes, "_each", counting)
    return seen


@pytest.mark.parametrize("estimator", ["sampled", "full"])
@pytest.mark.parametrize("name", ["p_opd", "ra_opd", "opd_urm"])
def test_no_row_is_read_twice_by_the_same_scorer_in_a_step(name, estimator, alone, scorers, read, new_run):
    """Whether it is asked for log-probabilities, for sums over the vocabulary, or for both, and in two epochs."""
    method = {"name": name, "estimator": estimator, "single_minibatch": False}
    run = run_recipe(alone(method, scorers=scorers(name), training={**TRAINING, "epochs_per_batch": 2}), new_run)
    assert run.read_metrics()[0]["models"]["A"]["optimizer_steps"] >= 2
    models = {model for model, _, _ in read}
    assert len(models) == (2 if name == "p_opd" else 1)  # the proxy's base is the target's reference too
    assert len(read) == len(set(read)) and len(read) >= 20 * len(models)


def test_a_resumed_run_gives_the_numbers_of_an_uninterrupted_one(alone, scorers, tmp_path):
    class Stop(Silent):
        def step(self, metrics):
            if metrics["step"] == 2:
                raise KeyboardInterrupt

    content = alone({"name": "p_opd", "calibration": 1.5}, scorers=scorers("p_opd"), training={**TRAINING, "steps": 4})
    whole = run_recipe(content, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run_recipe(content, tmp_path / "stopped", Stop())
    run = RunFolder.open(tmp_path / "stopped")
    train(run, run.recipe(), Silent())
    assert [line["models"] for line in run.read_metrics()] == [line["models"] for line in whole.read_metrics()]
    one, other = (load_file(r.checkpoints / "step-000004" / "A" / "model.safetensors") for r in (run, whole))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_p_opd_moves_the_target_toward_the_closed_form_optimum(alone, new_run, tmp_path, pair, expert):
    """KL(pi || pi*) falls in the states of the target's own responses; pi* is computed from dense logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_model(build_model(LAB_MODELS["A"], seed=12), LAB_MODELS["A"], tmp_path / "base")
    content = alone(
        {"name": "p_opd", "estimator": "full", "calibration": 1.5},
        scorers={"expert": {"path": expert}, "base": {"path": str(tmp_path / "base")}},
        training={**TRAINING, "steps": 15, "prompts_per_step": 16, "group_size": 8},
        models={"A": {"path": pair["A"], "optimizer": {"lr": 0.003}}},
    )
    run = run_recipe(content, new_run)
    end = run.checkpoints / "step-000015" / "A"
    paths = {"start": pair["A"], "expert": expert, "base": tmp_path / "base", "end": end}
    models = {name: AutoModelForCausalLM.from_pretrained(path) for name, path in paths.items()}
    tokenizer, kl = AutoTokenizer.from_pretrained(pair["A"]), {"start": [], "end": []}
    for row in pl.read_parquet(run.step_file("rollouts", 1)).head(40).iter_rows(named=True):
        prompt = tokenizer.encode(row["messages"][0]["content"], add_special_tokens=False)
        ids = torch.tensor([[*prompt, *row["token_ids"]]])
        with torch.no_grad():
            p = {name: m(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for name, m in models.items()}
        optimum = (p["start"] + (p["expert"] - p["base"]) / 1.5).log_softmax(-1)
        for name, of_rows in kl.items():
            of_rows += (p[name].exp() * (p[name] - optimum)).sum(-1).tolist()
    start, end = np.mean(kl["start"]), np.mean(kl["end"])
    assert end < 0.8 * start


def test_an_expert_may_be_the_adapter_of_a_lora_run(alone, content, pair, tmp_path):
    """Base and expert are then one set of weights, and the expert is what that run trained."""
    lora = {"path": pair["A"], "lora": {"rank": 2}, "optimizer": {"lr": 0.05}}
    proxy = run_recipe(alone("grpo", models={"A": lora}, training={**TRAINING, "steps": 2}), tmp_path / "proxy")
    adapter = str(proxy.checkpoints / "step-000002" / "A")
    recipe = alone("p_opd", scorers={"expert": {"path": adapter}, "base": {"path": pair["A"]}})
    prepared = loop.prepare(parse_recipe(recipe, "test"))
    expert, base = (prepared.engine.scorers[name].model for name in ("expert", "base"))
    assert expert.passes.loaded is base.passes.loaded
    run = run_recipe(recipe, tmp_path / "transfer")
    (line,) = run.read_metrics()
    assert line["models"]["A"]["token_means"]["signal"] != 0.0


@pytest.mark.parametrize("estimator", ["sampled", "full"])
def test_a_lora_target_is_held_near_its_own_base(estimator, alone, pair, expert, new_run):
    """The reference is the base without the adapter: at the first step the two agree, and the base serves as the
    proxy's too."""
    lora = {"A": {"path": pair["A"], "lora": {"rank": 2}, "optimizer": {"lr": 0.05}}}
    scorers = {"expert": {"path": expert}, "base": {"path": pair["A"]}}
    content = alone({"name": "p_opd", "estimator": estimator}, models=lora, scorers=scorers)
    run = run_recipe({**content, "training": {**TRAINING, "steps": 2}}, new_run)
    first, second = (line["models"]["A"] for line in run.read_metrics())
    assert first["grad_norm"] > 0 and second["grad_norm"] > 0
    if estimator == "sampled":
        moved = [of_model["token_means"]["from_reference"] for of_model in (first, second)]
        assert abs(moved[0]) < 1e-5 < abs(moved[1])
    engine = loop.prepare(parse_recipe(content, "test")).engine
    assert engine.scorers["base"].model is engine.policies["A"].reference


# Refusals -------------------------------------------------------------------------------------------------------------


def refused(recipe):
    with pytest.raises(ConfigError) as caught:
        parse_recipe(recipe, "test")
    return str(caught.value)


def test_recipes_that_cannot_work_are_refused_before_a_model_loads(alone, scorers, pair):
    assert "reads the scorers expert, base, and there is no 'expert'; add it" in refused(alone("p_opd"))
    one = {"expert": {"path": pair["A"]}}
    assert "there is no 'base'" in refused(alone("p_opd", scorers=one))
    assert "a model and of a scorer" in refused(alone({"name": "opd", "teacher": "A"}, scorers={"A": one["expert"]}))
    assert "did you mean 'context'" in refused(alone("opd", scorers={"teacher": {"path": "x", "contxt": "hint"}}))
    assert "none of plain, hint, solution" in refused(alone("opd", scorers={"teacher": {"path": "x", "context": "?"}}))
    assert "method.teacher: String should match" in refused(alone({"name": "opd", "teacher": "@reference"}))
    teacher = {"teacher": {"path": pair["A"]}}
    assert "needs the responses of 'teacher'" in refused(alone("rstg", scorers=teacher))
    assert "calibration" in refused(alone({"name": "p_opd", "calibration": -1}, scorers=scorers("p_opd")))


@pytest.mark.parametrize("estimator", ["full", "top_k"])
def test_the_full_form_with_two_tokenizers_is_refused_before_training(estimator, alone, scorers, pair):
    several = {**scorers("p_opd"), "base": {"path": pair["B"]}}
    recipe = parse_recipe(alone({"name": "p_opd", "estimator": estimator}, scorers=several), "test")
    for check in (loop.prepare, print_dry_run):
        with pytest.raises(ConfigError, match="scorer 'base' and model 'A' have different tokenizers, but estimator"):
            check(recipe)


@pytest.fixture(scope="session")
def odd_scorers(tmp_path_factory):
    """Models with A's tokenizer that cannot serve as the proxy's expert: smaller ones, damaged ones, short ones."""
    root, kind = tmp_path_factory.mktemp("odd"), LAB_MODELS["A"]
    smaller = dataclasses.replace(kind, hidden_size=32)
    save_model(build_model(smaller, seed=1), smaller, root / "smaller")
    damaged = build_model(kind, seed=1)
    with torch.no_grad():
        damaged.lm_head.weight[7] = float("nan")
    save_model(damaged, kind, root / "damaged")
    save_model(build_model(kind, seed=1), kind, root / "short")
    config = json.loads((root / "short" / "config.json").read_text())
    (root / "short" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 20}))
    return root


@pytest.mark.parametrize("estimator", ["sampled", "full"])
@pytest.mark.parametrize(
    ("folder", "message", "weights"),
    [
        ("smaller", "'expert' is LlamaForCausalLM (layers 2, hidden size 32", False),
        ("damaged", "scorers.expert.path: ", True),
        ("short", "model 'expert' has 20 positions, but sampling.max_prompt_tokens + max_response_tokens is 22", False),
    ],
)
def test_a_scorer_that_cannot_serve_is_one_line(
    folder, message, weights, estimator, alone, scorers, odd_scorers, graftrl, tmp_path
):
    """Said by the dry run, unless it takes the weights to know, and by the run before its first step."""
    several = {**scorers("p_opd"), "expert": {"path": str(odd_scorers / folder)}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(alone({"name": "p_opd", "estimator": estimator}, scorers=several)))
    for arguments in (["--dry-run"], ["--run", tmp_path / "run", "-q"]):
        code, _, err = graftrl("train", tmp_path / "r.yaml", *arguments)
        if weights and arguments == ["--dry-run"]:
            assert code == 0
            continue
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and message in err
    if weights:
        assert "log-probabilities that are not finite; its weights are damaged" in err


def test_lambda_zero_trains_with_a_warning(alone, scorers):
    recipe = parse_recipe(alone({"name": "p_opd", "calibration": 0}, scorers=scorers("p_opd")), "test")
    assert any("collapses" in note for note in loop.prepare(recipe).notes)


def test_a_dry_run_shows_scorers_and_the_reference(alone, scorers, capsys):
    print_dry_run(parse_recipe(alone("p_opd", scorers=scorers("p_opd")), "test"))
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if "(" in line}
    assert "(scorer)" in lines["expert"] and "frozen" in lines["expert"]
    assert "GiB" in lines["base"]
    assert "(reference)" in lines["A"] and "shared" in lines["A"]  # the proxy's base is the target's own start


def test_contexts_reach_the_scorers(alone, scorers, new_run):
    """One model with a solution and with a family letter in its context: the contrast is not 0."""
    base = scorers("w2s_opd")["negative"]["path"]
    hinted = {
        "positive": {"path": base, "context": "{question}{solution}"},
        "negative": {"path": base, "context": "{question}{family}"},
    }
    run = run_recipe(alone("w2s_opd", scorers=hinted), new_run)
    assert abs(run.read_metrics()[0]["models"]["A"]["token_means"]["signal"]) > 1e-4


def test_a_prompt_without_what_a_context_needs_is_named(alone, scorers, new_run):
    several = {"teacher": {"path": scorers("opd")["teacher"]["path"], "context": "hint"}}
    with pytest.raises(DataError, match=r"scorers\.teacher\.context needs 'hint', which prompt 'p\d+' does not have"):
        run_recipe(alone("opd", scorers=several), new_run)


def test_a_signal_of_the_same_model_twice_is_zero(alone, pair, new_run):
    """Expert and base are one, so that nothing asks the target to move."""
    same = {"expert": {"path": pair["A"]}, "base": {"path": pair["A"]}}
    run = run_recipe(alone("p_opd", scorers=same), new_run)
    of_model = run.read_metrics()[0]["models"]["A"]
    assert abs(of_model["token_means"]["signal"]) < 1e-5 and of_model["grad_norm"] < 1e-4

"""`graftrl push`: the folder that others get, its card, and what goes to the hub (a fake one)."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer

import graftrl as package
from graftrl.config import load_recipe, parse_recipe
from graftrl.errors import ConfigError, RunError
from graftrl.push.card import public
from graftrl.push.command import PushRequest, push

TOY = Path(__file__).parents[1] / "training"


@pytest.fixture(scope="session")
def trained(pair, tmp_path_factory):
    """A finished GRAFT run of A and B; B with LoRA."""
    sys.path.insert(0, str(TOY))
    recipe = {
        "name": "toy",
        "threads": 1,
        "method": "graft-no-gate",
        "models": {"A": {"path": pair["A"]}, "B": {"path": pair["B"], "lora": {"rank": 2}, "extra_stop_tokens": [">"]}},
        "task": {
            "kind": "function",
            "prompts": "toy_task:prompts",
            "validation_prompts": "toy_task:prompts",
            "verifier": "toy_task:coin",
        },
        "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 6},
        "training": {"steps": 2, "prompts_per_step": 8, "group_size": 4, "minibatch_prompts": 4},
        "evaluation": {"prompts": 8},
    }
    run = package.train(recipe, run=tmp_path_factory.mktemp("push") / "run")
    sys.path.remove(str(TOY))
    return run


class FakeHub:
    def __init__(self, error=None):
        self.created, self.files, self.error = [], {}, error

    def create_repo(self, repo_id, *, private, exist_ok, repo_type):
        if self.error is not None:
            raise self.error
        self.created.append((repo_id, private, exist_ok, repo_type))

    def upload_folder(self, *, repo_id, folder_path, commit_message, repo_type):
        self.files = {
            str(f.relative_to(folder_path)): f.read_bytes() for f in Path(folder_path).rglob("*") if f.is_file()
        }
        self.message = commit_message


def front_matter(text):
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_card_only_writes_a_folder_that_loads_without_touching_the_hub(trained, tmp_path):
    def no_hub():
        raise AssertionError("the hub was asked")

    out = tmp_path / "out"
    place, notes = push(PushRequest(f"{trained.path}:A", card_only=out, license_id="apache-2.0"), no_hub)
    assert place == str(out) and any("--base-model" in note for note in notes)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)
    names = {file.name for file in out.iterdir()}
    assert {"README.md", "recipe.yaml", "model.safetensors"} <= names
    assert not names & {"optimizer.pt", "policy.json"}


def test_the_card_says_method_data_results_training_and_provenance(trained, tmp_path):
    push(PushRequest(f"{trained.path}:A@2", card_only=tmp_path / "out"))
    head, body = front_matter((tmp_path / "out" / "README.md").read_text())
    assert head == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["graftrl", "reinforcement-learning", "graft"],
    }
    assert "2 steps of `graft`" in body and "side by side with B" in body
    assert "GRAFT: gated replacement" in body and "| `weighting` | `none` |" in body
    assert "verifier: toy_task:coin" in body
    evaluations = trained.evaluations.filter(model="A")
    before, after = evaluations.filter(step=0)["pass_at_1"][0], evaluations.filter(step=2)["pass_at_1"][0]
    assert f"| {before:.3f} | {after:.3f} | {after - before:+.3f} [" in body and "8 validation prompts" in body
    exchange = trained.exchange.filter(receiver="A", status="admitted")
    assert f"| from B | {len(exchange)} responses on" in body and len(exchange) > 0
    sampled = trained.metrics["models/A/sampled_tokens"].sum()
    assert f"| sampled tokens | {int(sampled):,} |" in body
    fingerprint = trained.rollouts(1).filter(model="A")["tokenizer_fingerprint"][0]
    assert fingerprint in body and "| seed | 0 |" in body


def test_nothing_of_this_machines_paths_is_told(trained, tmp_path, pair):
    for model in ("A", "B"):
        out = tmp_path / model
        push(PushRequest(f"{trained.path}:{model}", card_only=out))
        for file in out.rglob("*"):
            if file.is_file() and file.suffix != ".safetensors":
                content = file.read_text()
                assert str(Path(pair["A"]).parent) not in content and str(trained.path) not in content, file
    recipe = yaml.safe_load((tmp_path / "A" / "recipe.yaml").read_text())
    assert recipe["models"]["A"]["path"] == "A"
    assert parse_recipe(recipe, "test") != load_recipe(trained.path / "config.yaml")


def test_an_adapter_names_its_base_as_readers_know_it(trained, tmp_path):
    push(PushRequest(f"{trained.path}:B", card_only=tmp_path / "B", base_model="org/base"))
    head, body = front_matter((tmp_path / "B" / "README.md").read_text())
    assert head["library_name"] == "peft" and head["base_model"] == "org/base"
    assert "A LoRA adapter for `org/base`" in body and "AutoPeftModelForCausalLM" in body and "LoRA of rank 2" in body
    assert "Responses end with one of ['>']" in body
    config = json.loads((tmp_path / "B" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/base"


def test_the_same_folder_goes_to_the_hub(trained, tmp_path):
    hub = FakeHub()
    place, _ = push(PushRequest(f"{trained.path}:A", "user/toy-a", private=True), lambda: hub)
    assert place == "https://huggingface.co/user/toy-a"
    assert hub.created == [("user/toy-a", True, True, "model")] and hub.message == "toy, step 2"
    assert {"README.md", "recipe.yaml", "model.safetensors", "config.json"} <= hub.files.keys()
    assert "optimizer.pt" not in hub.files
    text = hub.files["README.md"].decode()
    assert "# toy-a\n" in text and 'from_pretrained("user/toy-a")' in text


def test_a_run_that_was_not_validated_says_so(trained, tmp_path):
    (saved := trained.path / "evaluations" / "step-000000.json").rename(saved.with_suffix(".away"))
    try:
        push(PushRequest(f"{trained.path}:A", card_only=tmp_path / "out"))
    finally:
        saved.with_suffix(".away").rename(saved)
    assert "nothing is known about its results" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    "error",
    [LocalTokenNotFoundError("no token"), HTTPError("no such host"), OSError("no space left")],
    ids=["no token", "no network", "no disk"],
)
def test_a_hub_that_refuses_is_one_line(trained, error):
    with pytest.raises(RunError, match=r"user/a: cannot be pushed: no .*--card-only") as caught:
        push(PushRequest(f"{trained.path}:A", "user/a"), lambda: FakeHub(error))
    assert "\n" not in str(caught.value)


def test_wrong_requests_are_refused(trained, tmp_path):
    def refused(error, words, *arguments, **options):
        with pytest.raises(error, match=words):
            push(PushRequest(*arguments, **options), FakeHub)

    refused(ConfigError, "trained several models", str(trained.path), "user/a")
    refused(ConfigError, "name a repository", f"{trained.path}:A")
    refused(ConfigError, "name a repository", f"{trained.path}:A", "user/a", tmp_path / "x")
    refused(ConfigError, "not the name of a repository", f"{trained.path}:A", "user/a/b c")
    refused(ConfigError, "name a run", f"{trained.path}:A@0", "user/a")
    refused(RunError, "no checkpoint of step 7", f"{trained.path}:A@7", "user/a")


def test_as_a_command(graftrl, trained, tmp_path):
    code, out, err = graftrl("push", f"{trained.path}:A", "--card-only", tmp_path / "out")
    assert code == 0 and err == "" and out.splitlines()[0] == str(tmp_path / "out") and "note: " in out
    code, out, err = graftrl("push", f"{trained.path}:A", "--card-only", tmp_path / "out")
    assert code == 2 and out == "" and "exists already" in err


def test_paths_and_hub_ids_are_told_apart(tmp_path):
    assert public("org/model") == "org/model" and public(str(tmp_path / "deep" / "model")) == "model"
    assert public("./model") == public("~/x/model") == public("a/b/model") == "model"

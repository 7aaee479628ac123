"""What reads a checkpoint reads one in parts too: resume, eval, push, proxies; and `graftrl export` makes it whole."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from forked import on_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from graftrl.cli import app
from graftrl.config import parse_recipe
from graftrl.engines.ray.sharding import ShardedRanks
from graftrl.errors import ConfigError, DataError
from graftrl.evaluation.models import find_models
from graftrl.export.command import export
from graftrl.policies.hf import HFPolicy
from graftrl.push.command import PushRequest, push
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder
from graftrl.transfer.pairs import save_pair


class Stop(Silent):
    def step(self, metrics):
        if metrics["step"] == 2:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def runs(pair, tmp_path_factory):
    """One run stopped after its second step, twice: with a whole checkpoint, and with the same one in two parts."""
    root = tmp_path_factory.mktemp("export")
    recipe = parse_recipe(
        {
            "name": "toy", "seed": 5, "threads": 1, "method": "graft-no-floor",
            "models": {name: {"path": path, "optimizer": {"lr": 0.01}} for name, path in pair.items()},
            "task": {"kind": "function", "prompts": "toy_task:prompts", "validation_prompts": "toy_task:prompts",
                     "verifier": "toy_task:coin"},
            "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 6},
            "training": {"steps": 3, "prompts_per_step": 8, "group_size": 4, "minibatch_prompts": 4},
            "evaluation": {"prompts": 8},
        },
        "test",
    )  # fmt: skip
    whole = RunFolder.create(root / "whole", recipe)
    with pytest.raises(KeyboardInterrupt):
        train(whole, recipe, Stop())
    parts = RunFolder(root / "parts")
    shutil.copytree(whole.root, parts.root)
    shutil.rmtree(parts.checkpoint(1))

    def cut(mesh):
        for name, settings in recipe.models.items():
            folder = whole.checkpoint(2) / name
            policy = HFPolicy(name, settings, recipe.sampling, folder, ranks=ShardedRanks(mesh))
            policy.save_shards(root / "cut" / name).result()

    on_ranks(2, root, cut)
    for name in recipe.models:
        shutil.rmtree(parts.checkpoint(2) / name)
        shutil.move(root / "cut" / name, parts.checkpoint(2) / name)
    return whole, parts


def copied(run, tmp_path):
    shutil.copytree(run.root, tmp_path / run.root.name)
    return RunFolder.open(tmp_path / run.root.name)


def test_one_process_goes_on_from_parts_to_the_same_numbers(runs, tmp_path):
    whole, parts = (copied(run, tmp_path) for run in runs)
    for run in (whole, parts):
        train(run, run.recipe(), Silent())
    ours, theirs = (run.read_metrics()[-1] for run in (parts, whole))
    assert ours["step"] == 3 and ours["evaluation"] == theirs["evaluation"]
    for model in "AB":
        assert ours["models"][model]["loss"] == theirs["models"][model]["loss"]
        a, b = (load_file(run.checkpoint(3) / model / "model.safetensors") for run in (parts, whole))
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)
        one, other = (torch.load(run.checkpoint(3) / model / "optimizer.pt") for run in (parts, whole))
        assert one["state"].keys() == other["state"].keys()
        for index, of_one in other["state"].items():
            assert all(torch.equal(one["state"][index][key], value) for key, value in of_one.items())


def test_export_makes_the_folder_that_a_whole_checkpoint_is(runs, tmp_path):
    for run in runs:
        result = CliRunner().invoke(app, ["export", str(run.root), "--out", str(tmp_path / run.root.name)])
        assert result.exit_code == 0, result.output
        assert "A\n" in result.output and "step 2, the newest" in result.output
    for model in "AB":
        ours, theirs = tmp_path / "parts" / model, tmp_path / "whole" / model
        assert {f.name for f in ours.iterdir()} == {f.name for f in theirs.iterdir()} and not (ours / "shards").exists()
        a, b = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)
        assert json.loads((ours / "config.json").read_text()) == json.loads((theirs / "config.json").read_text())
        assert AutoTokenizer.from_pretrained(ours).get_vocab() == AutoTokenizer.from_pretrained(theirs).get_vocab()
        one, other = (AutoModelForCausalLM.from_pretrained(folder) for folder in (ours, theirs))
        assert one.generation_config.to_dict() == other.generation_config.to_dict()


def test_one_model_is_exported_without_a_folder_of_its_name(runs, tmp_path):
    written, _ = export(f"{runs[1].root}:B@2", tmp_path / "B")
    assert written == [tmp_path / "B"] and (tmp_path / "B" / "model.safetensors").is_file()
    with pytest.raises(DataError, match="exists already"):
        export(f"{runs[1].root}:B@2", tmp_path / "B")
    with pytest.raises(ConfigError, match="name a run whose models were trained"):
        export(f"{runs[1].root}@0", tmp_path / "none")


def test_torn_parts_leave_no_export(runs, tmp_path):
    run = copied(runs[1], tmp_path)
    next((run.checkpoint(2) / "A" / "shards").glob("*00001-of*.safetensors")).write_bytes(b"torn")
    result = CliRunner().invoke(app, ["export", f"{run.root}:A", "--out", str(tmp_path / "A")])
    assert "parts cannot be read" in str(result.exception) and not (tmp_path / "A").exists()


def test_eval_push_and_proxies_read_parts(runs, tmp_path):
    whole, parts = runs
    (ours,), (theirs,) = (find_models([f"{run.root}:A"], {}) for run in (parts, whole))
    a, b = (HFPolicy("A", subject.settings, parts.recipe().sampling) for subject in (ours, theirs))
    assert a.codec.eos_ids == b.codec.eos_ids
    for (name, one), (_, other) in zip(
        a.loaded.causal_lm.named_parameters(), b.loaded.causal_lm.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    push(PushRequest(f"{parts.root}:A", card_only=tmp_path / "card"))
    assert not {"shards", "buffers.safetensors", "optimizer.pt"} & {f.name for f in (tmp_path / "card").iterdir()}
    save_pair(f"{parts.root}:A", tmp_path / "pair")
    theirs = load_file(whole.checkpoint(2) / "A" / "model.safetensors")
    for folder in (tmp_path / "card", tmp_path / "pair" / "expert"):
        ours = load_file(folder / "model.safetensors")
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())

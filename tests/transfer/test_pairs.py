"""Proxy pairs on disk: what is kept, what was gained, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from graftrl.errors import ConfigError, DataError, RunError
from graftrl.policies.config import ScorerSettings
from graftrl.policies.frozen import FrozenWeights
from graftrl.policies.scorers import open_scorer
from graftrl.transfer.pairs import find_pairs, read_pair, recipe_of, save_pair


def same(one, other) -> bool:
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_pair_holds_both_models_and_where_they_come_from(proxy_run, pair, tmp_path):
    out = tmp_path / "pairs" / "one"
    saved, _ = save_pair(f"{proxy_run}:P@2", out)
    assert same(out / "base", Path(pair["A"])) and same(out / "expert", proxy_run / "checkpoints/step-000002/P")
    assert (out / "expert" / "tokenizer.json").exists() and not (out / "expert" / "optimizer.pt").exists()
    assert read_pair(out) == saved
    p = saved.provenance
    assert (p.run, p.model, p.method, p.task, p.seed, p.step) == ("proxy", "P", "grpo", "function", 3, 2)
    state = json.loads((proxy_run / "checkpoints/step-000002/state.json").read_text())
    assert p.sampled_tokens == state["sampled_tokens"] > 0 and p.wall_s == state["wall_s"] > 0
    assert saved.parameters == sum(tensor.numel() for tensor in load_file(out / "base/model.safetensors").values())
    assert recipe_of(out).models["P"].optimizer.lr == 0.01
    assert [path.name for path in (tmp_path / "pairs").iterdir()] == ["one"]  # no temporary folder is left


def test_the_gain_is_that_of_the_runs_validation_with_an_interval_over_prompts(proxy_run, tmp_path):
    saved, _ = save_pair(f"{proxy_run}:P@1", tmp_path / "one")
    before, after = (json.loads((proxy_run / "evaluations" / f"step-00000{step}.json").read_text()) for step in (0, 1))
    gain = saved.gain
    assert (gain.before, gain.after) == tuple(e["results"]["P"]["pass_at_1"] for e in (before, after))
    solved = [(after["successes"]["P"][q] - k) / 2 for q, k in before["successes"]["P"].items()]
    assert gain.difference == pytest.approx(np.mean(solved)) == pytest.approx(gain.after - gain.before)
    assert gain.low <= gain.difference <= gain.high and gain.low < gain.high
    assert (gain.problems, gain.samples) == (24, 2)


def test_unless_told_otherwise_the_best_checkpoint_is_taken_and_named(proxy_run, tmp_path):
    best = json.loads((proxy_run / "checkpoints/step-000002/state.json").read_text())["best_step"]
    saved, notes = save_pair(str(proxy_run), tmp_path / "one")
    assert saved.provenance.step == best
    assert any(f"step {best}, the best in validation" in note for note in notes)


def test_a_run_without_validation_gives_a_pair_whose_gain_is_not_known(train_run, tmp_path):
    task = {"kind": "function", "prompts": "toy_task:prompts", "verifier": "toy_task:coin"}
    saved, notes = save_pair(str(train_run(task=task)), tmp_path / "one")
    assert saved.gain is None and any("gain is not known" in note for note in notes)
    assert "gain not measured" in saved.summary


def test_scorers_of_a_pair_read_as_its_models_do_from_anywhere(proxy_run, pair, tmp_path, monkeypatch):
    save_pair(f"{proxy_run}:P@2", tmp_path / "pairs" / "one")
    shutil.move(tmp_path / "pairs", tmp_path / "moved")  # a pair is self-contained
    monkeypatch.chdir(tmp_path)
    options = read_pair(Path("moved/one")).scorers(Path("moved/one"))
    monkeypatch.chdir("/")
    assert {name: Path(of["path"]).name for name, of in options.items()} == {"expert": "expert", "base": "base"}
    store = FrozenWeights()
    opened = {name: open_scorer(name, ScorerSettings(**of, device="cpu"), store) for name, of in options.items()}
    weights = dict(opened["expert"].model.passes.loaded.causal_lm.named_parameters())
    expected = load_file(proxy_run / "checkpoints/step-000002/P/model.safetensors")
    assert torch.equal(weights["lm_head.weight"].detach(), expected["lm_head.weight"])


def test_a_lora_pair_is_an_adapter_on_its_base(train_run, pair, tmp_path):
    lora = {"P": {"path": pair["A"], "lora": {"rank": 2}, "optimizer": {"lr": 0.05}}}
    saved, _ = save_pair(str(train_run(models=lora)), tmp_path / "one")
    assert (saved.expert.path, saved.expert.adapter, saved.base.path) == ("base", "expert", "base")
    assert not (tmp_path / "one/expert/model.safetensors").exists()
    options = saved.scorers(tmp_path / "one")
    store = FrozenWeights()
    models = {n: store.model(n, ScorerSettings(**of, device="cpu")) for n, of in options.items()}
    assert models["expert"].passes.loaded is models["base"].passes.loaded


def test_the_base_can_be_left_where_it_is(proxy_run, pair, tmp_path):
    saved, _ = save_pair(f"{proxy_run}:P@2", tmp_path / "one", copy_base=False)
    assert saved.base.path == str(Path(pair["A"]).resolve()) and not (tmp_path / "one/base").exists()
    assert saved.scorers(tmp_path / "one")["base"]["path"] == saved.base.path


def test_what_cannot_become_a_pair_is_refused(proxy_run, train_run, pair, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(RunError, match="already exists"):
        save_pair(str(proxy_run), tmp_path / "there")
    for source in (f"{proxy_run}:P@0", pair["A"]):
        with pytest.raises(ConfigError, match="name a run whose model was trained"):
            save_pair(source, tmp_path / "new")
    with pytest.raises(RunError, match="no checkpoint of step 9"):
        save_pair(f"{proxy_run}:P@9", tmp_path / "new")
    two = train_run(models={name: {"path": path} for name, path in pair.items()})
    with pytest.raises(ConfigError, match=r"several models \(A, B\); say which, as .*:A"):
        save_pair(str(two), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_folders_that_are_no_pairs_are_named(proxy_run, tmp_path):
    with pytest.raises(DataError, match="is no proxy pair"):
        read_pair(tmp_path)
    save_pair(f"{proxy_run}:P@2", tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken/expert")
    with pytest.raises(DataError, match="its expert/ is missing"):
        read_pair(tmp_path / "broken")
    shutil.copytree(tmp_path / "good", tmp_path / "strange")
    (tmp_path / "strange/proxy.json").write_text('{"schema_version": 2}')
    found = dict(find_pairs(tmp_path))
    assert [path.name for path in found] == ["broken", "good", "strange"]
    assert isinstance(found[tmp_path / "strange"], DataError) and found[tmp_path / "good"].name == "good"
    assert list(find_pairs(tmp_path / "good")) == [(tmp_path / "good", found[tmp_path / "good"])]
    with pytest.raises(DataError, match="no such folder"):
        list(find_pairs(tmp_path / "none"))

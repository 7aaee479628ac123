"""Weights that go to their ranks without being whole on any device, and checkpoints in parts, one a rank."""

from __future__ import annotations

import os
import pickle
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from forked import on_ranks
from safetensors.torch import load_file, save_file
from tiny_models import character_tokenizer, grpo_objective, random_rows, tiny_config

from graftrl.engines.ray import sharding
from graftrl.engines.ray.sharding import ShardedRanks
from graftrl.errors import ModelError
from graftrl.policies import shards
from graftrl.policies.config import ModelSettings, OptimizerSettings, SamplingSettings
from graftrl.policies.hf import HFPolicy
from graftrl.policies.loading import load_pretrained

OPTIMIZER = OptimizerSettings(lr=3e-3, eps=1e-5, weight_decay=0.1, max_grad_norm=0.05, warmup_steps=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def build(kind):
        path = tmp_path_factory.mktemp("shards") / kind
        torch.manual_seed(0)
        hf.AutoModelForCausalLM.from_config(tiny_config(kind)).save_pretrained(path)
        character_tokenizer().save_pretrained(path)
        return path

    return build


def policy(path, mesh=None, checkpoint=None):
    settings = ModelSettings(path=str(path), device="cpu", microbatch_tokens=40, optimizer=OPTIMIZER)
    limits = SamplingSettings(max_response_tokens=12)
    return HFPolicy("m", settings, limits, checkpoint, ranks=None if mesh is None else ShardedRanks(mesh))


def content(of, names_of_buffers=True):
    """Weights, buffers and the optimizer's state of a policy, each as an array of bits."""
    model = of.loaded.causal_lm
    weights = of.ranks.whole_weights(model) or model.state_dict()
    found = dict(weights)
    if names_of_buffers:
        found |= {f"buffer {name}": value for name, value in model.named_buffers()}
    state = of.ranks.whole_state(of.optimizer)["state"]
    found |= {f"{key} {index}": value for index, of_one in state.items() for key, value in of_one.items()}
    return {name: None if value is None else value.detach().clone().numpy() for name, value in found.items()}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.mark.parametrize(
    ("kind", "size"), [("llama", 2), ("llama_tied", 3), ("gpt2", 2), ("gemma3", 2), ("llama3_rope", 4)]
)
def test_spread_weights_and_buffers_are_those_of_the_whole_model_bit_for_bit(folder, tmp_path, kind, size):
    path = folder(kind)
    rows = random_rows(3, seed=1)

    def work(mesh):
        one = policy(path, mesh)
        tied = one.loaded.causal_lm.get_output_embeddings().weight is one.loaded.causal_lm.get_input_embeddings().weight
        shares = [p.to_local().numel() for p in one.parameters]
        return content(one), [s.copy() for s in one.score(rows) if len(s)], tied, sum(shares)

    ranks, plain = on_ranks(size, tmp_path, work), policy(path)
    assert_equal(ranks[0][0], content(plain))
    scores = [score for _, of_rank, _, _ in ranks for score in of_rank]
    assert len(scores) == len(rows)
    theirs = sorted(plain.score(rows), key=lambda s: (len(s), s[0]))
    for ours, other in zip(sorted(scores, key=lambda s: (len(s), s[0])), theirs, strict=True):
        np.testing.assert_allclose(ours, other, atol=2e-5)
    assert {tied for _, _, tied, _ in ranks} == {plain.loaded.causal_lm.config.tie_word_embeddings}
    assert sum(share for *_, share in ranks) == sum(p.numel() for p in plain.parameters)


def test_only_one_rank_reads_the_model_and_its_complaint_is_every_ranks(folder, tmp_path, monkeypatch):
    path = folder("llama")
    real = sharding.load

    def work(mesh):
        reads = []
        monkeypatch.setattr(sharding, "load", lambda *args: reads.append(args) or real(*args))
        policy(path, mesh)
        return len(reads)

    assert on_ranks(2, tmp_path, work) == [1, 0]
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, path / "model.safetensors", {"format": "pt"})

    def fails(mesh):
        with pytest.raises(ModelError, match="not finite"):
            policy(path, mesh)

    on_ranks(2, tmp_path, fails)


def test_a_model_that_its_config_does_not_describe_in_full_is_read_by_every_rank(folder, tmp_path, monkeypatch):
    path = folder("gpt2")

    def work(mesh):
        monkeypatch.setattr(sharding, "_same_tensors", lambda *_: False)
        return content(policy(path, mesh))

    assert_equal(on_ranks(2, tmp_path, work)[0], content(policy(path)))


def test_a_skeleton_that_lacks_more_than_weights_and_buffers_is_seen(folder):
    model, _ = load_pretrained("m", ModelSettings(path=str(folder("llama"))))
    with torch.device("meta"):
        skeleton = hf.AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float32)
    assert sharding._same_tensors(model, skeleton)
    skeleton.model.table = torch.empty(3, device="meta")
    assert not sharding._same_tensors(model, skeleton)
    with torch.device("meta"):
        tied = hf.AutoModelForCausalLM.from_config(tiny_config("llama_tied"), dtype=torch.float32)
    assert not sharding._same_tensors(model, tied)


def saved(path, tmp_path, size=2):
    """A checkpoint of two ranks after two updates, written while a third changes the weights; what it must hold."""
    target = tmp_path / "checkpoint"

    def work(mesh):
        one = policy(path, mesh)
        one.update([random_rows(6, seed=4), random_rows(5, seed=5)], lambda _: grpo_objective())
        before = content(one)
        written = one.save_shards(target)
        one.update([random_rows(6, seed=6)], lambda _: grpo_objective())
        written.result()
        return before, content(one)

    before, after = on_ranks(size, tmp_path, work)[0]
    return target, before, after


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gpt2"])
def test_any_number_of_ranks_reads_what_two_wrote_bit_for_bit_and_goes_on_alike(folder, tmp_path, kind):
    path = folder(kind)
    target, before, after = saved(path, tmp_path)
    assert len(list((target / "shards").iterdir())) == 4 and not list(target.rglob("*.bin"))

    def work(mesh):
        one = policy(path, mesh, target)
        read = content(one)
        one.update([random_rows(6, seed=6)], lambda _: grpo_objective())
        return read, content(one)

    for size in (1, 4):
        read, then = on_ranks(size, tmp_path, work)[0]
        assert_equal(read, before)
        assert then.keys() == after.keys()
        for name in after:
            np.testing.assert_allclose(then[name], after[name], rtol=1e-4, atol=2e-6)
    plain = policy(path, checkpoint=target)  # the local engine
    assert_equal(content(plain), before)
    assert plain.optimizer_steps == 2 and plain.optimizer.param_groups[0]["lr"] == pytest.approx(2e-3)


def test_a_checkpoint_before_the_first_optimizer_step_has_no_moments(folder, tmp_path):
    path, target = folder("llama"), tmp_path / "checkpoint"
    on_ranks(2, tmp_path, lambda mesh: policy(path, mesh).save_shards(target).result() and None)
    fresh = policy(path, checkpoint=target)
    assert not fresh.optimizer.state and fresh.optimizer_steps == 0


def test_parts_load_as_a_model_like_any_folder(folder, tmp_path):
    path = folder("gemma3")
    target, before, _ = saved(path, tmp_path)
    model, tokenizer = load_pretrained("m", ModelSettings(path=str(target)))
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), before[name], err_msg=name)
    for name, value in model.named_buffers():
        np.testing.assert_array_equal(value.numpy(), before[f"buffer {name}"], err_msg=name)
    assert tokenizer.get_vocab() == character_tokenizer().get_vocab()


class _Bad:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def test_a_pickle_among_the_parts_is_never_opened(folder, tmp_path):
    path = folder("llama")
    target, before, _ = saved(path, tmp_path)
    mark = tmp_path / "ran"
    for name in (".metadata", "__0_.metadata", "optimizer.pt"):
        (target / "shards" / name).write_bytes(pickle.dumps(_Bad(mark)))
    (target / "optimizer.pt").write_bytes(pickle.dumps(_Bad(mark)))

    def work(mesh):
        return content(policy(path, mesh, target))

    assert_equal(on_ranks(2, tmp_path, work)[0], before)
    assert_equal(content(policy(path, checkpoint=target)), before)
    assert not mark.exists()


def test_missing_and_torn_parts_are_one_line(folder, tmp_path):
    path = folder("llama")
    target, _, _ = saved(path, tmp_path)
    first = target / "shards" / "shard-00001-model-00001-of-00002.safetensors"
    kept = first.read_bytes()

    def complains(words):
        with pytest.raises(ModelError, match=words) as error:
            policy(path, checkpoint=target)
        assert "\n" not in str(error.value)

    def on_both(mesh):
        with pytest.raises(ModelError, match="parts cannot be read"):
            policy(path, mesh, target)

    first.unlink()
    complains("has .* of .* numbers")
    first.write_bytes(kept[: len(kept) // 2])
    complains("parts cannot be read")
    on_ranks(2, tmp_path, on_both)
    first.write_bytes(kept.replace(b"saved_offsets", b"saved_offsetz"))
    complains("parts cannot be read")
    first.write_bytes(kept)
    (target / "buffers.safetensors").write_bytes(b"{}")
    on_ranks(2, tmp_path, on_both)


def test_who_waits_for_parts_finds_them_signed(tmp_path):
    """A future wakes who waits for it before it tells others that it is done."""
    (tmp_path / shards.FOLDER).mkdir()
    writing, seen = Future(), []
    writing.add_done_callback(lambda _: time.sleep(0.2))  # told first, so that the signature comes late
    signing = shards.signed_when_done(writing, tmp_path, 0)
    waiting = threading.Thread(target=lambda: (shards.finish(signing), seen.append(shards.signed(tmp_path, 1))))
    waiting.start()
    writing.set_result(None)
    waiting.join()
    assert seen == [True]

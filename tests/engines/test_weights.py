"""New weights on each way from two gloo trainers to their samplers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers as hf
from actors import Actor, Worker, answers, opened
from tiny_models import character_tokenizer, tiny_config
from torch.distributed import TCPStore

from graftrl.config import parse_recipe
from graftrl.engines.config import PolicyResources
from graftrl.engines.ray import sampler as samplers
from graftrl.engines.ray.engine import _placed, way_of
from graftrl.engines.ray.vllm_worker import TakesWeights
from graftrl.engines.ray.weights import Route, Weight, chunks_of, gathered, named, open_link, read

KINDS = ("llama_tied", "gpt2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        torch.manual_seed(0)
        hf.AutoModelForCausalLM.from_config(tiny_config(kind)).save_pretrained(root / kind)
        character_tokenizer().save_pretrained(root / kind)
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(scope="module")
def trainers(folders):
    recipe = parse_recipe(
        {
            "name": "toy", "engine": "ray", "method": "grpo", "models": {"M": {"path": str(folders["llama_tied"])}},
            "task": {"kind": "hidden_programs"},
            "training": {"steps": 1, "prompts_per_step": 4, "minibatch_prompts": 4},
        },
        "test",
    )  # fmt: skip
    pair = opened(_placed(recipe, "cpu"), "M", 2)
    yield pair
    for trainer in pair:
        trainer.end()


@pytest.fixture
def workers():
    started = [Actor(Worker, rank) for rank in (0, 1)]
    yield started
    for worker in started:
        worker.end()


def model(folders, kind="llama_tied"):
    return hf.AutoModelForCausalLM.from_pretrained(folders[kind])


def test_a_chunk_is_a_layer_or_a_weight_of_none(folders):
    tied = model(folders)
    chunks = chunks_of(tied)
    names = [[weight.names for weight in chunk] for chunk in chunks]
    assert names[0] == [("model.embed_tokens.weight", "lm_head.weight")] and names[-1] == [("model.norm.weight",)]
    layers = tied.config.num_hidden_layers
    assert len(chunks) == layers + 2
    for number, chunk in enumerate(names[1:-1]):
        assert all(name.startswith(f"model.layers.{number}.") for (name,) in chunk) and len(chunk) == 9
    assert sum(weight.size for chunk in chunks for weight in chunk) == sum(p.numel() for p in tied.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_taken_apart_comes_together_under_every_name(folders, kind, dtype):
    sent = model(folders, kind)
    chunks = chunks_of(sent)
    assert all(flat is None for flat in gathered(sent, chunks, dtype, keeps=False))
    flats = list(gathered(sent, chunks, dtype, keeps=True))
    found = {name: value for chunk, flat in zip(chunks, flats, strict=True) for name, value in named(chunk, flat)}
    assert found.keys() == sent.state_dict().keys() and "lm_head.weight" in found
    for name, value in sent.state_dict().items():
        assert torch.equal(found[name], value.to(dtype))


def test_never_more_than_one_chunk_is_whole(folders):
    whole = model(folders)
    chunks = chunks_of(whole)
    stream = gathered(whole, chunks, torch.float32, keeps=True)
    sizes = [next(stream).numel() for _ in chunks]
    assert max(sizes) == max(sum(weight.size for weight in chunk) for chunk in chunks) < sum(sizes) / 2


def test_bytes_of_a_chunk_are_read_from_memory_and_from_a_file(tmp_path):
    chunk = (Weight(("a", "b"), (2, 3)), Weight(("c",), ()))
    flat = torch.arange(7, dtype=torch.float32).to(torch.bfloat16)
    data = flat.view(torch.uint8).numpy()
    data.flags.writeable = False  # as the object store hands it out
    data.tofile(tmp_path / "0")
    for source in (data, tmp_path / "0"):
        found = dict(read([(chunk, source)], torch.bfloat16))
        assert found["a"].tolist() == found["b"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["c"].item() == 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["broadcast", "handover"])
def test_two_trainers_weights_arrive_whole_at_two_samplers(trainers, workers, folders, way, dtype):
    givers = trainers[:1] if way == "broadcast" else trainers
    addresses = answers(trainer.ask("offer") for trainer in givers)
    size = 3 if way == "broadcast" else 2
    asked = [trainer.ask("join", way, size) for trainer in givers]
    for number, worker in enumerate(workers):
        # a sampler of two devices for the broadcast; two samplers, each of the rank 0, for the handover
        first, address = (1, addresses[0]) if way == "broadcast" else (1 - number, addresses[number])
        asked.append(worker.ask("graftrl_join", Route(way, address, first, size, 60.0)))
    answers(asked)
    chunks = trainers[0].ask("chunks").answer()
    for _ in range(2):  # a second sync goes over the same link
        taking = [worker.ask("graftrl_take", chunks, dtype) for worker in workers]
        sending = [trainer.ask("send", dtype) for trainer in trainers]
        assert all(seconds >= 0 for seconds in answers(taking))
        sent = answers(sending)
    theirs = model(folders).state_dict()
    width = 4 if dtype == "float32" else 2
    assert sent[0].bytes == width * (sum(v.numel() for v in theirs.values()) - theirs["lm_head.weight"].numel())
    assert sent[1].bytes == (0 if way == "broadcast" else sent[0].bytes)
    for worker in workers:
        got = worker.ask("weights").answer()
        assert [name for name, _, _ in got].count("lm_head.weight") == 1
        assert {name for name, _, _ in got} == theirs.keys() and {kind for _, _, kind in got} == {f"torch.{dtype}"}
        for name, value, _ in got:
            np.testing.assert_array_equal(value, theirs[name].to(getattr(torch, dtype)).float().numpy())


def test_a_giver_hears_that_its_taker_ended(workers):
    """Long before the handover's time is over, which is a minute here."""
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    joining = workers[1].ask("graftrl_join", Route("handover", ("127.0.0.1", store.port), 0, 2, 60.0))
    link = open_link("handover", store, 0, 2, torch.device("cpu"), 60.0)
    joining.answer()
    workers[1].end()
    with pytest.raises(RuntimeError, match="at the other end of a weight handover ended"):
        link.give(torch.ones(3))


def test_what_is_said_at_a_handover_is_plain_json(folders):
    shared = torch.ones(8).untyped_storage()._share_filename_cpu_()
    assert json.loads(json.dumps([part.hex() if isinstance(part, bytes) else part for part in shared]))


def test_a_model_that_skips_weights_does_not_leave_them_in_the_link(folders):
    class Link:
        taken = 0

        def take(self, size, dtype):
            self.taken += 1
            return torch.zeros(size, dtype=dtype)

    class Picky(TakesWeights):
        graftrl_link = Link()

        def reload_weights(self, weights_iterator):
            next(weights_iterator)

    chunks = chunks_of(model(folders))
    assert Picky().graftrl_take(chunks, "float32") >= 0
    assert Picky.graftrl_link.taken == len(chunks)


@pytest.mark.parametrize(
    ("asked", "devices", "kind", "way"),
    [
        ("auto", "own", "CPU", "host"),
        ("auto", "own", "GPU", "broadcast"),
        ("auto", "shared", "GPU", "handover"),
        ("direct", "own", "CPU", "broadcast"),
        ("direct", "shared", "CPU", "handover"),
        ("host", "own", "GPU", "host"),
    ],
)
def test_weights_go_directly_on_gpus_and_where_it_is_asked_for(asked, devices, kind, way):
    assert way_of(asked, PolicyResources(devices=devices), kind) == way


def test_files_for_other_processes_lie_in_memory_where_it_has_the_room(monkeypatch):
    assert samplers._roomy(0) in (None, samplers.Path("/dev/shm"))
    assert samplers._roomy(1 << 60) is None

"""Two GraftTrainers that exchange through a folder choose what co-training in one process chooses."""

import time
from concurrent.futures import ThreadPoolExecutor

import coin_task
import pytest
from datasets import Dataset
from trl_scripts import TEXTS, N, says, words

from graftrl.config import parse_recipe
from graftrl.integrations.trl import FolderExchange
from graftrl.logs.reader import RolloutLog
from graftrl.methods import StepContext, build_method
from graftrl.rollout import Row
from graftrl.seeds import derive_seed
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder

# A fails entirely on 0, 2 and 3, B on 1: balanced, A gets one of its three candidates and ties.
SAID = {
    "A": [words(0, 0), words(1, 2), words(2, 0), words(3, 0)],
    "B": [words(0, 1), words(1, 0), words(2, 3), words(3, 2)],
}


def graft_side_by_side(trainers):
    def run(trainer):
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 2
        return trainer._graft([{"prompt": text} for text in TEXTS for _ in range(N)])

    with ThreadPoolExecutor(len(trainers)) as pool:
        return {t.name: found for t, found in zip(trainers, pool.map(run, trainers, timeout=60), strict=True)}


@pytest.mark.parametrize("balanced", [True, False])
def test_the_exchange_is_that_of_co_training_in_one_process(make_trainer, tmp_path, group, codecs, balanced):
    trainers = []
    for name, peer in (("A", "B"), ("B", "A")):
        trainer = make_trainer(
            model=name,
            config={"graft_options": {"weighting": "none", "balanced": balanced}},
            exchange=FolderExchange(tmp_path / "exchange", name, peer, timeout_s=30, poll_s=0.01),
        )
        says(trainer, SAID[name])
        trainers.append(trainer)
    microbatches = graft_side_by_side(trainers)

    method = build_method({"name": "graft", "weighting": "none", "balanced": balanced})
    together = method.exchange(
        {name: [group(name, index, texts) for index, texts in enumerate(said)] for name, said in SAID.items()},
        StepContext(
            step=1, seed=derive_seed(42, "exchange", 1), group_size=N, max_response_tokens=30, codecs=codecs,
            score=lambda model, rows: [row.response_token_ids * 0.0 - 1.0 for row in rows],
        ),
    )  # fmt: skip
    for name in ("A", "B"):
        ours = sorted(
            (kind, tuple(ids[mask.bool()].tolist()))
            for inputs in microbatches[name]
            for kind, ids, mask in zip(
                inputs["graft_kinds"], inputs["completion_ids"], inputs["completion_mask"], strict=True
            )
        )
        theirs: list[Row] = together.rows[name]
        assert ours == sorted((row.kind, tuple(row.response_token_ids.tolist())) for row in theirs)
    kinds = [kind for inputs in microbatches["A"] for kind in inputs["graft_kinds"]]
    assert kinds.count("grafted") == (N if balanced else 3 * N)


def test_own_logprobs_travel_and_serve_as_old_logprobs(make_trainer, tmp_path):
    from graftrl.logs.reader import RolloutLog

    trainer = make_trainer(exchange=FolderExchange(tmp_path / "x", "A", "B", timeout_s=0.05))
    says(trainer, SAID["A"])
    (inputs, *_) = graft_side_by_side([trainer])["A"]
    assert trainer._metrics["train"]["graft/alone"] == [1.0]
    log = RolloutLog(tmp_path / "x" / "A")
    by_ids = {
        tuple(response.token_ids.tolist()): response.logprobs
        for group in log.groups("A", log.group_index("A").select("step", "prompt_id").rows()).values()
        for response in group.responses
    }
    for ids, mask, old in zip(
        inputs["completion_ids"], inputs["completion_mask"], inputs["old_per_token_logps"], strict=True
    ):
        assert old[mask.bool()].tolist() == by_ids[tuple(ids[mask.bool()].tolist())].tolist()


def test_alone_it_trains_on_as_plain_grpo(make_trainer, tmp_path, caplog):
    trainer = make_trainer(exchange=FolderExchange(tmp_path / "x", "A", "B", timeout_s=0.05), config={"max_steps": 4})
    says(trainer, SAID["A"])
    trainer.train()
    assert trainer.state.global_step == 4
    assert caplog.text.count("ALONE in this step") == 1
    assert {kind for inputs in trainer._buffered_inputs for kind in inputs["graft_kinds"]} == {"own"}


def test_a_script_and_a_recipe_exchange_with_each_other(make_trainer, pair, tmp_path):
    recipe = parse_recipe(
        {
            "name": "toy", "seed": 5, "threads": 1, "method": "graft-no-floor",
            "models": {"B": {"path": pair["B"], "optimizer": {"lr": 0.01}}},
            "peers": {"A": {"live": str(tmp_path / "x"), "timeout_s": 60}},
            "task": {"kind": "function", "prompts": "coin_task:prompts", "verifier": "coin_task:verify"},
            "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 8},
            "training": {"steps": 2, "prompts_per_step": 4, "group_size": 4, "minibatch_prompts": 2},
        },
        "test",
    )  # fmt: skip
    trainer = make_trainer(
        config={"max_steps": 4, "graft_log_dir": str(tmp_path / "A"), "graft_options": {"weighting": "none"}},
        data=Dataset.from_list(coin_task.prompts()),
        reward_funcs=coin_task.reward,
        exchange=FolderExchange(tmp_path / "x", "A", "B", timeout_s=60, poll_s=0.05),
    )
    run = RunFolder.create(tmp_path / "B", recipe)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(train, run, recipe, Silent())
        while not (tmp_path / "x" / "B" / "rollouts" / "step-000001.parquet").exists() and not job.done():
            time.sleep(0.05)  # models load one after the other
        trainer.train()
        job.result(timeout=60)
    logged = trainer.state.log_history[-1]  # means over both generation batches
    assert (logged["graft/alone"], logged["graft/peers/B/groups"], logged["graft/peers/B/contradicted"]) == (0, 4, 0)
    script = RolloutLog(tmp_path / "A")
    for line in run.read_metrics():
        of_peer = line["peers"]["A"]
        # Rewards may differ here: TRL grades texts without the special tokens that an untrained model strews in.
        assert (of_peer["groups"], of_peer["staleness"]) == (4, 0)
    record = RolloutLog(run.root / "received")
    assert record.group_index("A").equals(script.group_index("A"))
    key = [(2, "p3")]
    ours, theirs = record.groups("A", key)[key[0]], script.groups("A", key)[key[0]]
    assert [r.text for r in ours.responses] == [r.text for r in theirs.responses]
    assert [r.logprobs.tolist() for r in ours.responses] == [r.logprobs.tolist() for r in theirs.responses]

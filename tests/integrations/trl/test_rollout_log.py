"""Any GRPOTrainer writes a rollout log that the reader, `logs validate` and stored peers accept."""

import numpy as np
import polars as pl
import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl_scripts import RIGHT, TEXTS, N, load, prompt, says, verify, words

from graftrl.errors import ConfigError, DataError, RunError
from graftrl.integrations.trl import RolloutLogCallback
from graftrl.logs.config import PeerSettings
from graftrl.logs.reader import RolloutLog
from graftrl.logs.validate import validate_log
from graftrl.policies.config import ModelSettings, SamplingSettings
from graftrl.policies.hf import HFPolicy
from graftrl.rollout import Row
from graftrl.training.peers import StoredPeer

SAID = [words(0, 0), words(1, 2), words(2, 1), words(3, 4)]


@pytest.fixture
def make_plain(pair, arguments):
    """TRL's own trainer; model B, so that pad is eos."""

    def make(rewards=verify, data=None, **config):
        return GRPOTrainer(
            reward_funcs=rewards,
            args=GRPOConfig(**arguments(**config)),
            train_dataset=data or Dataset.from_dict({"prompt": TEXTS}),
            **load(pair["B"]),
        )

    return make


def train_with_log(trainer, folder, texts=SAID, **options):
    callback = RolloutLogCallback(trainer, folder, model="B", **options)
    trainer.add_callback(callback)
    if texts is not None:
        says(trainer, texts)
    trainer.train()
    return RolloutLog(folder)


def all_groups(log):
    return log.groups("B", log.group_index("B").select("step", "prompt_id").rows())


def test_the_log_holds_every_response_with_ids_and_rewards(make_plain, tmp_path):
    # Two optimizer steps use one generation batch, so TRL computes log-probabilities.
    log = train_with_log(make_plain(max_steps=4), tmp_path / "log")
    assert log.steps("B") == [1, 2] and log.sampling("B") == {(1.0, 1.0, 0)}
    groups = all_groups(log)
    assert {key: group.successes for key, group in groups.items()} == {
        (step, prompt(i).id): k for step in (1, 2) for i, k in enumerate((0, 2, 1, 4))
    }
    group = groups[1, prompt(2).id]
    assert [response.text for response in group.responses] == SAID[2]
    assert {response.finish_reason for response in group.responses} == {"stop"}
    assert group.prompt.messages == prompt(2).messages
    frame = pl.read_parquet(tmp_path / "log" / "rollouts" / "*.parquet")
    assert sorted(set(frame["policy_version"])) == [0, 2]
    assert list(validate_log(tmp_path / "log")) == []


def test_its_logprobs_are_the_models(make_plain, tmp_path, pair):
    policy = HFPolicy("B", ModelSettings(path=pair["B"], device="cpu", bos="keep"), SamplingSettings())
    data = Dataset.from_dict({"prompt": ["a1,2>"] * 2 + ["b3,4>"] * 2})  # of one length: TRL pads positions too
    trainer = make_plain(data=data, max_steps=1, learning_rate=0.0)
    log = train_with_log(trainer, tmp_path / "log", texts=None)
    for group in all_groups(log).values():
        for response in group.responses:
            row = Row("x", policy.codec.prompt_token_ids(group.prompt), response.token_ids, 0.0, "own", "B")
            np.testing.assert_allclose(response.logprobs, policy.score([row])[0], atol=2e-5)
            assert len(response.logprobs) == len(response.token_ids) <= 30
            assert (response.finish_reason == "stop") == (int(response.token_ids[-1]) == policy.codec.eos_id)
            assert response.finish_reason == "stop" or len(response.token_ids) == 30


def test_logprobs_that_trl_does_not_compute_are_left_out_or_computed(make_plain, tmp_path):
    aligned = {"steps_per_generation": 2, "per_device_train_batch_size": 8, "max_steps": 1}
    train_with_log(make_plain(**aligned), tmp_path / "without")
    frame = pl.read_parquet(tmp_path / "without" / "rollouts" / "*.parquet")
    assert frame["logprobs"].null_count() == 16 and frame["token_ids"].null_count() == 0
    assert "logs score" in str(next(iter(validate_log(tmp_path / "without"))))
    log = train_with_log(make_plain(**aligned), tmp_path / "with", logprobs="compute")
    assert list(validate_log(tmp_path / "with")) == []
    peer = StoredPeer("B", PeerSettings(log=[tmp_path / "with"], match="prompt"), seed=0)
    assert peer.fingerprint and log.models == ("B",)


def test_a_trained_model_is_the_same_with_and_without_the_log(make_plain, tmp_path):
    plain = make_plain(max_steps=2)
    says(plain, SAID)
    plain.train()
    logged = make_plain(max_steps=2)  # which sets the seed anew
    train_with_log(logged, tmp_path / "log", logprobs="compute")
    for p, q in zip(plain.model.parameters(), logged.model.parameters(), strict=True):
        assert p.equal(q)


def test_evaluation_is_not_logged(make_plain, tmp_path):
    data = Dataset.from_dict({"prompt": TEXTS})
    trainer = make_plain(max_steps=2)
    trainer.eval_dataset = data
    callback = RolloutLogCallback(trainer, tmp_path / "log", model="B")
    trainer.add_callback(callback)
    says(trainer, SAID)
    trainer.evaluate()
    assert not (tmp_path / "log").exists()


def test_ids_references_and_the_reward_come_from_where_they_are_said_to(make_plain, tmp_path):
    def length(completions, **_):
        return [float(len(text)) for text in completions]

    data = Dataset.from_dict({"prompt": TEXTS, "name": list("pqrs"), "solution": [1, 2, 3, 4]})
    trainer = make_plain(rewards=[length, verify], data=data, max_steps=2)
    log = train_with_log(trainer, tmp_path / "log", id_field="name", reference_field="solution", reward="verify")
    groups = all_groups(log)
    assert [(q, group.prompt.reference, group.successes) for (_, q), group in groups.items()] == [
        ("p", "1", 0), ("q", "2", 2), ("r", "3", 1), ("s", "4", 4),
    ]  # fmt: skip


def test_rewards_beyond_0_and_1_need_a_threshold(make_plain, tmp_path):
    def points(completions, **_):
        return [10.0 if RIGHT in text else -1.0 for text in completions]

    with pytest.raises(DataError, match="success_above"):
        train_with_log(make_plain(rewards=points, max_steps=2), tmp_path / "refused")
    log = train_with_log(make_plain(rewards=points, max_steps=2), tmp_path / "log", success_above=0)
    assert log.group_index("B")["k"].sum() == 7


def test_ungraded_responses_are_left_out(make_plain, tmp_path):
    def unsure(completions, **_):
        return [None if text == SAID[1][0] else float(RIGHT in text) for text in completions]

    log = train_with_log(make_plain(rewards=unsure, max_steps=2), tmp_path / "log")
    assert log.group_index("B")["n"].to_list().count(3) == 1


def test_prompts_that_occur_twice_in_a_batch_are_one_group(make_plain, tmp_path):
    trainer = make_plain(data=Dataset.from_dict({"prompt": [TEXTS[0], TEXTS[1], TEXTS[0], TEXTS[2]]}), max_steps=2)
    log = train_with_log(trainer, tmp_path / "log", texts=[words(i, 1, 2 * N) for i in range(4)])
    assert sorted(log.group_index("B")["n"].to_list()) == [N, N, 2 * N]
    assert [problem for problem in validate_log(tmp_path / "log") if "index" in str(problem)] == []


def test_a_log_is_not_written_over_by_a_new_run_but_a_resumed_one_goes_on(make_plain, tmp_path):
    first = make_plain(max_steps=2, save_strategy="steps", save_steps=2)
    train_with_log(first, tmp_path / "log")
    with pytest.raises(RunError, match="holds a rollout log already"):
        train_with_log(make_plain(max_steps=2), tmp_path / "log")
    resumed = make_plain(max_steps=4)
    resumed.add_callback(RolloutLogCallback(resumed, tmp_path / "log", model="B"))
    says(resumed, SAID)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert RolloutLog(tmp_path / "log").steps("B") == [1, 2]


def test_what_a_log_cannot_say_is_refused(make_plain, tmp_path):
    for config, words_ in (({"min_p": 0.1}, "min_p"), ({"repetition_penalty": 1.2}, "repetition_penalty")):
        with pytest.raises(ConfigError, match=words_):
            RolloutLogCallback(make_plain(**config), tmp_path, model="B")
    with pytest.raises(ConfigError, match="say which reward"):
        RolloutLogCallback(make_plain(rewards=[verify, verify]), tmp_path, model="B")
    with pytest.raises(ConfigError, match="none of the trainer's"):
        RolloutLogCallback(make_plain(), tmp_path, model="B", reward="other")


def test_other_temperatures_are_recorded_so_that_the_log_is_refused_as_a_peer(make_plain, tmp_path):
    train_with_log(make_plain(temperature=0.7, max_steps=2), tmp_path / "log")
    with pytest.raises(DataError, match=r"temperature 0\.7"):
        StoredPeer("B", PeerSettings(log=[tmp_path / "log"], match="prompt"), seed=0)

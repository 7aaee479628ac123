from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from graftrl.errors import DataError
from graftrl.logs import score as score_module
from graftrl.logs.checks import broken_rules
from graftrl.logs.reader import RolloutLog
from graftrl.logs.rollouts import ROLLOUT_SCHEMA, write_frame, write_rollouts
from graftrl.logs.score import Scored, score_log
from graftrl.policies.config import ModelSettings, SamplingSettings
from graftrl.policies.hf import HFPolicy
from graftrl.rollout import Prompt

PROMPTS = [Prompt(f"p{i}", ({"role": "user", "content": f"c{i},1,4,1>"},), "", "test") for i in range(3)]
TEXTS = ("A:6,2", "B:7,3;", "C:1")


@pytest.fixture(scope="module")
def policy(pair):
    torch.set_num_threads(1)
    return HFPolicy("A", ModelSettings(path=pair["A"], device="cpu"), SamplingSettings(max_response_tokens=8))


@pytest.fixture
def sampled(policy, tmp_path) -> Path:
    """A run's log of two steps, as the policy sampled it."""
    for step in (1, 2):
        groups = policy.sample(PROMPTS, 2, seed=step)
        for group in groups:
            for response in group.responses:
                response.reward = 0.0
        write_rollouts(
            tmp_path / "run" / "rollouts" / f"step-{step:06d}.parquet",
            run="run", step=step, groups={"A": groups}, sampling=SamplingSettings(),
            fingerprints={"A": policy.codec.fingerprint},
        )  # fmt: skip
    return tmp_path / "run"


@pytest.fixture
def texts(tmp_path) -> Path:
    """What an import without a tokenizer writes: texts, no ids; the second response was cut."""
    rows = [
        {
            "run": "old", "step": 1, "model": "A", "policy_version": 0, "prompt_id": "p0", "task": "t",
            "messages": [dict(message) for message in PROMPTS[0].messages], "reference": "", "response_index": i,
            "text": text, "finish_reason": "length" if i == 1 else "stop", "reward": 1.0, "grade_reason": "",
            "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        }
        for i, text in enumerate(TEXTS)
    ]  # fmt: skip
    write_frame(tmp_path / "texts" / "step-000001.parquet", pl.DataFrame(rows, schema=ROLLOUT_SCHEMA))
    return tmp_path / "texts"


def forget(log: Path, *columns: str) -> None:
    for file in (log / "rollouts").iterdir():
        frame = pl.read_parquet(file)
        write_frame(file, frame.with_columns(pl.lit(None, ROLLOUT_SCHEMA[name]).alias(name) for name in columns))


def read(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(folder / "**/*.parquet")


def change(log: Path, *expressions: pl.Expr) -> None:
    for file in log.glob("*.parquet"):
        write_frame(file, pl.read_parquet(file).with_columns(*expressions))


def plain_logprobs(folder: str, prompt: str, response: list[int]) -> np.ndarray:
    """A second implementation: transformers' own logits, softmax in float64."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = [*tokenizer.encode(prompt), *response]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double().numpy()
    logprobs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logprobs -= logits.max(-1, keepdims=True)
    start = len(ids) - len(response)
    return np.array([logprobs[start + t - 1, token] for t, token in enumerate(response)])


def test_generation_logprobs_come_back_from_the_sampled_ids(policy, sampled):
    before = read(sampled)
    forget(sampled, "logprobs")
    results = list(score_log(sampled, policy))
    assert [(result.scored, result.encoded) for result in results] == [(6, 0), (6, 0)]
    assert [result.versions for result in results] == [{0}, {1}]
    after = read(sampled)
    assert after.drop("logprobs").equals(before.drop("logprobs"))
    for new, old in zip(after["logprobs"], before["logprobs"], strict=True):
        np.testing.assert_allclose(new.to_numpy(), old.to_numpy(), atol=1e-4)


def test_texts_are_encoded_with_an_eos_only_where_the_response_ended(policy, texts, pair):
    (result,) = score_log(texts, policy)
    assert (result.scored, result.encoded) == (3, 3)
    frame = read(texts)
    for row in frame.iter_rows(named=True):
        expected = policy.codec.tokenizer.encode(row["text"], add_special_tokens=False)
        if row["finish_reason"] == "stop":
            expected.append(policy.codec.tokenizer.eos_token_id)
        assert row["token_ids"] == expected
        reference = plain_logprobs(pair["A"], PROMPTS[0].text, expected)
        np.testing.assert_allclose(row["logprobs"], reference, atol=1e-4)
    assert set(frame["tokenizer_fingerprint"]) == {policy.codec.fingerprint}
    assert not broken_rules(frame.with_row_index("row")).height
    assert RolloutLog(texts).groups("A", [(1, "p0")])[1, "p0"].size == 3


def test_only_what_lacks_logprobs_is_scored(policy, sampled):
    before = read(sampled)
    first = pl.col("prompt_id") == "p1"
    for file in (sampled / "rollouts").iterdir():
        nothing = pl.when(first).then(None).otherwise("logprobs").alias("logprobs")
        write_frame(file, pl.read_parquet(file).with_columns(nothing))
    assert [result.scored for result in score_log(sampled, policy)] == [2, 2]
    after = read(sampled)
    assert after.filter(~first).equals(before.filter(~first))
    assert list(score_log(sampled, policy)) == []


def test_an_interrupted_call_goes_on_where_it_stopped(policy, sampled, tmp_path, monkeypatch):
    forget(sampled, "logprobs")
    out = tmp_path / "scored"
    steps = score_log(sampled, policy, out=out)
    assert next(steps).file == out / "step-000001.parquet"
    steps.close()  # the process ends here
    assert [file.name for file in out.iterdir()] == ["step-000001.parquet"]
    calls = []
    original = policy.score
    monkeypatch.setattr(policy, "score", lambda rows: calls.append(len(rows)) or original(rows))
    assert [result.file.name for result in score_log(sampled, policy, out=out)] == ["step-000002.parquet"]
    assert calls == [6]
    assert read(sampled)["logprobs"].null_count() == 12  # the source is untouched
    assert read(out)["logprobs"].null_count() == 0


def test_files_without_anything_to_score_are_copied_to_out(policy, sampled, tmp_path):
    assert list(score_log(sampled, policy, out=tmp_path / "out")) == []
    assert read(tmp_path / "out").equals(read(sampled))


def test_out_with_another_log_is_refused(policy, sampled, texts):
    forget(sampled, "logprobs")
    before = read(texts)
    with pytest.raises(DataError, match=r"step-000001\.parquet: exists already and holds other responses"):
        list(score_log(sampled, policy, out=texts))
    assert read(texts).equals(before)


def test_batches_of_any_size_give_the_same(policy, texts, monkeypatch, tmp_path):
    list(score_log(texts, policy, out=tmp_path / "whole"))
    monkeypatch.setattr(score_module, "_ROWS_AT_ONCE", 1)
    list(score_log(texts, policy, out=tmp_path / "single"))
    for one, other in zip(read(tmp_path / "whole")["logprobs"], read(tmp_path / "single")["logprobs"], strict=True):
        np.testing.assert_allclose(one.to_numpy(), other.to_numpy(), atol=1e-5)


def test_columns_of_the_user_stay(policy, texts):
    change(texts, pl.lit("easy").alias("difficulty"))
    list(score_log(texts, policy))
    assert read(texts)["difficulty"].to_list() == ["easy"] * 3


class TestLeftOut:
    def test_texts_that_cannot_be_encoded_are_counted(self, policy, texts):
        new = pl.when(pl.col("response_index") == 0).then(pl.lit("é")).otherwise("text").alias("text")
        change(texts, new)
        (result,) = score_log(texts, policy)
        assert isinstance(result, Scored) and result.scored == 2
        assert dict(result.skipped) == {"changed by round trip": 1}
        assert read(texts)["logprobs"].is_null().to_list() == [True, False, False]

    def test_empty_cut_responses_have_nothing_to_score(self, policy, texts):
        change(texts, pl.lit("").alias("text"))
        (result,) = score_log(texts, policy)
        assert dict(result.skipped) == {"empty": 1}
        assert read(texts)["token_ids"].to_list()[0] == [policy.codec.eos_id]

    def test_more_tokens_than_the_model_has_positions(self, policy, texts):
        change(texts, pl.lit("1" * 200).alias("text"))
        (result,) = score_log(texts, policy)
        assert result.scored == 0 and dict(result.skipped) == {"longer than the model's 128 positions": 3}

    def test_unknown_sampling_is_counted(self, policy, texts):
        change(texts, pl.lit(None, pl.Float64).alias("top_p"))
        (result,) = score_log(texts, policy)
        assert (result.scored, result.unknown_sampling) == (3, 3)


class TestRefusals:
    def test_samples_of_another_distribution(self, policy, texts):
        change(texts, pl.lit(0.7).alias("temperature"))
        with pytest.raises(DataError, match=r"step-000001\.parquet, row 1: sampled with temperature 0\.7, top_p 1"):
            list(score_log(texts, policy))
        assert read(texts)["logprobs"].null_count() == 3

    def test_unknown_finish_reason(self, policy, texts):
        change(texts, pl.lit(None, pl.String).alias("finish_reason"))
        with pytest.raises(DataError, match="row 1: whether the response ended by itself is unknown"):
            list(score_log(texts, policy))

    def test_ids_of_another_tokenizer(self, policy, sampled):
        forget(sampled, "logprobs")
        for file in (sampled / "rollouts").iterdir():
            write_frame(file, pl.read_parquet(file).with_columns(tokenizer_fingerprint=pl.lit("other")))
        with pytest.raises(DataError, match="row 1: its token ids are of tokenizer other, the model's is"):
            list(score_log(sampled, policy))

    def test_several_models_without_logprobs_need_a_name(self, policy, texts):
        model = pl.when(pl.col("response_index") == 0).then(pl.lit("B")).otherwise("model").alias("model")
        change(texts, model)
        with pytest.raises(DataError, match="responses of A, B lack log-probabilities; choose one with --name"):
            list(score_log(texts, policy))
        (result,) = score_log(texts, policy, "A")
        assert result.scored == 2 and read(texts)["logprobs"].is_null().to_list() == [True, False, False]

    def test_torn_file_before_anything_is_scored(self, policy, sampled):
        forget(sampled, "logprobs")
        file = sampled / "rollouts" / "step-000002.parquet"
        file.write_bytes(file.read_bytes()[:-4])
        with pytest.raises(DataError, match=r"step-000002\.parquet: torn"):
            list(score_log(sampled, policy))
        assert pl.read_parquet(sampled / "rollouts" / "step-000001.parquet")["logprobs"].null_count() == 6

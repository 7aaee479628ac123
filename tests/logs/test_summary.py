from __future__ import annotations

import json

import polars as pl

from graftrl.logs.summary import summarize


def test_counts_of_a_log(log):
    summary = summarize(log)
    assert (summary["responses"], summary["files"], summary["runs"]) == (48, 3, ["run"])
    assert summary["bytes"] == sum(file.stat().st_size for file in (log / "rollouts").iterdir())
    a = summary["models"]["A"]
    assert a["steps"] == {"count": 3, "first": 1, "last": 3}
    assert (a["groups"], a["prompts"], a["responses"]) == (6, 4, 24)
    assert a["successes"] == {"4": {"0": 4, "2": 1, "4": 1}}
    assert a["reward_mean"] == 6 / 24
    assert a["response_tokens_mean"] == 5.0
    assert (a["share_with_logprobs"], a["responses_without_reward"]) == (1.0, 0)
    assert a["finish_reasons"] == {"stop": 24}
    assert a["sampling"] == [{"temperature": 1.0, "top_p": 1.0, "top_k": 0}]
    assert a["tokenizer_fingerprints"] == ["tokenizer-of-A"]


def test_what_is_missing_is_counted_and_not_guessed(log, edit_file):
    first = pl.col("response_index") == 0
    nothing = {"logprobs": pl.List(pl.Float32), "token_ids": pl.List(pl.Int32), "reward": pl.Float64}
    edit_file(
        log / "rollouts" / "step-000002.parquet",
        *(pl.when(first).then(pl.lit(None, dtype)).otherwise(name).alias(name) for name, dtype in nothing.items()),
        pl.lit(None, pl.Float64).alias("temperature"),
        pl.lit(None, pl.String).alias("finish_reason"),
    )
    a = summarize(log)["models"]["A"]
    assert a["share_with_logprobs"] == 22 / 24
    assert a["response_tokens_mean"] == 5.0
    assert a["responses_without_reward"] == 2
    assert a["successes"] is None and a["groups"] is None
    assert a["reward_mean"] == 6 / 22
    assert a["finish_reasons"] == {"None": 8, "stop": 16}
    assert {"temperature": None, "top_p": 1.0, "top_k": 0} in a["sampling"]


def test_summary_is_json(log):
    assert json.loads(json.dumps(summarize(log), allow_nan=False))["models"]["B"]["responses"] == 24

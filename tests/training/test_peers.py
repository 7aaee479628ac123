"""Stored peers end to end: a receiver against the log of an earlier run, through the ordinary loop."""

import dataclasses
import json
from functools import partial

import numpy as np
import polars as pl
import pytest
from peer_runs import COIN, exchanged, run_recipe, same_weights, weights_at

from graftrl.config import parse_recipe
from graftrl.errors import ConfigError, DataError
from graftrl.lab.models import LAB_MODELS, build_model, save_model
from graftrl.logs.config import PeerSettings
from graftrl.logs.reader import RolloutLog
from graftrl.methods import StepContext, build_method
from graftrl.methods.base import Exchange
from graftrl.methods.grpo import GRPO, GRPOSettings
from graftrl.rollout import Group
from graftrl.training import loop
from graftrl.training.dry_run import print_dry_run
from graftrl.training.loop import train
from graftrl.training.peers import Remembered, StoredPeer
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder

STEPS = 4  # with eight of 24 prompts a step the epoch ends after three
weights = partial(weights_at, STEPS)


@pytest.fixture(scope="session")
def third(tmp_path_factory):
    root = tmp_path_factory.mktemp("third") / "C"
    save_model(build_model(LAB_MODELS["C"], seed=3), LAB_MODELS["C"], root)
    return {"path": str(root), "optimizer": {"lr": 0.01}}


@pytest.fixture(scope="session")
def online(make_recipe, tmp_path_factory):
    """A finished co-training run of A and B, by method; exchange is unbalanced where the method balances."""
    runs = {}

    def run(method):
        key = json.dumps(method)
        if key not in runs:
            runs[key] = run_recipe(
                make_recipe(method, steps=STEPS, task=COIN), tmp_path_factory.mktemp("online") / "run"
            )
        return runs[key]

    return run


@pytest.fixture(scope="session")
def log(online):
    """A rollout log of A and B over four steps."""
    return online("grpo").root


@pytest.fixture(scope="session")
def stored_recipe(content):
    """The recipe of receiver A against a peer B; keyword arguments replace sections or the peer's settings."""

    def make(log, method="graft", steps=STEPS, peer=None, **sections):
        recipe = content(method, steps=steps, **{"task": COIN, **sections})
        recipe["models"] = {"A": recipe["models"]["A"]}
        recipe["peers"] = {"B": {"log": str(log), "model": "B", **(peer or {})}}
        return parse_recipe(recipe, "test")

    return make


@pytest.fixture
def edited_log(log, tmp_path):
    """A copy of the log with columns replaced, in the steps given (all without)."""

    def edit(*columns, steps=range(1, STEPS + 1), rows=None):
        root = tmp_path / "edited"
        root.mkdir()
        for step in steps:
            file = log / "rollouts" / f"step-{step:06d}.parquet"
            metadata = {"graftrl": pl.read_parquet_metadata(file)["graftrl"]}
            frame = pl.read_parquet(file).with_columns(*columns)
            (frame if rows is None else frame.filter(rows)).write_parquet(root / file.name, metadata=metadata)
        return root

    return edit


# The same groups give the same training -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [{"name": "graft-no-floor", "balanced": False}, "sgt", "hacpo", "luffy", "scion"],
    ids=["graft", "sgt", "hacpo", "luffy", "scion"],
)
def test_a_receiver_against_the_log_of_its_own_co_training_repeats_it_to_the_bit(
    online, stored_recipe, new_run, method
):
    together = online(method)
    alone = run_recipe(stored_recipe(together.root, method), new_run)
    assert same_weights(weights(together, "A"), weights(alone, "A"))
    mine, theirs = exchanged(alone), exchanged(together, receiver="A")
    assert len(mine) > 0 and mine.equals(theirs)
    for one, other in zip(alone.read_metrics(), together.read_metrics(), strict=True):
        assert one["models"]["A"] == other["models"]["A"]
        assert one["exchange"] == {"B->A": other["exchange"]["B->A"]}
        assert one["complementarity"] == {"B->A": other["complementarity"]["B->A"]}
        assert one["peers"]["B"] == {
            "groups": 8, "missing": 0, "responses": 32, "contradicted": 0,
            "reward_mean": pytest.approx(other["models"]["B"]["reward_mean"]),
        }  # fmt: skip


def test_one_receiver_keeps_all_candidates_although_the_recipe_balances(log, stored_recipe, new_run):
    balanced = run_recipe(stored_recipe(log, "graft-no-floor"), new_run)
    counts = [line["exchange"]["B->A"] for line in balanced.read_metrics()]
    assert sum(of["selected"] for of in counts) == sum(of["candidates"] for of in counts) > 0


def test_the_peer_is_neither_loaded_nor_written_again(log, stored_recipe, new_run):
    run = run_recipe(stored_recipe(log), new_run)
    assert set(RolloutLog(run.root).models) == {"A"}
    assert not list(run.checkpoints.glob("*/B"))
    moved = exchanged(run)
    texts = pl.read_parquet(log / "rollouts" / "step-000001.parquet").filter(model="B")
    found = moved.filter(step=1).join(texts, on=["prompt_id", "response_index"], how="inner")
    assert len(found) == len(moved.filter(step=1)) > 0 and (found["reward"] == found["reward_right"]).all()


def test_the_receivers_own_ids_are_reused_where_the_tokenizer_is_the_same(log, stored_recipe, new_run, monkeypatch):
    seen = {}

    def watch(self, groups, context):
        seen.update(stored=context.stored, codec=context.codecs["A"].fingerprint, rows=original(self, groups, context))
        return seen["rows"]

    from graftrl.methods.graft import GRAFT

    original = GRAFT.exchange
    monkeypatch.setattr(GRAFT, "exchange", watch)
    run_recipe(stored_recipe(log, "graft-no-floor", steps=1, seed=6, peer={"model": "A", "match": "prompt"}), new_run)
    assert seen["stored"] == {"B": seen["codec"]}  # A's log, under the peer's name
    rows = [row for row in seen["rows"].rows["A"] if row.kind == "grafted"]
    recorded = {
        tuple(response.token_ids.tolist())
        for group in RolloutLog(log).groups("A", all_keys(log, "A")).values()
        for response in group.responses
    }
    assert rows and all(tuple(row.response_token_ids.tolist()) in recorded for row in rows)


def all_keys(log, model):
    return [(step, prompt_id) for step, prompt_id, _, _ in RolloutLog(log).group_index(model).iter_rows()]


# Resuming -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choose", ["newest", "random", "most_compatible"])
def test_a_resumed_run_gives_the_numbers_of_an_uninterrupted_one(log, stored_recipe, new_run, tmp_path, choose):
    recipe = stored_recipe(log, "graft-no-floor", seed=9, peer={"match": "prompt", "choose": choose})
    whole = run_recipe(recipe, tmp_path / "whole")
    run = RunFolder.create(new_run, recipe)

    class StopAfterTwo(Silent):
        def step(self, metrics):
            if metrics["step"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, recipe, StopAfterTwo())
    train(RunFolder.open(new_run), run.recipe(), Silent())
    assert same_weights(weights(run, "A"), weights(whole, "A"))
    assert exchanged(run).equals(exchanged(whole)) and len(exchanged(whole))
    assert [line["peers"] for line in run.read_metrics()] == [line["peers"] for line in whole.read_metrics()]


# Which group of the log -----------------------------------------------------------------------------------------------


class Peeking:
    """A step's context for a peer alone: the codecs of A and a score that depends on the response."""

    def __init__(self, codecs, score=None):
        self.scored = []

        def remember(model, rows):
            self.scored += rows
            return [np.full(len(row.response_token_ids), score(row), np.float32) for row in rows]

        self.context = StepContext(
            step=1, seed=7, group_size=4, max_response_tokens=64, codecs=codecs, score=remember, receivers=("A",),
            stored={"B": ""},
        )  # fmt: skip


@pytest.fixture(scope="session")
def codecs(stored_recipe, log):
    return loop.prepare(stored_recipe(log)).engine.codecs


@pytest.fixture
def repeated(log):
    """(step, prompt id) of the prompts that the log has twice: step 4 repeats those of earlier steps."""
    steps = {}
    for step, prompt_id in all_keys(log, "B"):
        steps.setdefault(prompt_id, []).append(step)
    return {q: of for q, of in steps.items() if len(of) == 2}


def own_failures(log, prompt_ids):
    recorded = {q: group for (_, q), group in RolloutLog(log).groups("B", all_keys(log, "B")).items()}
    return {
        "A": [
            Group("A", recorded[q].prompt, [dataclasses.replace(recorded[q].responses[0], reward=0.0)] * 4)
            for q in prompt_ids
        ]
    }


def open_peer(log, seed=5, **settings):
    return StoredPeer("B", PeerSettings(log=log, model="B", **settings), seed)


def test_the_newest_group_of_a_prompt_is_the_one_of_the_largest_step(log, codecs, repeated):
    peer = open_peer(log, match="prompt")
    groups = peer.groups(own_failures(log, repeated), build_method("graft"), Peeking(codecs).context)
    assert {group.prompt.id: group.log_step for group in groups} == {q: max(of) for q, of in repeated.items()}
    assert {group.model for group in groups} == {"B"}


def test_a_random_group_depends_on_seed_and_step_and_nothing_else(log, codecs, repeated):
    def drawn(seed, step, prompt_ids):
        context = dataclasses.replace(Peeking(codecs).context, step=step)
        peer = open_peer(log, seed=seed, match="prompt", choose="random")
        groups = peer.groups(own_failures(log, prompt_ids), build_method("graft"), context)
        return {group.prompt.id: group.log_step for group in groups}

    whole = [drawn(5, step, repeated) for step in range(1, 9)]
    assert whole[2] == drawn(5, 3, repeated) and whole != [drawn(6, step, repeated) for step in range(1, 9)]
    part = list(repeated)[::2]
    assert {q: step for q, step in whole[2].items() if q in part} == drawn(5, 3, part)
    newest = sum(step == max(repeated[q]) for of in whole for q, step in of.items())
    assert 0.25 < newest / (8 * len(repeated)) < 0.75


def test_the_most_compatible_group_is_the_one_the_receiver_finds_likeliest(log, codecs, repeated):
    groups = RolloutLog(log).groups("B", [(step, q) for q, of in repeated.items() for step in of])
    mixed = {key: group for key, group in groups.items() if 1 <= group.successes < 4}
    asked = [q for q, of in repeated.items() if all((step, q) in mixed for step in of)]
    assert asked, "the log has no prompt with two mixed groups"
    peeking = Peeking(codecs, score=lambda row: -0.1 * len(row.response_token_ids))
    peer = open_peer(log, match="prompt", choose="most_compatible")
    chosen = peer.groups(own_failures(log, asked), build_method("graft"), peeking.context)

    def mean_score(group):
        total = 0.0
        for response in group.responses:
            ids = codecs["A"].tokenizer.encode(response.text, add_special_tokens=False)
            source = response.logprobs[:-1] if response.finish_reason == "stop" else response.logprobs
            if len(source) and "\ufffd" not in response.text:
                length = len(ids) + (response.finish_reason == "stop")
                total += np.exp(-0.1 * length - source.astype(np.float64).mean())
        return total / group.size

    for group in chosen:
        scores = {step: mean_score(groups[step, group.prompt.id]) for step in repeated[group.prompt.id]}
        assert group.log_step == max(scores, key=scores.get)
    assert {row.prompt_id for row in peeking.scored} == set(asked)


def test_nothing_is_scored_where_no_transfer_is_possible(log, codecs, repeated):
    own = own_failures(log, repeated)
    own["A"] = [
        dataclasses.replace(group, responses=[dataclasses.replace(group.responses[0], reward=1.0)] * 4)
        for group in own["A"]
    ]
    peeking = Peeking(codecs, score=lambda row: 0.0)
    peer = open_peer(log, match="prompt", choose="most_compatible")
    chosen = peer.groups(own, build_method("graft"), peeking.context)
    assert not peeking.scored and {group.log_step for group in chosen} == {STEPS}


def test_a_score_is_remembered_for_the_step():
    asked = []

    def score(model, rows):
        asked.append([row.prompt_id for row in rows])
        return [np.full(len(row.response_token_ids), -len(row.prompt_id), np.float32) for row in rows]

    from graftrl.rollout import Row

    def row(prompt_id, *ids):
        return Row(prompt_id, np.array([1]), np.array(ids), 0.0, "grafted", "B")

    remembered = Remembered(score)
    first = remembered("A", [row("q", 1, 2), row("qq", 1, 2)])
    again = remembered("A", [row("qq", 1, 2), row("qqq", 1), row("q", 1, 2)])
    assert asked == [["q", "qq"], ["qqq"]]
    assert [x.tolist() for x in first] == [[-1, -1], [-2, -2]]
    assert [x.tolist() for x in again] == [[-2, -2], [-3], [-1, -1]]


def test_transfers_name_the_step_of_the_log(log, stored_recipe, new_run):
    run = run_recipe(stored_recipe(log, "graft-no-floor", seed=9, peer={"match": "prompt"}), new_run)
    moved = exchanged(run)
    texts = pl.concat([pl.read_parquet(file) for file in sorted((log / "rollouts").glob("*.parquet"))])
    keys = ["source_step", "source", "prompt_id", "response_index"]
    found = moved.join(texts.rename({"step": "source_step", "model": "source"}), on=keys, how="inner")
    assert len(found) == len(moved) > 0
    assert (moved["source_step"] != moved["step"]).any()


def test_several_logs_are_one_peer(log, stored_recipe, edited_log, new_run):
    parts = [str(edited_log(steps=[1])), str(log / "rollouts" / "step-000002.parquet")]
    run = run_recipe(stored_recipe(log, peer={"log": parts}), new_run)
    assert [line["peers"]["B"]["groups"] for line in run.read_metrics()] == [8, 8, 0, 0]


# Several peers and mixtures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["graft-no-floor", "sgt", "hacpo", "luffy", "scion"])
def test_three_models_train_together(make_recipe, content, third, new_run, method):
    models = {**content()["models"], "C": third}
    run = run_recipe(make_recipe(method, steps=3, task=COIN, models=models), new_run)
    pairs = {f"{source}->{receiver}" for source in "ABC" for receiver in "ABC" if source != receiver}
    for line in run.read_metrics():
        assert set(line["exchange"]) == pairs == set(line["complementarity"])
        assert line["peers"] == {}
    moved = exchanged(run, status="admitted")
    assert set(moved["receiver"]) == set("ABC") and (moved["receiver"] != moved["source"]).all()


@pytest.mark.parametrize("method", ["graft-no-floor", "sgt", "hacpo", "luffy", "scion"])
def test_a_live_and_a_stored_peer_teach_together(make_recipe, content, third, log, new_run, method):
    models = {"A": content()["models"]["A"], "C": third}
    peers = {"B": {"log": str(log), "model": "B"}}
    run = run_recipe(make_recipe(method, steps=3, task=COIN, models=models, peers=peers), new_run)
    for line in run.read_metrics():
        assert set(line["models"]) == {"A", "C"}
        assert set(line["exchange"]) == {"B->A", "B->C", "A->C", "C->A"} == set(line["complementarity"])
    moved = exchanged(run)
    assert set(moved["receiver"]) == {"A", "C"} and "B" in set(moved["source"])


def test_grpo_reads_a_peer_for_its_diagnostics_alone(log, online, stored_recipe, new_run):
    run = run_recipe(stored_recipe(log, "grpo"), new_run)
    assert same_weights(weights(run, "A"), weights(online("grpo"), "A"))
    line = run.read_metrics()[0]
    assert line["exchange"] == {} and set(line["complementarity"]) == {"B->A"}


def test_stored_groups_may_be_of_another_size(log, stored_recipe, new_run):
    training = {"steps": STEPS, "prompts_per_step": 8, "group_size": 6, "minibatch_prompts": 4}
    run = run_recipe(stored_recipe(log, "graft-no-floor", training=training), new_run)
    stats = [line["exchange"]["B->A"] for line in run.read_metrics()]
    assert sum(of["responses"] for of in stats) == 4 * sum(of["selected"] for of in stats) > 0
    moved = exchanged(run).group_by("step", "prompt_id").agg(k=pl.col("reward").sum())
    assert moved["k"].is_between(1, 3).all()


def test_the_capability_of_a_stored_peer_is_the_mean_of_its_steps(log, stored_recipe, new_run):
    run = run_recipe(stored_recipe(log, "hacpo"), new_run)
    rewards = RolloutLog(log)
    means = []
    for step in range(1, STEPS + 1):
        groups = rewards.groups("B", [key for key in all_keys(log, "B") if key[0] == step])
        means.append(np.mean([group.rewards for group in groups.values()]))
    state = json.loads((run.latest_checkpoint() / "state.json").read_text())
    np.testing.assert_allclose(state["mean_rewards"]["B"], means)
    own = state["mean_rewards"]["A"]
    for step in range(1, STEPS + 1):
        omega = np.clip(np.mean(means[:step]) / np.mean(own[:step]), 0.1, 10)
        np.testing.assert_allclose(exchanged(run, step=step, status="admitted")["weight"], omega)


# Rewards --------------------------------------------------------------------------------------------------------------


def test_recorded_rewards_are_verified_again_and_contradictions_counted(edited_log, stored_recipe, new_run):
    flipped = pl.when(pl.col("response_index") == 0).then(1 - pl.col("reward")).otherwise("reward").alias("reward")
    log = edited_log(flipped, steps=[1, 2])
    seen = []

    class Notes(Silent):
        def step(self, metrics):
            seen.append(metrics["notes"])

    run = run_recipe(stored_recipe(log, "graft-no-floor"), new_run, Notes())
    assert [line["peers"]["B"]["contradicted"] for line in run.read_metrics()] == [8, 8, 0, 0]
    assert any("contradicts" in note for note in seen[0]) and not any("contradicts" in note for note in seen[3])
    recorded = pl.concat([pl.read_parquet(file) for file in sorted(log.glob("*.parquet"))])
    both = exchanged(run).join(recorded, on=["step", "prompt_id", "response_index"]).filter(model="B")
    wrong = both.filter(pl.col("reward") != pl.col("reward_right"))
    assert len(wrong) > 0 and set(wrong["response_index"]) == {0}  # the verifier's verdict counts


# Bad input ------------------------------------------------------------------------------------------------------------


def refusal(recipe, error=DataError):
    with pytest.raises(error) as caught:
        loop.prepare(recipe)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_log_that_does_not_exist_or_is_torn_or_empty_is_named(log, stored_recipe, edited_log, tmp_path):
    assert "nowhere: no such file" in refusal(stored_recipe(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert "no Parquet file" in refusal(stored_recipe(tmp_path / "empty"))
    torn = edited_log()
    file = torn / "step-000002.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    assert "step-000002.parquet: torn" in refusal(stored_recipe(torn))


def test_a_log_without_rows_is_refused(edited_log, stored_recipe):
    assert "empty" in refusal(stored_recipe(edited_log(rows=pl.lit(False))))


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pl.lit(0.6).alias("temperature"), "temperature 0.6, top_p 1, top_k 0"),
        (pl.lit(0.9).alias("top_p"), "top_p 0.9"),
        (pl.lit(50, pl.Int32).alias("top_k"), "top_k 50"),
        (pl.lit(None, pl.Float64).alias("temperature"), "temperature unknown"),
    ],
)
def test_sampling_that_would_bias_scores_is_refused(edited_log, stored_recipe, column, said):
    message = refusal(stored_recipe(edited_log(column)))
    assert said in message and "biased" in message and message.startswith("peers.B:")


def test_missing_logprobs_are_found_before_training(edited_log, stored_recipe):
    log = edited_log(pl.lit(None, pl.List(pl.Float32)).alias("logprobs"))
    assert "graftrl logs score" in refusal(stored_recipe(log))


def test_missing_logprobs_in_a_later_step_lose_nothing_and_the_run_goes_on_with_a_mended_log(
    edited_log, log, stored_recipe, new_run
):
    broken = edited_log()
    step = broken / "step-000002.parquet"
    metadata = {"graftrl": pl.read_parquet_metadata(step)["graftrl"]}
    pl.read_parquet(step).with_columns(pl.lit(None, pl.List(pl.Float32)).alias("logprobs")).write_parquet(
        step, metadata=metadata
    )
    recipe = stored_recipe(broken)
    run = RunFolder.create(new_run, recipe)
    with pytest.raises(DataError, match=r"step-000002\.parquet, row .* `graftrl logs score`"):
        train(run, recipe, Silent())
    step.write_bytes((log / "rollouts" / step.name).read_bytes())
    assert train(run, recipe, Silent()).step == STEPS


def test_a_log_of_several_models_needs_a_name(log, stored_recipe):
    recipe = stored_recipe(log, peer={"model": None})
    assert refusal(recipe, ConfigError).startswith("peers.B.model is missing")
    assert "A, B" in refusal(recipe, ConfigError)
    assert "no responses of a model 'Z'; the log has: A, B" in refusal(stored_recipe(log, peer={"model": "Z"}))


def test_the_only_model_of_a_log_needs_no_name(edited_log, stored_recipe):
    log = edited_log(rows=pl.col("model") == "B")
    peers = loop.prepare(stored_recipe(log, peer={"model": None})).peers
    assert [peer.models for peer in peers] == [["B"]]


def test_no_prompt_in_common_is_refused(stored_recipe, edited_log):
    other = edited_log(pl.format("other-{}", "prompt_id").alias("prompt_id"))
    assert "another task" in refusal(stored_recipe(other))
    assert "another task" in refusal(stored_recipe(other, peer={"match": "prompt"}))


def test_the_same_prompts_in_other_steps_are_refused_with_the_way_out(edited_log, stored_recipe):
    later = edited_log((pl.col("step") + 100).cast(pl.Int32).alias("step"))
    message = refusal(stored_recipe(later))
    assert "32 of 32 are in the log in other steps" in message and "peers.B.match=prompt" in message
    assert not loop.prepare(stored_recipe(later, peer={"match": "prompt"})).peers[0].notes


def test_a_log_that_covers_a_part_of_the_run_is_said_with_counts(log, stored_recipe):
    notes = loop.prepare(stored_recipe(log, steps=6)).notes
    (note,) = [note for note in notes if note.startswith("peer B")]
    assert "32 of 48 prompts" in note and "4 of 6 steps" in note and "it has 48 (match: prompt)" in note


def test_prompts_of_the_same_ids_from_another_task_are_refused(edited_log, stored_recipe):
    log = edited_log((pl.lit("not ") + pl.col("reference")).alias("reference"))
    assert "another reference answer" in refusal(stored_recipe(log))


def test_other_wording_of_the_same_problems_is_said(edited_log, stored_recipe):
    worded = pl.col("messages").list.eval(
        pl.element().struct.with_fields((pl.lit("Q: ") + pl.field("content")).alias("content"))
    )
    notes = loop.prepare(stored_recipe(edited_log(worded))).notes
    assert any("8 of 8 prompts that were compared are worded otherwise" in note for note in notes)


def test_a_log_with_ids_of_two_tokenizers_is_encoded_from_its_text(edited_log, stored_recipe):
    mixed = pl.when(pl.col("step") == 1).then(pl.lit("other")).otherwise("tokenizer_fingerprint")
    prepared = loop.prepare(stored_recipe(edited_log(mixed.alias("tokenizer_fingerprint"))))
    assert prepared.peers[0].fingerprint == "" and any("several tokenizers" in note for note in prepared.notes)


def test_dry_run_checks_the_log_and_describes_it(log, stored_recipe, edited_log, capsys):
    print_dry_run(stored_recipe(log))
    assert f"stored peer B: B of {log}, 32 groups of 4 responses in 4 steps" in capsys.readouterr().out
    with pytest.raises(DataError, match="biased"):
        print_dry_run(stored_recipe(edited_log(pl.lit(0.5).alias("temperature"))))


class GivesRowsToEveryone(GRPO):
    settings_type = GRPOSettings

    def exchange(self, groups, context):
        return Exchange({model: [] for model in groups})


def test_a_method_that_wants_to_train_a_stored_peer_is_refused(log, stored_recipe, new_run, monkeypatch):
    recipe = stored_recipe(log, "grpo", steps=1)
    monkeypatch.setattr(type(recipe), "build_method", lambda self: GivesRowsToEveryone(GRPOSettings()))
    with pytest.raises(ConfigError, match=r"context\.receivers"):
        run_recipe(recipe, new_run)

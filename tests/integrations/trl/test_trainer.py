"""GraftTrainer against graftrl's own trainer on the same rollouts, and what it does inside TRL's loop."""

import numpy as np
import polars as pl
import pytest
import torch
from datasets import Dataset
from trl_scripts import RIGHT, TEXTS, N, load, prompt, says, verify, words

from graftrl.errors import ConfigError, DataError
from graftrl.integrations.trl import GraftConfig, GraftTrainer
from graftrl.integrations.trl import trainer as trainer_module
from graftrl.logs.reader import RolloutLog
from graftrl.methods import StepContext, build_method
from graftrl.policies.config import ModelSettings, SamplingSettings
from graftrl.policies.hf import HFPolicy, UpdateStats
from graftrl.rollout import Row
from graftrl.seeds import derive_seed, generator

pytestmark = pytest.mark.filterwarnings("ignore:peer B")

OWN = [words(0, 0), words(1, 2), words(2, 0), words(3, 4)]  # 0 and 2 fail entirely
PEER = [words(0, 1)[::-1], words(2, 3), words(1, 2)]  # mixed on 0 and 2; on 1 the receiver needs no help
GRAFT = {"name": "graft", "threshold": 0.8}
SEED = 42  # TRL's default


@pytest.fixture
def policy(pair):
    return HFPolicy("A", ModelSettings(path=pair["A"], device="cpu", bos="keep"), SamplingSettings())


@pytest.fixture
def peer_groups(group, policy):
    """B's groups, with log-probabilities that put scores on both sides of the gate: s = 1.1, 0.95, 0.7, 0.85."""
    groups = [group("B", index, texts) for index, texts in zip((0, 2, 1), PEER, strict=True)]
    for of_prompt in groups:
        for response, s in zip(of_prompt.responses, (1.1, 0.95, 0.7, 0.85), strict=True):
            ids = policy.codec.tokenizer.encode(response.text, add_special_tokens=False)
            row = Row("x", policy.codec.prompt_token_ids(of_prompt.prompt), np.array(ids), 0.0, "own", "A")
            response.logprobs[:] = policy.score([row])[0].mean() - np.log(s)
    return groups


def grpo_trains(trainer, texts=OWN):
    """The microbatches that the trainer makes of one generation batch with these completions."""
    says(trainer, texts)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer._graft([{"prompt": text} for text in TEXTS for _ in range(N)])


def gradients(trainer):
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def step_gradient(trainer, microbatches):
    """Loss and gradient of one optimizer step, accumulated over its microbatches as TRL's loop does."""
    trainer.model.zero_grad()
    total = 0.0
    for inputs in microbatches:
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        total += float(loss.detach())
    return total, gradients(trainer)


def reference(policy, method, groups):
    """graftrl's own rows in minibatches of two prompts; every own row's old log-probabilities by a scoring pass."""
    context = StepContext(
        step=1,
        seed=derive_seed(SEED, "exchange", 1),
        group_size=N,
        max_response_tokens=30,
        codecs={"A": policy.codec},
        score=lambda model, rows: policy.score(rows),
        receivers=("A",),
        stored={"B": "another"},
    )
    exchange = method.exchange(groups, context)
    rows = exchange.rows["A"]
    for row, logprobs in zip(rows, policy.score(rows), strict=True):
        if row.kind == "own":
            row.old_logprobs = logprobs
    return exchange, method.order(rows, 2, generator(SEED, "order", 1, "A", 0))


def assert_same_gradients(ours, theirs):
    size = torch.stack([g.norm() for g in ours.values()]).norm()
    difference = torch.stack([(ours[name] - theirs[name]).norm() for name in ours]).norm()
    assert size > 1e-4  # there is something to compare
    assert difference <= 2e-5 * size


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({}, GRAFT),
        ({"graft_method": "graft-no-floor"}, {"name": "graft-no-floor"}),
        ({"graft_method": "graft-pooled"}, {"name": "graft-pooled"}),
        ({"graft_method": "graft-success-only"}, {"name": "graft-success-only"}),
        ({"graft_options": {"peer_position": "first"}}, {**GRAFT, "peer_position": "first"}),
        ({"scale_rewards": "none", "epsilon_high": 0.1}, {**GRAFT, "normalize_std": False, "clip_high": 0.1}),
        ({"delta": 1.4}, {**GRAFT, "dual_clip": 1.4}),
        (
            {"importance_sampling_level": "sequence", "epsilon": 0.4, "epsilon_high": 0.4},
            {**GRAFT, "ratio": "sequence", "clip_low": 0.4, "clip_high": 0.4},
        ),
    ],
    ids=["graft", "no floor", "pooled", "success only", "peer first", "no std", "two-sided clip", "sequence ratio"],
)
def test_loss_and_gradient_are_those_of_graftrls_trainer(
    make_trainer, write_log, policy, group, peer_groups, config, settings
):
    trainer = make_trainer(peers={"B": {"log": write_log({1: peer_groups})}}, config=config, name="A")
    microbatches = grpo_trains(trainer)
    method = build_method(settings)
    groups = {"A": [group("A", index, texts) for index, texts in enumerate(OWN)], "B": peer_groups}
    exchange, minibatches = reference(policy, method, groups)
    admitted = [t for t in exchange.transfers if t.status == "admitted"]
    assert len(admitted) > 0 and any(t.weight < 1 for t in admitted)
    assert len(minibatches) == 2
    for step, minibatch in enumerate(minibatches):
        loss, theirs = step_gradient(trainer, microbatches[2 * step : 2 * step + 2])
        ours = policy._accumulate(minibatch, method.objective(step), UpdateStats())
        assert loss == pytest.approx(ours, rel=2e-5, abs=1e-6)
        of_policy = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in policy.loaded.causal_lm.named_parameters()
        }
        assert_same_gradients(of_policy, theirs)
        # Both take the same step, so that ratios of the next minibatch differ from 1 and some are clipped.
        with torch.no_grad():
            for (name, p), (_, q) in zip(
                trainer.model.named_parameters(), policy.loaded.causal_lm.named_parameters(), strict=True
            ):
                p -= 2.0 * of_policy[name]
                q -= 2.0 * of_policy[name]
    if not config:
        last = microbatches[2]
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([last["prompt_ids"], last["completion_ids"]], dim=1),
            torch.cat([last["prompt_mask"], last["completion_mask"]], dim=1),
            last["completion_ids"].shape[1],
        )
        moved = (logps - last["old_per_token_logps"]).abs() * last["completion_mask"]
        assert moved.max() > 0.25  # beyond the clip range


def test_old_logprobs_of_grafted_rows_are_those_of_the_pass_that_scored_them(make_trainer, write_log, peer_groups):
    trainer = make_trainer(peers={"B": {"log": write_log({1: peer_groups})}}, name="A")
    seen = {}
    original = trainer.method.exchange

    def exchange(groups, context):
        found = original(groups, context)
        seen.update({row.response_token_ids.tobytes(): row for row in found.rows["A"] if row.kind == "grafted"})
        return found

    trainer.method.exchange = exchange
    grafted = 0
    for inputs in grpo_trains(trainer):
        for i, kind in enumerate(inputs["graft_kinds"]):
            length = int(inputs["completion_mask"][i].sum())
            row = seen.get(inputs["completion_ids"][i, :length].numpy().astype(np.int64).tobytes())
            if kind == "grafted":
                grafted += 1
                np.testing.assert_array_equal(inputs["old_per_token_logps"][i, :length], row.old_logprobs)
                assert row.old_logprobs.dtype == np.float32
                assert inputs["advantages"][i] == pytest.approx(row.advantages * row.weight, rel=1e-6)
    assert grafted == len(seen) > 0


def test_peer_groups_stand_last_and_only_admitted_rows_count(make_trainer, write_log, peer_groups):
    trainer = make_trainer(peers={"B": {"log": write_log({1: peer_groups})}}, name="A")
    microbatches = grpo_trains(trainer)
    kinds = [kind for inputs in microbatches for kind in inputs["graft_kinds"]]
    assert kinds == ["own"] * 8 + ["grafted"] * 6  # two of eight peer responses score below the gate
    own_tokens = sum(int(inputs["completion_mask"].sum()) for inputs in microbatches[:2])
    grafted_tokens = sum(int(inputs["completion_mask"].sum()) for inputs in microbatches[2:])
    assert [float(inputs["num_items_in_batch"]) for inputs in microbatches] == [
        2 * own_tokens, 2 * own_tokens, 2 * grafted_tokens, 2 * grafted_tokens,
    ]  # fmt: skip


def test_a_group_that_is_gated_out_leaves_an_optimizer_step_that_changes_nothing(make_trainer, write_log, group):
    """Both failed groups vanish: the second optimizer step of the generation has no row at all."""
    unlikely = [group("B", index, texts, logprobs=-0.01) for index, texts in zip((0, 2), PEER[:2], strict=True)]
    trainer = make_trainer(
        peers={"B": {"log": write_log({1: unlikely})}}, config={"weight_decay": 0.1, "max_steps": 2}, name="A"
    )
    says(trainer, OWN)
    weights = []
    original = trainer.training_step

    def training_step(*arguments):
        weights.append([p.detach().clone() for p in trainer.model.parameters()])
        return original(*arguments)

    trainer.training_step = training_step
    trainer.train()
    weights.append([p.detach() for p in trainer.model.parameters()])
    assert [len(inputs["completion_ids"]) for inputs in trainer._buffered_inputs] == [4, 4, 0, 0]
    before, after_first, after_second = weights[0], weights[2], weights[4]
    assert any(not torch.equal(p, q) for p, q in zip(before, after_first, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(after_first, after_second, strict=True))
    assert trainer.state.global_step == 2


def test_without_peers_it_trains_like_trl(pair, arguments, make_trainer):
    """One optimizer step on the same completions: TRL's own GRPO, up to the epsilon of the standard deviation."""
    from trl import GRPOConfig, GRPOTrainer

    aligned = {"steps_per_generation": 2, "per_device_train_batch_size": 8, "max_steps": 1}
    ours = make_trainer(config={**aligned, "epsilon_high": None})
    theirs = GRPOTrainer(
        reward_funcs=verify,
        args=GRPOConfig(**arguments(**aligned)),
        train_dataset=Dataset.from_dict({"prompt": TEXTS}),
        **load(pair["A"]),
    )
    found = []
    for trainer in (ours, theirs):
        says(trainer, OWN)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 2
        batch = [{"prompt": text} for text in TEXTS for _ in range(N)]
        trainer.model.zero_grad()
        for microstep in range(2):
            trainer._step = microstep
            trainer._compute_loss(trainer.model, trainer._prepare_inputs(batch)).backward()
        found.append(gradients(trainer))
    size = torch.stack([g.norm() for g in found[1].values()]).norm()
    difference = torch.stack([(found[0][name] - found[1][name]).norm() for name in found[0]]).norm()
    assert 0 < difference <= 1e-3 * size


def test_positions_are_counted_without_the_padding_so_learned_ones_are_right(make_trainer, pair, group):
    """GPT-2: a row's log-probabilities do not depend on the rows that it is padded with."""
    from graftrl.integrations.trl.batch import row_of, score_rows

    trainer = make_trainer(model="B", name="B")
    grpo_trains(trainer, [words(i, 1) for i in range(4)])
    policy = HFPolicy("B", ModelSettings(path=pair["B"], device="cpu", bos="keep"), SamplingSettings())
    rows = [row_of(g, r, trainer._codec) for g in (group("B", i, words(i, 1)) for i in (3, 0)) for r in g.responses]
    for ours, theirs in zip(score_rows(trainer, rows), policy.score(rows), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_trains_to_the_end_with_metrics_a_log_and_what_became_of_every_response(
    make_trainer, write_log, peer_groups, tmp_path
):
    trainer = make_trainer(
        peers={"B": {"log": write_log({1: peer_groups}), "match": "prompt"}},
        config={
            "max_steps": 4,
            "graft_log_dir": str(tmp_path / "run"),
            "logging_steps": 1,
            "logging_strategy": "steps",
        },
        name="A",
    )
    says(trainer, OWN)
    trainer.train()
    logged = {key: value for line in trainer.state.log_history for key, value in line.items()}
    assert logged["graft/B/selected"] == 2 and logged["graft/B/candidates"] == 2
    assert logged["graft/peers/B/missing"] == 1 and logged["graft/peers/B/contradicted"] == 0
    assert {"graft/clip_ratio/own", "graft/clip_ratio/grafted", "graft/B/score_mean"} <= logged.keys()
    log = RolloutLog(tmp_path / "run")
    assert log.models == ("A",) and log.steps("A") == [1, 2]
    groups = log.groups("A", log.group_index("A").select("step", "prompt_id").rows())
    assert [g.successes for g in groups.values() if g.prompt.id == prompt(1).id] == [2, 2]
    exchange = pl.read_parquet(tmp_path / "run" / "exchange" / "*.parquet")
    assert exchange.filter(step=1)["status"].to_list().count("admitted") == 6
    assert set(exchange["source_step"]) == {1} and set(exchange["receiver"]) == {"A"}


def test_lora_checkpointing_bfloat16_evaluation_and_streams_work_as_in_trl(make_trainer, write_log, peer_groups, pair):
    """TRL's defaults that the other tests switch off: gradient checkpointing and bfloat16."""
    from peft import LoraConfig

    data = Dataset.from_dict({"prompt": TEXTS})
    trainer = make_trainer(
        peers={"B": {"log": write_log({1: peer_groups}), "match": "prompt"}},
        data=data.to_iterable_dataset(),
        config={
            "bf16": True, "gradient_checkpointing": True, "graft_method": "graft-no-gate", "max_steps": 2,
            "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4,
        },
        eval_dataset=data,
        peft_config=LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj"]),
    )  # fmt: skip
    says(trainer, OWN)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("lora_" in name for name in changed)
    kinds = [kind for inputs in trainer._buffered_inputs for kind in inputs["graft_kinds"]]
    assert kinds.count("grafted") == 2 * N
    assert any("eval_loss" in line for line in trainer.state.log_history)


def test_dropout_is_off_so_that_ratios_begin_at_1(pair, arguments):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair["B"], dtype=torch.float32, attn_pdrop=0.5, resid_pdrop=0.5)
    pieces = {**load(pair["B"]), "model": model}
    trainer = GraftTrainer(
        reward_funcs=verify,
        args=GraftConfig(**arguments()),
        train_dataset=Dataset.from_dict({"prompt": TEXTS}),
        **pieces,
    )
    for inputs in grpo_trains(trainer, [words(i, 1) for i in range(4)])[:2]:
        trainer._compute_loss(trainer.model, inputs)
    assert trainer._metrics["train"]["graft/clip_ratio/own"] == [0.0, 0.0]


def test_its_arguments_come_from_a_command_line_too(tmp_path):
    from transformers import HfArgumentParser

    flags = ["--output_dir", str(tmp_path), "--graft_options", '{"threshold": 0.7}', "--bf16", "False"]
    (config,) = HfArgumentParser(GraftConfig).parse_args_into_dataclasses(flags)
    assert config.graft_options == {"threshold": 0.7} and config.epsilon_high == 0.28
    assert trainer_module._method_of(config).settings.threshold == 0.7


def test_a_log_is_never_written_over_by_a_new_run(make_trainer, tmp_path):
    from graftrl.errors import RunError

    config = {"graft_log_dir": str(tmp_path / "run"), "max_steps": 2}
    first = make_trainer(config=config)
    says(first, OWN)
    first.train()
    second = make_trainer(config=config)
    with pytest.raises(RunError, match="holds a rollout log already"):
        second.train()


def test_the_peers_rewards_are_verified_anew_and_what_they_log_is_not_counted(make_trainer, write_log, peer_groups):
    """The log says that its responses to prompt 0 are all wrong; this script's reward function finds one right."""
    for response in peer_groups[0].responses:
        response.reward = 0.0

    def logging_verify(completions, log_extra, log_metric, **_):
        rewards = verify(completions)
        log_extra("said", list(completions))
        log_metric("right", sum(rewards))
        return rewards

    trainer = make_trainer(peers={"B": {"log": write_log({1: peer_groups})}}, reward_funcs=logging_verify, name="A")
    microbatches = grpo_trains(trainer)
    assert trainer._metrics["train"]["graft/peers/B/contradicted"] == [1]
    assert [kind for inputs in microbatches for kind in inputs["graft_kinds"]].count("grafted") == 6
    assert len(trainer._logs["extra"]["said"]) == len(trainer._logs["prompt"]) == 16
    assert not trainer._pending_extra_logs and not trainer._pending_metrics


def test_reward_functions_see_a_peers_response_as_one_of_the_models_own(make_trainer, write_log, peer_groups, group):
    seen = {}

    def keep(prompts, completions, completion_ids, **_):
        seen.update({(p, c): ids for p, c, ids in zip(prompts, completions, completion_ids, strict=True)})
        return verify(completions)

    cut = group("B", 1, words(1, 2)[:1] + ["A:1"] * 3, stopped=False)
    trainer = make_trainer(peers={"B": {"log": write_log({1: [*peer_groups[:2], cut]})}}, reward_funcs=keep)
    grpo_trains(trainer)
    encode = trainer._tokenizer.encode
    text = PEER[0][0]
    assert seen[TEXTS[0], text] == [*encode(text, add_special_tokens=False), trainer._tokenizer.eos_token_id]
    assert seen[TEXTS[1], "A:1"] == encode("A:1", add_special_tokens=False)  # cut at the limit: no EOS


def test_rewards_other_than_0_and_1_are_refused_by_the_methods_rule(make_trainer, write_log, peer_groups):
    trainer = make_trainer(
        peers={"B": {"log": write_log({1: peer_groups})}},
        reward_funcs=[verify, lambda completions, **_: [0.5] * len(completions)],
    )
    with pytest.raises(DataError, match="rewards of 0 or 1"):
        grpo_trains(trainer)


def test_a_group_with_an_ungraded_response_takes_no_part(make_trainer):
    def unsure(completions, **_):
        return [None if text == OWN[1][0] else float(RIGHT in text) for text in completions]

    trainer = make_trainer(reward_funcs=unsure)
    microbatches = grpo_trains(trainer)
    assert sum(len(inputs["completion_ids"]) for inputs in microbatches) == 12


def test_chat_prompts_are_found_again_and_graded_as_messages(make_trainer, write_log, peer_groups):
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in TEXTS]})
    trainer = make_trainer(peers={"B": {"log": write_log({1: peer_groups})}}, data=data)
    says(trainer, OWN)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    microbatches = trainer._graft([data[i] for i in range(4) for _ in range(N)])
    assert [kind for inputs in microbatches for kind in inputs["graft_kinds"]].count("grafted") == 6


def test_the_run_of_a_peer_is_planned_as_trls_sampler_draws(make_trainer, write_log, group):
    """16 prompts, shuffled: the steps that are planned are the steps that are trained, over the end of an epoch."""
    texts = [f"{'abcdefghijkl'[i % 12]}{i % 10},{i // 2}>" for i in range(16)]
    data = Dataset.from_dict({"prompt": texts, "id": [f"q{i}" for i in range(16)]})
    asked = []

    def keep(prompts, completions, id, **_):
        asked.append(list(dict.fromkeys(id)))
        return [0.0] * len(prompts)

    found = group("B", 0, words(0, 1))
    found.prompt = found.prompt.__class__("q3", found.prompt.messages, "", "t")
    trainer = make_trainer(
        data=data,
        reward_funcs=keep,
        peers={"B": {"log": write_log({1: [found]}), "match": "prompt"}},
        config={"shuffle_dataset": True, "max_steps": 12, "max_completion_length": 2},
    )
    planned = [list(ids) for ids in trainer.peers[0]._planned]
    trainer.train()
    own = [ids for ids in asked if len(ids) == 4]  # the peer's response is graded in a call of its own
    assert own == planned and len(planned) == 6


def test_a_log_of_another_data_set_is_refused_before_training(make_trainer, write_log, group):
    found = group("B", 0, words(0, 1))
    found.prompt = found.prompt.__class__("elsewhere", found.prompt.messages, "", "t")
    with pytest.raises(DataError, match="recorded on another task"):
        make_trainer(peers={"B": {"log": write_log({1: [found]}), "match": "prompt"}})


def test_two_prompts_of_one_id_are_refused(make_trainer):
    data = Dataset.from_dict({"prompt": TEXTS, "id": ["p", "q", "p", "r"]})
    with pytest.raises(DataError, match="two different prompts have the id 'p'"):
        make_trainer(data=data)


def test_wrong_arguments_are_refused_in_one_line(make_trainer, pair, arguments, write_log, peer_groups):
    def refused(match, **keywords):
        with pytest.raises(ConfigError, match=match) as caught:
            make_trainer(**keywords)
        assert "\n" not in str(caught.value)

    refused("unknown method", config={"graft_method": "grafted"})
    refused("does not replace groups", config={"graft_method": "grpo"})
    refused("does not replace groups", config={"graft_method": "sgt"})
    refused("does not replace groups", config={"graft_method": "graft-luffy-update"})
    refused("clip_high is not an option here", config={"graft_method": "graft-sequence-ratio"})
    refused("threshold: ", config={"graft_options": {"threshold": -1}})
    refused("give a mapping", config={"graft_options": "threshold"})
    refused("peers.B.log", peers={"B": {}})
    refused("has the name of a model", peers={"A": {"log": write_log({1: peer_groups})}}, name="A")
    with pytest.raises(ConfigError, match="needs a GraftConfig"):
        GraftTrainer(reward_funcs=verify, args=None, train_dataset=None, **load(pair["A"]))

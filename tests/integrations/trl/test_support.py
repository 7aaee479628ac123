"""TRL's settings under which grafted rows would be wrong are refused, each by name and with what to set instead."""

from importlib import metadata

import pytest
from trl.trainer.grpo_trainer import GRPOTrainer

from graftrl.errors import ConfigError
from graftrl.integrations.trl import GraftConfig, support


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": 0.9}, "temperature=0.9"),
        ({"top_p": 0.95}, "top_p=0.95"),
        ({"top_k": 50}, "top_k=50"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs['num_beams']"),
        ({"use_vllm": True}, "use_vllm=False"),
        ({"use_vllm": True, "vllm_mode": "server"}, "use_vllm=False"),
        ({"use_liger_kernel": True}, "use_liger_kernel=False"),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching"),
        ({"loss_type": "grpo"}, "loss_type='dapo'"),
        ({"loss_type": "cispo"}, "loss_type='dapo'"),
        ({"scale_rewards": "batch"}, "'group' or 'none'"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "sum_then_normalize"),
        ({"beta": 0.04}, "beta=0.0"),
        ({"mask_truncated_completions": True}, "mask_truncated_completions"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile"),
        ({"entropy_coef": 0.01}, "entropy_coef"),
        ({"use_adaptive_entropy": True}, "use_adaptive_entropy"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold"),
        ({"steps_per_generation": 3, "per_device_train_batch_size": 8}, "no multiple of gradient_accumulation_steps"),
        ({"per_device_train_batch_size": 3, "steps_per_generation": 4}, "no multiple of num_generations"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_each_is_refused_in_one_line(arguments, changes, words):
    config = GraftConfig(**arguments(**changes))
    with pytest.raises(ConfigError) as caught:
        support.refuse_unsupported(config, {})
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_several_processes_are_refused(arguments, monkeypatch):
    config = GraftConfig(**arguments())
    monkeypatch.setattr(GraftConfig, "world_size", 2)
    with pytest.raises(ConfigError, match="2 processes"):
        support.refuse_unsupported(config, {})


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory"])
def test_what_makes_other_responses_is_refused(arguments, name):
    with pytest.raises(ConfigError, match=name):
        support.refuse_unsupported(GraftConfig(**arguments()), {name: [print]})


def test_plain_settings_pass(arguments):
    support.refuse_unsupported(GraftConfig(**arguments(generation_kwargs={"eos_token_id": 5})), {"tools": None})


@pytest.mark.parametrize(
    ("found", "accepted"), [("1.14.1", False), ("1.14.2", True), ("1.16.3", True), ("1.17.0", False)]
)
def test_versions_whose_inner_parts_are_not_known_are_refused(monkeypatch, found, accepted):
    monkeypatch.setattr(support, "version", lambda _: found)
    if accepted:
        support.check_version()
    else:
        with pytest.raises(ConfigError, match=f"TRL {found} is installed"):
            support.check_version()


def test_a_missing_trl_says_how_to_install_it(monkeypatch):
    def missing(_):
        raise metadata.PackageNotFoundError("trl")

    monkeypatch.setattr(support, "version", missing)
    with pytest.raises(ConfigError, match=r"pip install 'graftrl\[trl\]'"):
        support.check_version()


def test_the_parts_that_are_replaced_or_called_exist():
    for name in (
        "_prepare_inputs",
        "_generate_and_score_completions",
        "_calculate_rewards",
        "_get_per_token_logps_and_entropies",
        "_compute_loss",
        "_get_train_sampler",
    ):
        assert callable(getattr(GRPOTrainer, name)), name

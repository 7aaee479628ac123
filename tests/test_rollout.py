"""Responses, groups and rows: what they say about themselves."""

import numpy as np
import pytest

from graftrl.rollout import Group, Prompt, Response, Row, successes_by_model


def response(reward=None, *, finish_reason="stop", logprobs=(-0.5, -1.0, -0.1)):
    return Response(
        text="42",
        token_ids=np.arange(len(logprobs)),
        logprobs=np.array(logprobs, np.float32),
        finish_reason=finish_reason,
        reward=reward,
    )


def group(*rewards, model="A", prompt_id="q0"):
    prompt = Prompt(prompt_id, ({"role": "user", "content": "What?"},), reference="42", task="t")
    return Group(model, prompt, [response(reward) for reward in rewards])


def row(*, tokens=3, advantages=1.0, **fields):
    ids = np.arange(tokens)
    return Row("q0", np.array([1]), ids, advantages, kind="own", source="A", **fields)


def test_prompt_text_joins_all_messages():
    messages = ({"role": "system", "content": "Think."}, {"role": "user", "content": "What?"})
    assert Prompt("q0", messages, reference="42", task="t").text == "Think.\nWhat?"


def test_a_last_message_of_the_assistant_is_the_beginning_of_the_answer():
    asked = {"role": "user", "content": "What?"}
    plain = Prompt("q0", (asked,), reference="42", task="t")
    assert (plain.prefix, plain.question) == ("", (asked,))
    begun = Prompt("q0", (asked, {"role": "assistant", "content": "It is"}), reference="42", task="t")
    assert (begun.prefix, begun.question) == ("It is", (asked,))
    empty = Prompt("q0", (asked, {"role": "assistant", "content": ""}), reference="42", task="t")
    assert (empty.prefix, empty.question) == ("", (asked,))
    shots = (asked, {"role": "assistant", "content": "42"}, asked)
    assert Prompt("q0", shots, reference="42", task="t").question == shots


def test_only_a_response_that_stopped_has_an_eos_to_leave_out():
    assert response(finish_reason="stop").content_logprobs == pytest.approx([-0.5, -1.0])
    assert response(finish_reason="length").content_logprobs == pytest.approx([-0.5, -1.0, -0.1])
    assert len(response(finish_reason="stop", logprobs=[-0.1]).content_logprobs) == 0


def test_eos_is_left_out_by_position_when_its_id_recurs():
    padded_like = Response("x", np.array([5, 2, 2]), np.array([-1.0, -2.0, -3.0], np.float32), "stop")
    assert padded_like.content_logprobs.tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("rewards", "successes", "all_fail", "all_success"),
    [
        ([0, 0, 0], 0, True, False),
        ([1, 0, 1], 2, False, False),
        ([1, 1, 1], 3, False, True),
        ([0.95, 0], 0, True, False),
    ],
)
def test_group_counts_full_rewards(rewards, successes, all_fail, all_success):
    graded = group(*rewards)
    assert graded.size == len(rewards)
    assert graded.rewards.tolist() == rewards
    assert (graded.successes, graded.all_fail, graded.all_success) == (successes, all_fail, all_success)


def test_ungraded_group_has_no_rewards():
    with pytest.raises(ValueError, match="'A' on prompt 'q0' holds ungraded"):
        group(1.0, None).rewards  # noqa: B018


def test_successes_are_found_by_prompt_not_by_position():
    groups = {
        "A": [group(1, 0), group(0, 0, prompt_id="q1")],
        "B": [group(1, 1, model="B", prompt_id="q1"), group(0, 0, model="B")],
    }
    assert successes_by_model(groups) == {"A": {"q0": 1, "q1": 0}, "B": {"q1": 2, "q0": 0}}


def test_every_token_of_a_row_enters_the_loss_unless_masked():
    assert row().loss_mask.tolist() == [True, True, True]
    assert row().loss_tokens == 3
    assert row(loss_mask=np.array([True, False, True])).loss_tokens == 2


def test_mask_does_not_depend_on_the_ids():
    ids = np.array([5, 7, 2, 2, 2])  # only the first 2 was sampled; the others are padding with the same id
    sampled = Row("q0", np.array([1]), ids, 1.0, "own", "A", loss_mask=np.arange(5) < 3)
    assert sampled.loss_mask.tolist() == [True, True, True, False, False]
    assert Row("q0", np.array([1]), ids, 1.0, "own", "A").loss_tokens == 5


def test_row_without_tokens_is_refused():
    with pytest.raises(ValueError, match="'q0' has no response token"):
        row(tokens=0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"advantages": 0.5}, True),
        ({"advantages": -0.5}, True),
        ({"advantages": 0.0}, False),
        ({"advantages": 0.5, "weight": 0.0}, False),
        ({"advantages": np.array([0.0, 0.0, 1.0], np.float32)}, True),
        ({"advantages": np.zeros(3, np.float32)}, False),
        ({"advantages": np.array([0.0, 0.0, 1.0]), "loss_mask": np.array([True, True, False])}, False),
        ({"advantages": 1.0, "loss_mask": np.zeros(3, np.bool_)}, False),
    ],
)
def test_row_carries_a_policy_gradient_iff_a_loss_token_has_a_weighted_advantage(fields, expected):
    assert row(**fields).carries_policy_gradient is expected

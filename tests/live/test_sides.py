"""Waiting, staleness, time-outs, and what a side refuses; on a clock that only sleeping moves."""

import io

import numpy as np
import polars as pl
import pytest

from graftrl.errors import ConfigError, DataError, RunError
from graftrl.live.content import pack, publisher_of, unpack
from graftrl.live.service import Unreachable
from graftrl.live.sides import Listener, Publisher, steps_kept
from graftrl.logs.reader import RolloutLog
from graftrl.logs.rollouts import frame_bytes, rollout_frame
from graftrl.policies.config import SamplingSettings


@pytest.fixture
def make(service, clock, group, prompt):
    """A peer B that says things, and this job's listener."""

    class Made:
        def __init__(self):
            self.prompts = {q: prompt(q, "A") for q in ("p", "q")}

        def say(self, step, ids=("p", "q"), publisher="b", keep=99, **of_group):
            content = pack(
                "B", step, [group(q, **of_group) for q in ids], run="b", fingerprint="tokens-B", publisher=publisher
            )
            service.publish("B", step, content, keep)
            return len(content)

        def listen(self, **changes):
            return Listener(service, "B", **{"timeout_s": 60.0, "poll_s": 1.0, **changes})

    return Made()


# Receiving ------------------------------------------------------------------------------------------------------------


def test_groups_come_on_this_jobs_prompts_with_the_peers_step(make, clock):
    size = make.say(3, ids=("q", "r", "p"))
    found = make.listen(name="other").receive(3, make.prompts)
    assert [(g.model, g.prompt.id, g.prompt.text, g.log_step) for g in found.groups] == [
        ("other", "p", "A asks p", 3), ("other", "q", "A asks q", 3),
    ]  # fmt: skip
    first = found.groups[0].responses[0]
    assert (first.text, first.reward, first.token_ids.tolist()) == ("B0", 1.0, [3, 4, 2])
    np.testing.assert_array_equal(first.logprobs, np.array([-0.5, -1.0, -0.1], np.float32))
    assert (found.fingerprint, found.bytes, found.waited_s, found.alone) == ("tokens-B", size, 0.0, False)
    assert any("worded otherwise" in note for note in found.notes)


def test_it_waits_for_the_peer_and_no_longer(make, clock):
    clock.at(7, lambda: make.say(1))
    found = make.listen().receive(1, make.prompts)
    assert len(found.groups) == 2 and found.waited_s == 7


def test_groups_are_copies_so_that_grading_them_anew_changes_no_other_step(make):
    make.say(1)
    listener = make.listen(max_staleness=1)
    listener.receive(1, make.prompts).groups[0].responses[0].reward = 0.0
    assert listener.receive(2, make.prompts).groups[0].responses[0].reward == 1.0


# Staleness ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_staleness", "step", "usable"), [(0, 3, True), (0, 4, False), (2, 5, True), (2, 6, False)]
)
def test_a_group_may_be_as_old_as_it_is_said(make, max_staleness, step, usable):
    make.say(3)
    found = make.listen(max_staleness=max_staleness).receive(step, make.prompts)
    assert [g.log_step for g in found.groups] == ([3, 3] if usable else [])
    assert found.waited_s == (0 if usable else 60)


def test_of_several_steps_the_newest_that_has_the_prompt_serves(make):
    make.say(3, ids=("p", "q"))
    make.say(4, ids=("p",))
    make.say(5, ids=("x",))
    found = make.listen(max_staleness=2).receive(5, make.prompts)
    assert {g.prompt.id: g.log_step for g in found.groups} == {"p": 4, "q": 3}


def test_old_groups_that_do_not_cover_the_step_are_used_after_waiting_for_the_rest(make, clock):
    make.say(3, ids=("p",))
    found = make.listen(max_staleness=1).receive(4, make.prompts)
    assert [g.prompt.id for g in found.groups] == ["p"] and found.waited_s == 60 and not found.alone


def test_a_step_of_the_future_is_never_used_nor_waited_for(make):
    make.say(9)
    found = make.listen(max_staleness=3).receive(4, make.prompts)
    assert found.alone and found.waited_s == 0
    assert found.notes == ["peer B: ALONE in this step: it has gone beyond it"]


def test_a_step_that_is_published_again_replaces_what_was_read(make):
    listener = make.listen(max_staleness=1)
    make.say(1, reward=1.0)
    assert listener.receive(1, make.prompts).groups[0].successes == 1
    make.say(1, reward=0.0)  # the peer was killed, went on from a checkpoint, and drew otherwise
    found = listener.receive(2, make.prompts)
    assert [(g.log_step, g.successes) for g in found.groups] == [(1, 0), (1, 0)] and found.bytes > 0
    make.say(1)
    assert listener.receive(3, make.prompts).alone  # two steps old by step, however lately it was published


# Time-outs ------------------------------------------------------------------------------------------------------------


def test_waits_for_a_peer_that_is_gone_shrink_to_a_look_and_sum_to_twice_the_time_out(make, clock):
    listener = make.listen()
    waits = [listener.receive(step, make.prompts).waited_s for step in range(1, 30)]
    assert waits[:8] == [60, 30, 15, 7.5, 3.75, 1.875, 0.9375, 0]  # a poll is a second
    assert sum(waits) < 120 and waits[-1] == 0


def test_a_peer_that_is_heard_again_is_waited_for_in_full(make, clock):
    listener = make.listen()
    for step in (1, 2, 3, 4, 5):
        assert listener.receive(step, make.prompts).alone
    clock.at(1, lambda: make.say(4))  # it lags, but lives
    clock.at(50, lambda: make.say(6))
    found = listener.receive(6, make.prompts)
    assert found.waited_s == 50 and not found.alone and found.notes[-1] == "peer B: heard again"
    assert listener.receive(7, make.prompts).waited_s == 60


def test_a_peer_that_lags_but_lives_keeps_its_full_time(make, clock):
    listener = make.listen()
    for step in (5, 6, 7):
        clock.at(10, lambda at=step: make.say(at - 4))
        assert listener.receive(step, make.prompts).waited_s == 60


def test_alone_is_said_in_the_same_words_in_every_step(make):
    listener = make.listen()
    (first,), (second,) = (listener.receive(step, make.prompts).notes for step in (1, 2))
    assert first == second and first.startswith("peer B: ALONE in this step: nothing came in time")


class Away:
    """A service that does not answer for a while."""

    def __init__(self, service, calls):
        self._service, self._calls = service, calls

    def __getattr__(self, name):
        if name in ("look", "fetch", "publish") and self._calls > 0:
            self._calls -= 1
            raise Unreachable("the service is away")
        return getattr(self._service, name)


def test_a_service_that_is_away_is_asked_until_the_time_is_out_and_found_again(make, service, clock):
    make.say(1)
    found = Listener(Away(service, 5), "B", timeout_s=60, poll_s=1).receive(1, make.prompts)
    assert found.waited_s == 5 and not found.alone
    found = Listener(Away(service, 999), "B", timeout_s=60, poll_s=1).receive(1, make.prompts)
    assert found.waited_s == 60 and found.notes == ["peer B: ALONE in this step: the service is away"]


# What is refused ------------------------------------------------------------------------------------------------------


def refusal(make, service, content, error=DataError):
    service.publish("B", 1, content, 9)
    with pytest.raises(error) as caught:
        make.listen().receive(1, make.prompts)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(service.place("B", 1))
    return str(caught.value)


def test_a_peer_with_other_prompts_is_refused_when_it_is_first_met(make, service):
    make.say(1, ids=("x", "y"))
    with pytest.raises(ConfigError, match="none of its prompts is one of this step's; give both jobs the same task"):
        make.listen().receive(1, make.prompts)
    found = make.listen(known=True).receive(1, make.prompts)  # dynamic sampling may leave nothing in common
    assert found.notes == ["peer B: ALONE in this step: it has no group on these prompts"]


def test_prompts_of_the_same_ids_with_other_answers_are_refused(make, service, group, prompt):
    make.prompts = {q: prompt(q, "A", reference="1") for q in ("p", "q")}
    content = pack("B", 1, [group(q, reference="2") for q in ("p", "q")], run="b", fingerprint="", publisher="b")
    assert "another task" in refusal(make, service, content)


def test_a_torn_file_is_waited_for_and_then_named(make, service, clock):
    make.say(1)
    whole = service.fetch("B", 1)
    for torn in (whole[:-100], b"", b"PAR1"):
        assert "torn" in refusal(make, service, torn)
    service.publish("B", 1, whole[:-100], 9)
    clock.at(5, lambda: service.publish("B", 1, whole, 9))  # a copy that was under way
    assert not make.listen().receive(1, make.prompts).alone


def test_a_file_that_is_broken_inside_is_named(make, service):
    make.say(1)
    whole = service.fetch("B", 1)
    assert "torn or not a Parquet file" in refusal(make, service, whole[:20] + bytes(len(whole) - 60) + whole[-40:])


def test_another_schema_version_is_named(make, service):
    make.say(1)
    frame = pl.read_parquet(io.BytesIO(service.fetch("B", 1)))
    later = frame_bytes(frame, schema_version=2)
    assert "has schema version 2, but this version of graftrl reads 1" in refusal(make, service, later)


def test_sampling_that_would_bias_scores_is_refused(make, service, group):
    frame = rollout_frame(
        run="b", step=1, groups={"B": [group("p")]}, sampling=SamplingSettings(temperature=0.7), fingerprints={"B": ""}
    )
    assert "were sampled with temperature 0.7" in refusal(make, service, frame_bytes(frame))


def test_what_was_published_under_another_name_or_step_is_refused(make, service, group):
    for model, step in (("C", 1), ("B", 2)):
        content = pack(model, step, [group("p")], run="b", fingerprint="", publisher="b")
        assert "holds no responses of 'B' in step 1" in refusal(make, service, content)


# Publishing -----------------------------------------------------------------------------------------------------------


def publish(publisher, step, model="A", identity="a", ids=("p",), group=None):
    publisher.publish(model, step, pack(model, step, [group(q, model) for q in ids], run="a", fingerprint="",
                                        publisher=identity))  # fmt: skip


def test_what_is_published_is_a_rollout_log(service, group, tmp_path):
    publish(Publisher(service, "a", 2), 4, group=group)
    file = tmp_path / "step.parquet"
    file.write_bytes(service.fetch("A", 4))
    log = RolloutLog(file)
    assert log.models == ("A",) and log.steps("A") == [4] and log.sampling("A") == {(1.0, 1.0, 0)}
    assert publisher_of(file.read_bytes()) == "a"
    frame = pl.read_parquet(file)
    assert frame["policy_version"].unique().to_list() == [3] and frame["reward"].to_list() == [1.0, 0.0]


def test_a_step_without_groups_can_be_published_and_read():
    batch = unpack(pack("A", 1, [], run="a", fingerprint="x", publisher="a"), "A", 1, "here")
    assert batch.groups == {}


def test_the_steps_a_peer_may_use_stay_and_one_that_it_may_be_reading(service, group):
    publisher = Publisher(service, "a", steps_kept(max_staleness=1))
    publisher.begin(["A"], 0)
    for step in range(1, 8):
        publish(publisher, step, group=group)
    assert sorted(service.look("A")) == [5, 6, 7]


def test_the_other_side_under_the_same_name_is_refused_at_the_start_and_in_the_race(service, group):
    one, other = Publisher(service, "one", 2), Publisher(service, "other", 2)
    one.begin(["A"], 0)
    other.begin(["A"], 0)  # nothing is there yet
    publish(one, 1, identity="one", group=group)
    with pytest.raises(RunError, match="another run has published as 'A'"):
        publish(other, 1, identity="other", group=group)
    with pytest.raises(RunError, match="give the models of both sides two names"):
        Publisher(service, "other", 2).begin(["A"], 0)


def test_a_run_that_goes_on_takes_back_what_it_published_of_steps_to_come(service, group):
    publisher = Publisher(service, "a", 3)
    for step in (4, 5, 6):
        publish(publisher, step, group=group)
    again = Publisher(service, "a", 3)
    again.begin(["A"], 4)
    assert sorted(service.look("A")) == [4]
    publish(again, 5, group=group)
    assert sorted(service.look("A")) == [4, 5]

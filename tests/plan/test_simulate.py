"""The simulation against closed forms, and what must hold whatever the numbers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftrl.plan.devices import DEVICES, Device, without_communication
from graftrl.plan.simulate import (
    Clock,
    Member,
    Pool,
    SamplingDevice,
    grading_seconds,
    mean_step,
    sampling,
    simulate,
    trained_rows,
)
from graftrl.plan.speed import Speed, deal
from graftrl.plan.workload import Workload
from graftrl.policies.config import ModelSettings
from graftrl.policies.costs import Work, llama_shape

SHAPE = llama_shape(layers=4, hidden=64, heads=4, kv_heads=2, feed_forward=256, vocabulary=1000)
FREE = without_communication(DEVICES["h100"])


class UnitSpeed(Speed):
    """A token takes a second whatever goes on besides; reading takes none."""

    def read_seconds(self, prompts):
        return 0.0

    def token_seconds(self, rows, keys):
        return 1.0


def member(name="A", devices=1, *, speed=Speed, shape=SHAPE, device=FREE, rows=512, sampler=True, **options):
    model = ModelSettings(path="-", dtype="bfloat16", sample_rows=rows, microbatch_tokens=4096, **options)
    return Member(name, speed(shape, model, device, sampler=sampler), devices, rescored=True)


def workload(prompts=16, group=4, *names, **numbers):
    means = dict.fromkeys(names or ("A", "B"), 50.0)
    return Workload(
        prompts, group, prompt_tokens=20, response_tokens=means, limit=400, **{"minibatch_prompts": 8, **numbers}
    )


# Closed forms ---------------------------------------------------------------------------------------------------------


def test_events_happen_in_order_and_ties_in_the_order_they_were_made():
    clock, seen = Clock(), []
    for seconds, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.after(seconds, lambda name=name: seen.append((clock.now, name)))
    assert clock.run() == 2.0 and seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]


def test_devices_with_one_response_each_wait_for_the_longest():
    """E[max of n exponential lengths of mean m] = m (1 + 1/2 + ... + 1/n)."""
    rng, n, mean = np.random.default_rng(0), 64, 1000.0
    load = workload(n, 1, "A")
    walls = []
    for _ in range(400):
        lengths = np.ceil(rng.exponential(mean, n)).astype(int).tolist()
        part = sampling(member(devices=n, speed=UnitSpeed), load, lengths)
        assert part.wall == max(lengths) and part.busy == sum(lengths)
        walls.append(part.wall)
    expected = mean * sum(1 / k for k in range(1, n + 1))
    deviation = mean * np.pi / np.sqrt(6)  # of the maximum, for large n
    assert np.mean(walls) == pytest.approx(expected, abs=3 * deviation / np.sqrt(len(walls)))


def test_graders_finish_when_theory_says():
    """n exponential jobs of rate 1, c graders: all are busy until c - 1 are left, (n - c) / c + 1 + 1/2 + ... + 1/c."""
    rng, n, c = np.random.default_rng(1), 60, 6
    seconds = [grading_seconds(rng.exponential(1.0, n).tolist(), c) for _ in range(2000)]
    expected = (n - c) / c + sum(1 / k for k in range(1, c + 1))
    assert np.mean(seconds) == pytest.approx(expected, abs=3 * np.std(seconds) / np.sqrt(len(seconds)))


def test_a_pool_is_never_idle_while_jobs_wait():
    assert grading_seconds([3.0, 1.0, 1.0, 1.0], 2) == 3.0
    assert grading_seconds([1.0] * 7, 3) == 3.0 and grading_seconds([], 3) == 0.0
    clock = Clock()
    pool = Pool(clock, 2)
    pool.add(5.0)
    assert clock.run() == 5.0 and pool.free == 2


def test_a_free_place_is_taken_at_once_or_when_the_batch_has_ended():
    """Lengths 4, 1, 2 with room for two. The third begins when the second ends, or when both have."""
    for batches, expected in ((False, 4.0), (True, 6.0)):
        clock = Clock()
        speed = UnitSpeed(SHAPE, ModelSettings(path="-"), FREE)
        device = SamplingDevice(clock, speed, 20, [(0, 4), (1, 1), (2, 2)], 2, batches)
        device.begin()
        assert clock.run() == expected and device.drawn == 7


def test_contexts_are_those_of_each_token():
    """The keys that a step reads, seen by a speed that counts them."""
    seen = []

    class Counting(UnitSpeed):
        def token_seconds(self, rows, keys):
            seen.append((rows, keys))
            return 1.0

    clock = Clock()
    SamplingDevice(
        clock, Counting(SHAPE, ModelSettings(path="-"), FREE), 10, [(0, 3), (1, 1), (2, 5)], 2, False
    ).begin()
    assert clock.run() == 6.0
    # One step of two: 11 + 11. Two steps of contexts 12, 13 and 11, 12: in the mean 12.5 + 11.5. Three of 13, 14, 15.
    assert seen == [(2, 22.0), (2, 24.0), (1, 14.0)]


# What must hold -------------------------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(1, 60), min_size=32, max_size=32)


@settings(max_examples=12)
@given(LENGTHS, st.sampled_from([1, 2, 3, 8, 32, 64]), st.sampled_from([4, 8, 512]), st.booleans())
def test_every_token_is_drawn_once(lengths, devices, rows, sampler):
    load = workload(8, 4, "A")
    part = sampling(member(devices=devices, rows=rows, sampler=sampler, speed=UnitSpeed), load, lengths)
    assert max(lengths) <= part.wall <= sum(lengths)
    assert part.busy <= devices * part.wall + 1e-9
    if devices >= 32:  # one each
        assert part.busy == sum(lengths) and part.wall == max(lengths)


@settings(max_examples=15)
@given(LENGTHS)
def test_more_devices_never_slow_down_without_communication(lengths):
    """Twice as many devices: each has a part of the responses that one had before."""
    load = workload(8, 4, "A", exchanged=0.25)
    rows = [(20, length) for length in lengths]
    found = []
    for devices in (1, 2, 4, 8, 16, 32, 64):
        m = member(devices=devices)
        step = simulate([m], load, {"A": lengths}, shared=True)
        found.append(
            (step.seconds["sampling"], m.speed.update(rows, devices).wall, step.seconds["scoring"], step.total)
        )
    for before, after in itertools.pairwise(found):
        assert all(b <= a * (1 + 1e-9) for a, b in zip(before, after, strict=True))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 99)), min_size=1, max_size=40), st.integers(1, 50))
def test_dealing_keeps_every_row_and_another_device_never_fills_the_fullest(rows, devices):
    parts, more = deal(rows, devices), deal(rows, devices + 1)
    assert sorted(row for part in parts for row in part) == sorted(rows)
    fullest = [max(sum(map(sum, part)) for part in found) for found in (parts, more)]
    assert fullest[1] <= fullest[0]
    assert len(parts) == min(devices, len(rows)) and all(parts)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("devices", [1, 4, 64])
def test_the_devices_time_is_accounted_for(shared, devices):
    """What is used and what is lost add up to devices times seconds, and phases to the step."""
    members = [
        member("A", devices, device=DEVICES["h100"]),
        member("B", devices, device=DEVICES["h100"], gradient_checkpointing=True),
    ]
    step, seconds = mean_step(members, workload(exchanged=0.2), shared=shared, steps=3, seed=5)
    assert step.devices == (devices if shared else 2 * devices)
    assert sum(step.used.values()) == pytest.approx(step.devices * step.total)
    assert min(step.used.values()) >= -1e-12
    assert np.mean(seconds) == pytest.approx(step.total)
    for phase in ("sampling", "training"):
        parts = [step.phases_of[name][phase] for name in "AB"]
        # Of the mean of maxima, the maximum of means is a lower limit.
        assert step.seconds[phase] == pytest.approx(sum(parts)) if shared else step.seconds[phase] >= max(parts)
    assert step.waits == {"A": 0.0, "B": 0.0} if shared else step.waits["A"] > step.waits["B"]


def test_devices_for_samplers_alone_idle_while_the_others_train():
    apart = replace(member("A", 4, device=DEVICES["h100"]), samplers=2)
    load = workload(16, 4, "A")
    step, _ = mean_step([apart], load, shared=False, steps=2, seed=5)
    assert step.devices == 6 and sum(step.used.values()) == pytest.approx(6 * step.total)
    # Four wait while two sample, two while four score and train.
    other = 4 * step.seconds["sampling"] + 2 * (step.seconds["scoring"] + step.seconds["training"])
    assert step.used["other role"] == pytest.approx(other)
    alone, _ = mean_step([member("A", 2, device=DEVICES["h100"])], load, shared=False, steps=2, seed=5)
    assert step.seconds["sampling"] == pytest.approx(alone.seconds["sampling"])


def test_the_same_seed_draws_the_same_lengths_on_any_devices():
    found = [mean_step([member(devices=n)], workload(16, 4, "A"), shared=True, steps=2, seed=3)[0] for n in (1, 8)]
    assert found[0].tokens == found[1].tokens
    other = mean_step([member()], workload(16, 4, "A"), shared=True, steps=2, seed=4)[0]
    assert other.tokens != found[0].tokens


def test_a_slower_peer_is_waited_for_on_devices_of_its_own():
    load = workload(grade_seconds=0.0, exchanged=0.0)
    load = replace(load, response_tokens={"A": 20.0, "B": 200.0})
    step, _ = mean_step([member("A"), member("B")], load, shared=False, steps=4, seed=0)
    assert step.waits["A"] > 0.5 * step.seconds["sampling"] and step.waits["B"] < 0.01 * step.total
    assert step.used["slower peer"] > 0.2 * step.devices * step.total


def test_the_exchange_scores_for_one_receiver_after_the_other():
    lengths = {"A": [50] * 64, "B": [30] * 64}
    members = [member("A"), member("B")]
    none = simulate(members, workload(exchanged=0.0), lengths, shared=False)
    half = simulate(members, workload(exchanged=0.5), lengths, shared=False)
    assert none.seconds["exchange"] == 0.0
    assert half.seconds["exchange"] == pytest.approx(2e-6 * 32 * (50 + 30))
    assert half.seconds["scoring"] == pytest.approx(sum(half.phases_of[name]["scoring"] for name in "AB"))
    assert half.seconds["scoring"] > none.seconds["scoring"] > 0  # own log-probabilities are computed again anyway
    assert half.used["exchange"] > half.seconds["exchange"] * 2


def test_communication_takes_time_only_between_devices():
    h100 = DEVICES["h100"]
    assert h100.collective_seconds(1e9, 1) == 0.0
    within, across = h100.collective_seconds(1e9, 8), h100.collective_seconds(1e9, 16)
    assert within == pytest.approx(1e9 * 7 / 8 / (450e9 * 0.7) + 3 * 2e-5)
    assert across == pytest.approx(1e9 * 15 / 16 / (50e9 * 0.7) + 4 * 2e-5)
    assert FREE.collective_seconds(1e9, 1024) == 0.0
    big = llama_shape(layers=36, hidden=2048, heads=16, kv_heads=4, feed_forward=11_008, vocabulary=128_256)
    rows = [(20, 40)] * 64
    paid, free = (member(shape=big, device=d).speed.update(rows, 64) for d in (h100, FREE))
    assert paid.wall > 2 * free.wall and paid.busy == free.busy
    assert free.wall == pytest.approx(free.compute)


# Workload and devices -------------------------------------------------------------------------------------------------


def test_drawn_lengths_have_the_mean_and_spread_asked_for():
    load = replace(workload(5000, 4), limit=100_000, spread=0.8, response_tokens={"A": 300.0})
    lengths = load.draw("A", np.random.default_rng(0))
    assert lengths.mean() == pytest.approx(300, rel=0.02) and lengths.std() / lengths.mean() == pytest.approx(
        0.8, rel=0.05
    )
    assert lengths.min() >= 1 and replace(load, limit=100).draw("A", np.random.default_rng(0)).max() == 100
    measured = replace(load, lengths={"A": [7, 9]}).draw("A", np.random.default_rng(0))
    assert set(measured.tolist()) == {7, 9} and len(measured) == 20_000


@pytest.mark.parametrize(
    ("contrast", "exchanged", "passed"), [(1.0, 0.0, 1.0), (1.0, 0.25, 1.0), (0.5, 0.25, 0.75), (0.0, 0.0, 0.0)]
)
def test_grafts_take_the_place_of_groups_without_contrast(contrast, exchanged, passed):
    load = workload(contrast=contrast, exchanged=exchanged)
    assert load.passed == passed
    own = [(20, i) for i in range(1, 65)]
    grafts = [(20, 1000)] * round(64 * exchanged)
    minibatches = trained_rows(load, own, grafts)
    rows = [row for minibatch in minibatches for row in minibatch]
    assert (
        len(rows) == 64 * passed
        and rows.count((20, 1000)) == len(grafts)
        and len(set(rows)) >= 64 * (passed - exchanged)
    )
    assert len(minibatches) == 2 and {len(minibatch) for minibatch in minibatches} == {32 * passed}


def test_time_by_hand():
    """Products bound, bytes bound, and what comes on top."""
    rates = {"bf16": 100.0, "fp32": 50.0, "bandwidth": 10.0, "exps": 4.0, "overhead": 3.0, "search": 7.0}
    achieved = {"products": 0.5, "decode": 0.2, "attention": 0.1, "stream": 1.0, "traffic": 0.5}
    device = Device("d", memory=1, link=1, network=1, **rates, **achieved)
    assert device.seconds(Work(decoder=100.0, attention=50.0), 2) == pytest.approx(150 / 50)
    assert device.seconds(Work(decoder=100.0, bytes=80.0), 2) == pytest.approx(8.0)
    assert device.seconds(Work(decoder=100.0, attention=50.0), 4, decoding=True) == pytest.approx(100 / 10 + 50 / 5)
    assert device.seconds(Work(traffic=10.0, exps=8.0, layers=2, searches=1), 4) == pytest.approx(2 + 2 + 6 + 7)


def test_every_known_device_is_whole():
    for name, device in DEVICES.items():
        assert device.name == name
        for share in (device.products, device.decode, device.attention, device.stream, device.traffic, device.links):
            assert 0 < share <= 1
    assert DEVICES["h200"].memory > DEVICES["h100"].memory > DEVICES["l40s"].memory

"""A discrete-event simulation of a co-training step: devices that sample until their longest response ends, graders,
the exchange, training, new weights for the samplers.

Phases follow each other as in the training loop: all policies have sampled before grading begins, and so on; scoring
goes through the receivers one by one, because a method asks for one model's scores at a time. Policies work side by
side on devices of their own, or in turn on shared ones. Within a phase events are single responses.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from graftrl.plan.speed import Lengths, Part, Speed, joined
from graftrl.plan.workload import Workload

PHASES = ("sampling", "grading", "exchange", "scoring", "training", "sync")
LOSSES = ("work", "tail", "slower peer", "other role", "exchange", "grading", "communication")


class Clock:
    """Events in the order of their time, those of one time in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, self._made, event))
        self._made += 1

    def run(self) -> float:
        """Until nothing is left to happen; returns the time."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.now


class Pool:
    """Jobs in order of arrival, at most `workers` at a time."""

    def __init__(self, clock: Clock, workers: int) -> None:
        self.clock, self.free = clock, workers
        self.waiting: deque[float] = deque()

    def add(self, seconds: float) -> None:
        self.waiting.append(seconds)
        self._start()

    def _start(self) -> None:
        while self.free and self.waiting:
            self.free -= 1
            self.clock.after(self.waiting.popleft(), self._finish)

    def _finish(self) -> None:
        self.free += 1
        self._start()


class SamplingDevice:
    """Responses on one device, one token of each at a time. A response that ends makes room for a waiting one; with
    `batches` only when all have ended (the local engine samples batch after batch).

    Between two events the number of responses is constant and contexts grow by a token a step, so that the time of the
    steps in between is that of their middle one.
    """

    def __init__(
        self, clock: Clock, speed: Speed, prompt: int, rows: Sequence[tuple[int, int]], slots: int, batches: bool
    ) -> None:
        """rows: number of the prompt and length of the response."""
        self.clock, self.speed, self.prompt = clock, speed, prompt
        self.waiting, self.slots, self.batches = deque(rows), slots, batches
        self.steps = 0  # tokens that a response has drawn if it was there from the start
        self.active: list[tuple[int, int]] = []  # heap of (step at which it ends, step at which it began)
        self.began_sum = 0  # of the active
        self.finished_at = 0.0
        self.busy = 0.0
        self.drawn = 0

    def begin(self) -> None:
        """Fill free places, then advance to the next response that ends."""
        new: list[tuple[int, int]] = []
        if not (self.batches and self.active):
            while self.waiting and len(self.active) + len(new) < self.slots:
                new.append(self.waiting.popleft())
        for _, length in new:
            heapq.heappush(self.active, (self.steps + length, self.steps))
            self.began_sum += self.steps
        seconds = self.speed.read_seconds([self.prompt] * len({prompt for prompt, _ in new}))
        if self.active:
            steps = self.active[0][0] - self.steps
            rows = len(self.active)
            keys = rows * (self.prompt + self.steps + (steps + 1) / 2) - self.began_sum
            seconds += steps * self.speed.token_seconds(rows, keys)
            self.drawn += steps * rows
            self.steps += steps
        self.busy += seconds
        self.clock.after(seconds, self._ended)

    def _ended(self) -> None:
        while self.active and self.active[0][0] == self.steps:
            self.began_sum -= heapq.heappop(self.active)[1]
        self.finished_at = self.clock.now
        if self.active or self.waiting:
            self.begin()


@dataclass(frozen=True)
class Member:
    """One policy and how many devices it works on. rescored: its own log-probabilities are computed again before
    training. readers: frozen models that read what it trains on, each whole on every device. samplers: devices that
    only sample, besides the others, which then do not; 0: the same devices do both."""

    name: str
    speed: Speed
    devices: int
    rescored: bool = False
    readers: tuple[Speed, ...] = ()
    samplers: int = 0

    @property
    def all_devices(self) -> int:
        return self.devices + self.samplers

    @property
    def continuous(self) -> bool:
        return self.speed.sampler


@dataclass
class Step:
    """A simulated step. seconds: of each phase, on the wall. used: device-seconds by what they went to; they add up to
    devices times seconds. waits: per policy, seconds that its own devices waited for a slower peer in sampling and
    training. tokens: drawn by each policy. phases_of: seconds of each policy's own part of a phase."""

    devices: int
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    used: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0.0))
    waits: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    phases_of: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def simulate(
    members: Sequence[Member], workload: Workload, lengths: Mapping[str, Sequence[int]], *, shared: bool
) -> Step:
    """One step with these response lengths (per policy, [prompts * group], group after group)."""
    devices = (max if shared else sum)(m.all_devices for m in members)
    step = Step(devices)
    for m in members:
        step.phases_of[m.name] = {}
        step.tokens[m.name] = int(sum(lengths[m.name]))
        step.waits[m.name] = 0.0

    def spend(phase: str, parts: Mapping[str, Part], *, in_turn: bool, rest: str) -> None:
        """Book a phase; `rest`: where the time of idle devices goes while others work in turn."""
        wall = (sum if in_turn else max)([part.wall for part in parts.values()] or [0.0])
        step.seconds[phase] += wall
        booked = 0.0
        for m in members:
            part, at_work = parts[m.name], m.devices
            if m.samplers and phase in ("sampling", "sync"):
                at_work = m.samplers if phase == "sampling" else m.all_devices
            step.phases_of[m.name][phase] = step.phases_of[m.name].get(phase, 0.0) + part.wall
            step.used["work"] += part.busy
            step.used["communication"] += at_work * (part.wall - part.compute)
            step.used["tail"] += at_work * part.compute - part.busy
            step.used["other role"] += (m.all_devices - at_work) * part.wall
            booked += m.all_devices * part.wall
            if not in_turn:
                step.waits[m.name] += wall - part.wall
        step.used[rest] += devices * wall - booked

    rows = {m.name: [(workload.prompt_tokens, int(length)) for length in lengths[m.name]] for m in members}
    spend("sampling", {m.name: sampling(m, workload, lengths[m.name]) for m in members}, in_turn=shared,
          rest="slower peer")  # fmt: skip

    graded = grading_seconds([workload.grade_seconds] * workload.responses * len(members), workload.graders)
    step.seconds["grading"] = graded
    step.used["grading"] += devices * graded

    grafts: dict[str, list[Lengths]] = {m.name: [] for m in members}
    for m in members:
        others = [o for o in members if o is not m]
        source = rows[(others or [m])[0].name]
        grafts[m.name] = source[: round(workload.exchanged * workload.prompts) * workload.group]
    tokens = sum(response for of_model in grafts.values() for _, response in of_model)
    step.seconds["exchange"] = tokens * workload.exchange_seconds_per_token
    step.used["exchange"] += devices * step.seconds["exchange"]

    # With `shared` as without, one receiver after the other.
    parts = {}
    trained = {m.name: trained_rows(workload, rows[m.name], grafts[m.name]) for m in members}
    for m in members:
        everything = [row for minibatch in trained[m.name] for row in minibatch]
        passes = [m.speed.score([*grafts[m.name], *(everything if m.rescored else [])], m.devices)]
        passes += [reader.score(everything, m.devices, whole=True) for reader in m.readers]
        parts[m.name] = joined(passes)
    spend("scoring", parts, in_turn=True, rest="exchange")

    spend("training", {m.name: training(m, workload.epochs, trained[m.name]) for m in members}, in_turn=shared,
          rest="slower peer")  # fmt: skip

    synced = {m.name: m.speed.sync_seconds(m.all_devices) for m in members}
    parts = {m.name: Part(synced[m.name], 0.0, 0.0) for m in members}
    spend("sync", parts, in_turn=shared, rest="slower peer")
    return step


def sampling(member: Member, workload: Workload, lengths: Sequence[int]) -> Part:
    """Response r of prompt g goes to device (g + prompts * r) mod devices: groups stay together while there are fewer
    devices than prompts, and a device of twice as many has a part of what one had before."""
    count = member.samplers or member.devices
    of_device: dict[int, list[tuple[int, int]]] = {}
    for i, length in enumerate(lengths):
        prompt, r = divmod(i, workload.group)
        of_device.setdefault((prompt + workload.prompts * r) % count, []).append((prompt, int(length)))
    clock = Clock()
    slots = member.speed.settings.sample_rows
    if not member.continuous:
        slots = max(1, slots // workload.group) * workload.group
    devices = [
        SamplingDevice(clock, member.speed, workload.prompt_tokens, rows, slots, not member.continuous)
        for rows in of_device.values()
    ]
    for device in devices:
        device.begin()
    wall = clock.run()
    return Part(wall, sum(device.busy for device in devices), wall)


def grading_seconds(jobs: Sequence[float], workers: int) -> float:
    """Until the last of these jobs is done, in order of arrival."""
    clock = Clock()
    pool = Pool(clock, workers)
    for seconds in jobs:
        pool.add(seconds)
    return clock.run()


def trained_rows(workload: Workload, own: Sequence[Lengths], grafts: Sequence[Lengths]) -> list[list[Lengths]]:
    """Rows of each minibatch that go through a pass: own groups with contrast, then grafts, which take the place of
    groups without one."""
    kept = round(workload.prompts * (workload.passed - workload.exchanged)) * workload.group
    rows = [*own[:kept], *grafts]
    stops = np.rint(np.cumsum(workload.minibatches) / workload.prompts * len(rows)).astype(int).tolist()
    return [rows[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def training(member: Member, epochs: int, minibatches: Sequence[Sequence[Lengths]]) -> Part:
    return joined([member.speed.update(rows, member.devices) for _ in range(epochs) for rows in minibatches])


def mean_step(
    members: Sequence[Member], workload: Workload, *, shared: bool, steps: int, seed: int
) -> tuple[Step, list[float]]:
    """The mean of so many simulated steps, and the seconds of each. The same seed draws the same lengths whatever the
    devices, so that numbers of devices compare."""
    rng = np.random.default_rng(seed)
    found = [
        simulate(members, workload, {m.name: workload.draw(m.name, rng).tolist() for m in members}, shared=shared)
        for _ in range(steps)
    ]
    mean = Step(found[0].devices)
    for name in PHASES:
        mean.seconds[name] = float(np.mean([s.seconds[name] for s in found]))
    for name in LOSSES:
        mean.used[name] = float(np.mean([s.used[name] for s in found]))
    for m in members:
        mean.waits[m.name] = float(np.mean([s.waits[m.name] for s in found]))
        mean.tokens[m.name] = round(float(np.mean([s.tokens[m.name] for s in found])))
        mean.phases_of[m.name] = {
            phase: float(np.mean([s.phases_of[m.name][phase] for s in found])) for phase in found[0].phases_of[m.name]
        }
    return mean, [s.total for s in found]

"""The clock of a core on another machine, and that of one on the same."""

from __future__ import annotations

import itertools
import random

import pytest
from support.simulate import make_request
from support.wire_samples import frames_of

from engine.messages.requests import CoreOutputs, Finished, Started
from engine.messages.wire import Outputs, Submitted
from engine.rpc.client_protocol import ClientProtocol
from engine.rpc.clocks import MAX_DRIFT, ClockOffset


class Machines:
    """Two clocks that part, and messages that take their time between them."""

    def __init__(self, dice: random.Random, ahead: float, drift: float) -> None:
        self.offset = ClockOffset()
        self.own = 0.0
        self.fastest = float("inf")
        """What the best exchange took, and by how much the clocks may have parted since."""
        self._dice = dice
        self._ahead = ahead
        self._drift = drift

    @property
    def core(self) -> float:
        return self._ahead + (1.0 + self._drift) * self.own

    def wait(self, seconds: float) -> None:
        self.own += seconds
        self.fastest += 2 * MAX_DRIFT * seconds

    def exchange(self) -> None:
        asked = self.own
        self.own += self._delay()
        told = self.core
        self.own += self._delay()
        self.offset.measure(asked, told, self.own)
        took = self.own - asked
        parted = 2 * MAX_DRIFT * took  # on the way
        self.fastest = min(self.fastest + parted, took + parted)

    def error(self) -> float:
        return abs(self.core - self.own - self.offset.seconds)

    def _delay(self) -> float:
        """Rarely short: a core answers between two steps."""
        return self._dice.choice([1e-4, 0.01, 0.3]) * self._dice.random()


@pytest.mark.parametrize("turn", range(20))
def test_the_difference_is_known_as_well_as_the_best_exchange_tells(turn: int, seed: int) -> None:
    """Over days, with clocks that drift; the bounds never lose the truth."""
    dice = random.Random(seed + turn)
    ahead = dice.choice([-1e6, 1e6]) * (1.0 + dice.random())
    machines = Machines(dice, ahead, dice.uniform(-0.9, 0.9) * MAX_DRIFT)
    for _ in range(2000):
        machines.exchange()
        assert machines.error() <= machines.fastest + 1e-6
        machines.wait(dice.choice([0.01, 1.0, 300.0]) * dice.random())


@pytest.mark.parametrize("turn", range(5))
def test_of_one_clock_no_time_is_changed_ever(turn: int, seed: int) -> None:
    machines = Machines(random.Random(seed + turn), 0.0, 0.0)
    for _ in range(2000):
        machines.exchange()
        assert machines.offset.seconds == 0.0
        machines.wait(1.0)
    request = make_request("a", [1], arrival_time=0.1, deadline=0.2, end_deadline=0.3)
    assert machines.offset.to_core(request) is request


def test_a_question_that_waits_for_a_step_is_told_from_its_answer_that_does_not() -> None:
    """Steps of 0.4 s, between two of which the core reads and answers at once."""
    offset = ClockOffset()
    offset.measure(100.0, 1100.4, 100.401)
    assert offset.seconds == pytest.approx(1000.0, abs=0.0011)


class Stream:
    """A link to a core whose clock drifts, on which one request runs and others come."""

    def __init__(self, dice: random.Random, ahead: float, drift: float) -> None:
        self.own = 100.0
        self.link = ClientProtocol(lambda: self.own)
        self._dice, self._ahead, self._drift = dice, ahead, drift
        self._number = itertools.count()

    def core(self) -> float:
        return self._ahead + (1.0 + self._drift) * self.own

    def ask(self) -> None:
        """Another request, which the core reads when its step has ended."""
        (part,), _ = self.link.submit([make_request(f"r{next(self._number)}", [1], 1)])
        self.own += self._dice.choice([0.001, 0.4]) * self._dice.random()
        told = self.core()
        self.own += 0.001 * self._dice.random()
        self.link.feed(frames_of([Submitted(part.number, told, [])]))

    def tell(self, *, first: bool = False, last: bool = False) -> CoreOutputs:
        """Outputs of a step, of the request that runs: as they are read."""
        batch = CoreOutputs(["a"], [5], None, self.core())
        self.events = [] if first else self.events
        self.events.append(("queued" if first else "preempted", batch.time))
        if first:
            batch.started = [Started(0, 0, batch.time, events=list(self.events))]
        if last:
            batch.finished = [Finished(0, "length", events=list(self.events))]
        self.own += 0.01 * self._dice.random()
        self.link.feed(frames_of([Outputs(batch)]))
        return self.link.unread.pop()


@pytest.mark.parametrize("turn", range(20))
def test_times_of_a_long_stream_are_in_order_and_never_in_the_future(turn: int, seed: int) -> None:
    """Over hours, mostly without another request that would measure the clock."""
    dice = random.Random(seed + turn)
    ahead = dice.choice([-1e6, 1e6, 0.5, -0.5]) * (1.0 + dice.random())
    stream = Stream(dice, ahead, dice.uniform(-0.4, 0.4) * MAX_DRIFT)
    stream.ask()
    asked = stream.own
    stream.own += dice.random()
    told = [stream.tell(first=True)]
    for _ in range(500):
        stream.own += dice.choice([0.01, 1.0, 100.0]) * dice.random()
        if dice.random() < 0.05:
            stream.ask()
        made = stream.own
        told.append(stream.tell())
        assert made - 0.1 <= told[-1].time <= stream.own
    told.append(stream.tell(last=True))
    times = [batch.time for batch in told]
    assert times == sorted(times)
    (started,), (end,) = told[0].started, told[-1].finished
    assert asked - 1e-6 <= started.scheduled_time <= times[0]
    assert end.events[0][1] == pytest.approx(started.events[0][1], abs=1e-6)
    events = [time for _, time in end.events]
    assert events == sorted(events) and asked - 1e-6 <= events[0] <= events[-1] <= times[-1]


def test_a_small_difference_of_clocks_is_seen_once_an_exchange_is_quick_enough() -> None:
    """Until then the difference is smaller than the time of an exchange."""
    offset = ClockOffset()
    offset.measure(10.0, 10.4, 10.5)
    assert offset.seconds == 0.0
    offset.measure(11.0, 11.301, 11.002)
    assert offset.seconds == pytest.approx(0.3, abs=0.0011)


def test_a_machine_that_slept_is_measured_anew() -> None:
    offset = ClockOffset()
    offset.measure(10.0, 510.0, 10.001)
    assert offset.seconds == pytest.approx(500.0, abs=0.001)
    offset.measure(20.0, 4120.0, 20.001)  # an hour of ours that our clock does not know of
    assert offset.seconds == pytest.approx(4100.0, abs=0.0011)


def test_every_time_of_a_request_and_of_outputs_is_translated() -> None:
    offset = ClockOffset()
    offset.measure(0.0, 100.0, 0.0)
    request = make_request("a", [1], arrival_time=1.0, deadline=2.0, queue_deadline=3.0)
    there = offset.to_core(request)
    times = (there.arrival_time, there.deadline, there.queue_deadline, there.end_deadline)
    assert times == (101.0, 102.0, 103.0, None) and request.arrival_time == 1.0
    batch = CoreOutputs(
        ["a"],
        [5],
        None,
        105.0,
        started=[Started(0, 0, 102.0, 0, {"seats": 1.0}, [("queued", 101.0)])],
        finished=[Finished(0, "stop", waits={"seats": 1.0}, events=[("queued", 101.0)])],
    )
    offset.from_core(batch, 5.0)
    assert (batch.time, batch.started[0].scheduled_time) == (5.0, 2.0)
    for told in (batch.started[0], batch.finished[0]):
        assert told.events == [("queued", 1.0)] and told.waits == {"seats": 1.0}

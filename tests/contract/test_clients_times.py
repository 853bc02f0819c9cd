"""One contract for every way to a core: times are those of the client's clock, both ways."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.core_clients import AHEAD_SECONDS, ELSEWHERE, TWO_CORES, HostedCore, drain
from support.simulate import make_request
from support.spawned import FakeBuild, fake_config

from engine.frontend.session import Session
from engine.llm_engine import LLMEngine
from engine.messages.params import SamplingParams
from engine.messages.requests import CoreOutputs, RequestOutput
from engine.rpc.zmq_client import EngineCoreClient
from engine.sched import Policy

pytestmark = pytest.mark.usefixtures("place")

TWO_CLOCKS_SECONDS = 1.0  # by which the clocks of two cores may be taken for different ones


def opened_in_doubt(kind: str, opened: Any, *given: Any) -> tuple[Any, float]:
    """A client, and by how many seconds it may take its core's clock for another time: no more than
    passed between the question and the answer, which a busy machine may hold up for seconds."""
    began = time.monotonic()
    client = opened(kind, *given)
    doubts = {TWO_CORES: TWO_CLOCKS_SECONDS, ELSEWHERE: time.monotonic() - began}
    return client, doubts.get(kind, 0.0)


class Watch(Policy):
    """First come, first served; notes what it is told of times, by the clock of the core."""

    def __init__(self) -> None:
        self.told: dict[str, tuple[float, float | None]] = {}
        self.arrivals: dict[str, float] = {}

    def rank(self, req: Any, view: Any) -> tuple[int, ...]:
        return (req.arrival,)

    def on_add(self, req: Any, view: Any) -> None:
        left = None if req.deadline is None else req.deadline - view.now
        self.arrivals[req.request_id] = req.arrival_time
        self.told[req.request_id] = (view.now - req.arrival_time, left)


def times_in(batch: CoreOutputs) -> list[float]:
    events = [event for told in (*batch.started, *batch.finished) for event in told.events]
    return [batch.time, *(s.scheduled_time for s in batch.started), *(t for _, t in events)]


def test_every_time_of_outputs_is_the_clients(kind: str, opened: Any) -> None:
    client = opened(kind)
    began = time.monotonic()
    client.add_all([make_request(str(i), [i + 1] * 4, 5, arrival_time=began) for i in range(4)])
    batches: list[CoreOutputs] = []
    while client.has_unfinished():
        batches += client.step()
    times = [each for batch in batches for each in times_in(batch)]
    assert len(times) > 20
    assert began - 1e-6 <= min(times) <= max(times) <= time.monotonic()


def test_times_are_right_of_a_core_that_is_asked_in_the_middle_of_a_step(opened: Any) -> None:
    """It hears of a client when the step is over, which is not taken for a difference of clocks: no
    request arrives later than it did, and no output is dated before it or in the future."""
    watch = Watch()
    build = FakeBuild(step_seconds=0.2, options={"scheduling_policy": watch})
    with HostedCore(build, ahead_seconds=AHEAD_SECONDS) as core:
        busy = EngineCoreClient(core.address)
        busy.add(make_request("busy", [1, 2], 200))
        while not busy.step():
            pass
        client = EngineCoreClient(core.address)
        began = time.monotonic()
        client.add(make_request("a", [3], 3, arrival_time=began))
        times: list[float] = []
        while client.has_unfinished():
            for batch in client.step():
                told, heard = times_in(batch), time.monotonic()
                assert began - 1e-6 <= min(told) <= max(told) <= heard
                times.append(batch.time)
        assert len(times) == 3 and times == sorted(times)
        assert watch.arrivals["a"] - AHEAD_SECONDS <= began + 1e-6
        for each in (client, busy):
            each.shutdown()


def test_a_policy_reads_arrivals_and_deadlines_on_its_own_clock(kind: str, opened: Any) -> None:
    watch = Watch()
    build = FakeBuild(options={"scheduling_policy": watch})
    client, doubt = opened_in_doubt(kind, opened, build)
    began = time.monotonic()
    times = {"arrival_time": began - 7.0}
    client.add_all(
        [
            make_request("a", [1], 2, deadline=began + 50.0, **times),
            make_request("b", [2] * 400, 2, **times),
        ]
    )
    drain(client)
    took = time.monotonic() - began
    age, left = watch.told["a"]
    assert 7.0 - doubt <= age <= 7.0 + took + doubt
    assert left is not None and 50.0 - took - doubt <= left <= 50.0 + doubt
    assert watch.told["b"][1] is None


def drained(engine: LLMEngine) -> dict[str, RequestOutput]:
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    return last


def test_timeouts_and_metrics_are_right_whatever_the_clock_of_the_core(
    kind: str, opened: Any
) -> None:
    client, doubt = opened_in_doubt(kind, opened)
    engine = LLMEngine(Session(fake_config(), client, None, time.monotonic))
    began = time.monotonic()
    engine.pause()
    params = SamplingParams(max_tokens=5)
    engine.add_request("late", [1], params, timeout=doubt + 0.2)
    engine.add_request("waits", [2], params, queue_timeout=doubt + 0.1)
    for name in ("runs", "asked before"):
        options = {"arrival_time": began - 5.0} if name == "asked before" else {}
        engine.add_request(name, [3, 4], params, timeout=600.0, queue_timeout=500.0, **options)
    outputs: dict[str, RequestOutput] = {}
    while len(outputs) < 2:
        outputs |= {output.request_id: output for output in engine.step()}
    assert outputs.keys() == {"late", "waits"}
    engine.resume()
    outputs |= drained(engine)
    ended = time.monotonic()
    reasons = {name: output.outputs[0].finish_reason for name, output in outputs.items()}
    assert reasons == dict.fromkeys(("late", "waits"), "deadline") | dict.fromkeys(
        ("runs", "asked before"), "length"
    )
    for name, seconds in (("late", 0.2), ("waits", 0.1)):
        metrics = outputs[name].metrics
        assert metrics is not None and metrics.finished_time is not None
        assert metrics.finished_time - metrics.arrival_time >= seconds
    for name in ("runs", "asked before"):
        metrics = outputs[name].metrics
        assert metrics is not None
        assert metrics.arrival_time >= began or metrics.arrival_time == began - 5.0
        times = [
            metrics.scheduled_time,
            metrics.first_token_time,
            metrics.last_token_time,
            metrics.finished_time,
        ]
        assert times == sorted(times)  # type: ignore[type-var]
        assert began - doubt <= times[0] <= times[-1] <= ended + doubt  # type: ignore[operator]
        assert sum(metrics.waits.values()) == pytest.approx(
            metrics.events[1][1] - metrics.events[0][1], abs=1e-6
        )

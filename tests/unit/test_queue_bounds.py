"""Bounds of the queue, deadlines, deferral and the watch, as requests and their users meet them."""

from __future__ import annotations

import logging

import pytest
from support.fakes import FakeClock, scheduled_session
from support.simulate import make_request, make_run

from engine.errors import ConfigError, RefusedError, RequestError
from engine.frontend.session import Session
from engine.llm_engine import LLMEngine
from engine.messages.params import SamplingParams
from engine.messages.requests import RequestOutput
from engine.sched import Defer, Fit, OnRefuse, Policy, Refuse, Resource


class Tick(FakeClock):
    """An eighth of a second later at each reading."""

    def __call__(self) -> float:
        self.now += 0.125
        return self.now


def submit(session: Session, name: str, num_prompt: int = 4, n: int = 1, **options) -> None:
    params = SamplingParams(max_tokens=8, n=n)
    prompt = [len(name)] * num_prompt
    session.submit(session.inputs.process(name, prompt, params, options))


def drain(session: Session) -> dict[str, RequestOutput]:
    last = {}
    for _ in range(2000):
        if not session.has_unfinished:
            return last
        last |= {output.request_id: output for output in session.step()}
    raise AssertionError("the requests do not end")


# Bounded queues


@pytest.mark.behaviour(130)
def test_a_full_queue_refuses_with_an_estimate_of_the_wait() -> None:
    clock = FakeClock(0.0)
    run = make_run(clock=clock, max_num_seqs=1, max_waiting_requests=2)
    for name in "abc":
        run.add(make_request(name, [ord(name)] * 4, 4))
        clock.now += 1.0
        run.step()  # one runs, two wait
    with pytest.raises(RefusedError, match=r"2 requests are waiting.*try again later") as first:
        run.add(make_request("d", [4] * 4, 4))
    assert first.value.retry_after is None  # nobody has left the queue but the first yet
    while run.scheduler.roster.num_queued == 2:
        clock.now += 1.0
        run.step()
    run.add(make_request("d", [4] * 4, 4))
    with pytest.raises(RefusedError, match=r"try again in about [0-9.]+ s") as second:
        run.add(make_request("e", [5] * 4, 4))
    assert second.value.retry_after == 2 * 4.0  # two wait, each runs for four steps
    stats = run.scheduler.make_stats()
    assert stats is not None and stats.num_refused == 2
    run.drain()
    assert set(run.finished) == set("abcd")


def test_a_bound_on_waiting_tokens_lets_one_long_prompt_in() -> None:
    run = make_run(max_num_seqs=1, max_waiting_tokens=50)
    run.add(make_request("long", [1] * 80, 4))  # alone it may be as long as it likes
    run.step()
    run.add(make_request("a", [2] * 30, 4))
    with pytest.raises(RefusedError, match="60 prompt tokens would wait, the limit is 50"):
        run.add(make_request("b", [3] * 30, 4))
    run.add(make_request("c", [3] * 20, 4))
    run.drain()


@pytest.mark.parametrize("name", ["max_waiting_requests", "max_waiting_tokens", "stalled_steps"])
def test_bounds_are_at_least_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0, must be at least 1"):
        make_run(**{name: 0})


def test_a_refused_sequence_takes_its_siblings_with_it() -> None:
    """n = 4 where two have room: nothing stays behind, neither here nor in the core."""
    session = scheduled_session(FakeClock(), max_waiting_requests=2)
    with pytest.raises(RefusedError, match="the queue is full"):
        submit(session, "a", n=4)
    assert not session.has_unfinished and not session.client.stats().num_waiting
    assert sum(session.outputs.counts.finished.values()) == 0
    submit(session, "a", n=2)
    assert drain(session)["a"].finished


class Picky(Policy):
    def rank(self, req, view):
        return (req.arrival,)

    def on_add(self, req, view):
        if req.num_prompt > 8:
            return Refuse("no long prompts today")
        return Defer(view.now + 2.0) if req.num_prompt == 8 else None


def test_the_refusal_of_a_policy_reaches_the_caller() -> None:
    engine = LLMEngine(scheduled_session(FakeClock(), scheduling_policy=Picky))
    with pytest.raises(RefusedError, match="request '0/a' was refused: no long prompts today"):
        engine.add_request("a", [1] * 9, SamplingParams(max_tokens=4))
    assert not engine.has_unfinished_requests()
    engine.add_request("a", [1] * 4, SamplingParams(max_tokens=4))
    while engine.has_unfinished_requests():
        engine.step()
    assert issubclass(RefusedError, RequestError) and issubclass(RefusedError, ValueError)


# Deadlines


def test_a_total_deadline_ends_a_running_request_with_what_it_has() -> None:
    session = scheduled_session(Tick(0.0), max_num_seqs=1)
    session.submit(
        session.inputs.process("a", [1] * 4, SamplingParams(max_tokens=100), {"timeout": 4.0})
    )
    output = drain(session)["a"]
    completion = output.outputs[0]
    assert (output.finished, completion.finish_reason) == (True, "deadline")
    assert completion.error == "the request was not finished by its deadline"
    assert completion.code == "deadline_exceeded"
    assert 0 < len(completion.token_ids) < 100
    assert output.metrics is not None and output.metrics.finished_time is not None
    assert 4.0 <= output.metrics.finished_time - output.metrics.arrival_time < 5.0
    assert session.outputs.counts.finished == {"deadline": 1}


def test_a_queue_deadline_ends_only_who_has_not_started() -> None:
    session = scheduled_session(Tick(0.0), max_num_seqs=1)
    submit(session, "runs", queue_timeout=1.0)
    session.step()
    submit(session, "waits", queue_timeout=1.0)
    outputs = drain(session)
    assert outputs["runs"].outputs[0].finish_reason == "length"
    waits = outputs["waits"]
    assert waits.outputs[0].finish_reason == "deadline" and waits.outputs[0].token_ids == []
    assert waits.outputs[0].error == "the request was not started by its deadline"
    assert waits.metrics is not None and waits.metrics.scheduled_time is None
    assert sum(waits.metrics.waits.values()) >= 1.0 - 0.125
    assert session.client.stats().num_expired == 1


def test_a_deadline_that_passes_while_nothing_runs() -> None:
    """Everything is deferred or paused: no plan brings its end, and it comes all the same."""
    session = scheduled_session(Tick(0.0))
    session.client.call("pause")
    submit(session, "a", queue_timeout=3.0)
    submit(session, "b", timeout=2.0)
    outputs = drain(session)
    assert {name: o.outputs[0].finish_reason for name, o in outputs.items()} == {
        "a": "deadline",
        "b": "deadline",
    }


def test_every_one_of_n_sequences_meets_the_deadline() -> None:
    session = scheduled_session(Tick(0.0), max_num_seqs=1)
    submit(session, "a", n=3, timeout=2.5)
    output = drain(session)["a"]
    reasons = [completion.finish_reason for completion in output.outputs]
    assert reasons[0] == "length" and set(reasons[1:]) <= {"length", "deadline"}
    assert reasons[2] == "deadline"


@pytest.mark.parametrize("name", ["timeout", "queue_timeout"])
@pytest.mark.parametrize("value", [0, -1, 0.0, float("nan"), float("inf"), "1"])
def test_timeouts_are_finite_and_positive(name: str, value: object) -> None:
    session = scheduled_session(FakeClock())
    with pytest.raises(RequestError, match=f"{name} is .* must be a finite number of seconds"):
        submit(session, "a", **{name: value})
    assert not session.has_unfinished


# Deferral


def test_a_deferred_request_waits_until_its_time_and_says_so() -> None:
    session = scheduled_session(Tick(0.0), scheduling_policy=Picky)
    submit(session, "a", num_prompt=8)
    output = drain(session)["a"]
    metrics = output.metrics
    assert metrics is not None and metrics.scheduled_time is not None
    assert metrics.scheduled_time - metrics.arrival_time >= 2.0
    assert metrics.waits["deferred"] >= 2.0
    assert [event for event, _ in metrics.events] == ["queued", "scheduled"]
    queued, scheduled = (time for _, time in metrics.events)
    assert sum(metrics.waits.values()) == scheduled - queued


# What else users see


def test_n_sequences_add_up_their_waits_and_events() -> None:
    session = scheduled_session(Tick(0.0), max_num_seqs=1)
    submit(session, "a", n=2)
    metrics = drain(session)["a"].metrics
    assert metrics is not None
    assert [event for event, _ in metrics.events] == ["queued", "queued", "scheduled", "scheduled"]
    assert metrics.events == sorted(metrics.events, key=lambda event: event[1])
    assert metrics.waits["seats"] > 0.0


def test_an_aborted_request_tells_why_it_waited_as_far_as_its_outputs_said() -> None:
    """Its last output waits for nothing: of one that has not started nothing is known."""
    session = scheduled_session(Tick(0.0), max_num_seqs=1)
    for name in "abc":
        submit(session, name)
    started = next(out for _ in range(20) for out in session.step() if out.request_id == "b")
    outputs = {output.request_id: output for output in session.abort(["b", "c"])}
    assert {o.outputs[0].finish_reason for o in outputs.values()} == {"abort"}
    running, waiting = outputs["b"].metrics, outputs["c"].metrics
    assert running is not None and running.waits["seats"] > 0.0
    assert running.waits == started.metrics.waits and running.events == started.metrics.events
    assert waiting is not None and (waiting.waits, waiting.events) == ({}, [])
    drain(session)


# The watch


class Never(Resource):
    name = "gate"
    on_refuse = OnRefuse.CLOSE

    def fit(self, req, num_tokens, step):
        return Fit(0, "the gate is shut") if "head" in req.request_id else Fit(num_tokens)


def test_the_watch_names_the_blocked_head_and_why(caplog: pytest.LogCaptureFixture) -> None:
    session = scheduled_session(FakeClock(), resources=(Never(),), stalled_steps=5)
    submit(session, "head")
    submit(session, "behind")
    with caplog.at_level(logging.WARNING, logger="engine.sched"):
        for _ in range(12):
            session.step()
    said = "request 0/head and 1 others after it wait for: the gate is shut"
    assert caplog.text.count(said) == 1
    assert session.client.stats().blocked == "0/head: the gate is shut"
    session.abort(["head"])
    assert drain(session)["behind"].outputs[0].finish_reason == "length"
    assert session.client.stats().blocked == ""

"""What a front end asks of a core elsewhere waits for none of its steps: aborts, the log line."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.core_clients import WAIT_SECONDS, HostedCore
from support.fakes import FakeClock
from support.gated import Gate, gated_core
from support.simulate import expected
from support.spawned import fake_config
from support.words import word, words

from engine.frontend.session import Session
from engine.messages.params import SamplingParams
from engine.messages.requests import RequestOutput
from engine.rpc.zmq_client import EngineCoreClient

pytestmark = pytest.mark.usefixtures("place")

PROMPTS = {"a": [1, 2], "b": [3, 4]}


@pytest.fixture
def gated() -> Iterator[tuple[HostedCore, Gate]]:
    with gated_core() as pair:
        yield pair


@pytest.fixture
def gate(gated: tuple[HostedCore, Gate]) -> Gate:
    return gated[1]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(time.monotonic())


@pytest.fixture
def session(gated: tuple[HostedCore, Gate], clock: FakeClock) -> Iterator[Session]:
    """A front end around the core whose steps are gated, with a log line."""
    core, gate = gated
    client = EngineCoreClient(core.address)
    session = Session(replace(fake_config(), disable_log_stats=False), client, words(), clock)
    yield session
    gate.open()
    session.shutdown()


def promptly(call: Callable[[], Any]) -> Any:
    """What a call returns that is to wait for nothing; an error if it waits."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    thread.join(WAIT_SECONDS / 3)
    assert answers, "it waits for a step of the core"
    return answers[0]


def next_outputs(session: Session) -> dict[str, RequestOutput]:
    while not (outputs := session.step()):
        pass
    return {output.request_id: output for output in outputs}


def start_both(session: Session, gate: Gate, stop: str) -> None:
    """Two requests, one with a stop string, whose first tokens were read."""
    process = session.inputs.process
    asked = [
        process("a", PROMPTS["a"], SamplingParams(max_tokens=50, stop=[stop]), {}),
        process("b", PROMPTS["b"], SamplingParams(max_tokens=50), {}),
    ]
    assert not session.submit_all(asked)
    gate.let()
    assert next_outputs(session).keys() == {"a", "b"}


def test_a_stop_string_holds_up_no_other_stream(session: Session, gate: Gate) -> None:
    """Nothing is asked of the core that it answers after its next step only."""
    stop = word(expected(PROMPTS["a"], 3)[2])
    start_both(session, gate, stop)
    ended: RequestOutput | None = None
    while ended is None:
        gate.let()
        outputs = promptly(lambda: next_outputs(session))
        assert "b" in outputs
        ended = outputs.get("a") if outputs["a"].finished else None
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", stop)
    gate.open()
    while session.has_unfinished:
        outputs = next_outputs(session)
    assert outputs["b"].outputs[0].token_ids == expected(PROMPTS["b"], 50)
    stats = session.client.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)


def test_an_abort_waits_for_no_step(session: Session, gate: Gate) -> None:
    start_both(session, gate, "never")
    (output,) = promptly(lambda: session.abort(["a", "nobody"]))
    assert output.request_id == "a" and output.outputs[0].finish_reason == "abort"
    gate.open()
    while session.has_unfinished:
        outputs = next_outputs(session)
        assert "a" not in outputs
    assert outputs["b"].outputs[0].token_ids == expected(PROMPTS["b"], 50)


def test_an_aborted_id_serves_a_new_request_at_once(session: Session, gate: Gate) -> None:
    """Whatever still comes of the old one is not the new one's."""
    start_both(session, gate, "never")
    promptly(lambda: session.abort(["a"]))
    gate.open()
    prompt = [7, 8, 9]
    session.submit(session.inputs.process("a", prompt, SamplingParams(max_tokens=20), {}))
    ends: dict[str, RequestOutput] = {}
    while session.has_unfinished:
        ends |= next_outputs(session)
    assert ends["a"].outputs[0].token_ids == expected(prompt, 20)
    assert ends["b"].outputs[0].token_ids == expected(PROMPTS["b"], 50)


def test_the_log_line_holds_up_no_stream(
    session: Session, gate: Gate, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It says what the core told last; the core is asked, and answers when it comes to it."""
    start_both(session, gate, "never")
    with caplog.at_level(logging.INFO, logger="engine.observe"):
        for _ in range(12):
            clock.now += 1.0
            gate.let()
            assert promptly(lambda: next_outputs(session)).keys() == {"a", "b"}
        gate.open()
        while session.has_unfinished:
            next_outputs(session)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and all("running 2, waiting 0" in line for line in lines)

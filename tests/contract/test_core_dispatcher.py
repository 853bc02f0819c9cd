"""What clients ask of a core: how large it may be, what is answered, who is looked after."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.core_clients import HostedCore, RawClient
from support.live_core import wait_until
from support.patience import WAIT_SECONDS
from support.simulate import expected, make_request
from support.spawned import FakeBuild

from engine.errors import WireError
from engine.ipc.codec import MessageEncoder, is_tagged
from engine.messages.requests import CoreOutputs, Finished
from engine.messages.wire import (
    MAX_CALL_BYTES,
    MAX_HELLO_BYTES,
    MAX_SUBMIT_REQUESTS,
    PROTOCOL_VERSION,
    Abort,
    Answer,
    Call,
    Credit,
    Fault,
    Hello,
    Outputs,
    Ping,
    Submit,
    Submitted,
    Welcome,
)
from engine.observe.logs import THROTTLE_SECONDS, Throttle
from engine.rpc.sessions import NUM_CREDITS
from engine.rpc.zmq_client import EngineCoreClient
from engine.sched import Scheduler
from engine.sched.policy import Policy

pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture
def member(core: HostedCore) -> Iterator[RawClient]:
    """A client that was welcomed."""
    with RawClient(core.address.data) as client:
        greet(client, core)
        yield client


def is_submitted(client: RawClient, number: int) -> bool:
    """Is the next message the answer to a submit, with nothing refused?"""
    answer = client.receive()
    return isinstance(answer, Submitted) and (answer.number, answer.refusals) == (number, [])


def greet(client: RawClient, core: HostedCore) -> None:
    client.send(Hello(PROTOCOL_VERSION, core.address.token))
    assert isinstance(client.receive(), Welcome)


def answer_of(client: RawClient) -> Any:
    """The next message that is no outputs."""
    while isinstance(message := client.receive(), Outputs):
        pass
    return message


def tokens_of(client: RawClient) -> tuple[list[int], Finished]:
    """What comes until somebody has ended, of a client that has one request."""
    tokens: list[int] = []
    while not (batch := next_batch(client)).finished:
        tokens += batch.token_ids
    return tokens + batch.token_ids, batch.finished[0]


def next_batch(client: RawClient) -> CoreOutputs:
    while not isinstance(message := client.receive(), Outputs):
        assert message is not None
    client.send(Credit(1))
    return message.batch


# -- how large it may be


def test_a_stranger_is_read_only_if_it_says_little(core: HostedCore) -> None:
    hello = Hello(PROTOCOL_VERSION, core.address.token, "x" * MAX_HELLO_BYTES)
    with RawClient(core.address.data) as stranger:
        stranger.send(hello)
        answer = stranger.receive()
        assert isinstance(answer, Fault) and f"the limit is {MAX_HELLO_BYTES}" in answer.message
        greet(stranger, core)


def test_only_requests_and_their_ids_may_be_large(member: RawClient) -> None:
    member.send(Call(0, "echo", ["x" * MAX_CALL_BYTES]))
    answer = member.receive()
    assert isinstance(answer, Fault) and f"the limit is {MAX_CALL_BYTES}" in answer.message
    member.send(Call(1, "echo", ["x" * (MAX_CALL_BYTES - 100)]))
    assert len(member.receive().value) == MAX_CALL_BYTES - 100
    many = [1] * (MAX_CALL_BYTES + 10)
    member.send(Submit(2, [make_request("a", many, 1)]))
    (refusal,) = member.receive().refusals
    assert refusal.failure.kind == "RequestError"
    member.send(Abort(["x" * 2000] * 1000))
    member.send(Call(3, "echo", [1]))
    assert member.receive() == Answer(3, 1)


def test_a_message_has_no_more_requests_than_can_be_answered(member: RawClient) -> None:
    wrong = [make_request(str(i), [], 1) for i in range(MAX_SUBMIT_REQUESTS + 1)]
    member.send(Submit(0, wrong))
    answer = member.receive()
    assert isinstance(answer, Fault) and f"of length <= {MAX_SUBMIT_REQUESTS}" in answer.message
    member.send(Submit(1, wrong[1:]))
    assert len(member.receive().refusals) == MAX_SUBMIT_REQUESTS


def test_a_client_is_told_itself_what_is_too_large(core: HostedCore) -> None:
    client = EngineCoreClient(core.address)
    with pytest.raises(WireError, match=f"the limit is {MAX_CALL_BYTES}"):
        client.call("echo", "x" * MAX_CALL_BYTES)
    assert client.call("echo", "x") == "x"
    client.shutdown()


# -- what is answered


@pytest.mark.parametrize("value", [object(), "x" * (2 * MAX_CALL_BYTES)], ids=["object", "large"])
def test_an_answer_that_cannot_travel_is_a_failure(
    value: Any, core: HostedCore, member: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core.inproc, "call", lambda name, *args: value)
    member.send(Call(7, "stats"))
    answer = member.receive()
    assert isinstance(answer, Answer) and answer.number == 7 and answer.failure is not None
    assert answer.failure.kind == "EngineError"
    assert "Call to stats method failed: its answer: " in answer.failure.message
    assert "cannot be sent to another process" in answer.failure.message


def test_an_error_that_says_too_much_or_what_is_no_text_is_told_all_the_same(
    core: HostedCore, member: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise LookupError("no \udcff" + "x" * 20_000)

    monkeypatch.setattr(core.inproc, "call", fail)
    monkeypatch.setattr(core.inproc, "add", fail)
    member.send(Call(0, "stats"))
    assert member.receive().failure.message.startswith("LookupError: no \\udcffxxx")  # as text
    member.send(Submit(1, [make_request(str(i), [1], 1) for i in range(MAX_SUBMIT_REQUESTS)]))
    assert len(member.receive().refusals) == MAX_SUBMIT_REQUESTS


class HandsOverObjects(Scheduler):
    """What it says of the end of request b cannot travel."""

    def finish_requests(self, *args: Any) -> list[Any]:
        finished = super().finish_requests(*args)
        for request_id, _, end in finished:
            if request_id == "b":
                end.kv_transfer_params = {"handle": object()}
        return finished


def test_an_abort_is_told_whatever_is_to_be_told_of_it() -> None:
    """A connector of the user's own may hand over anything."""
    told: dict[str, Finished] = {}
    with (
        HostedCore(FakeBuild(options={"scheduler_cls": HandsOverObjects})) as core,
        RawClient(core.address.data) as member,
    ):
        greet(member, core)
        member.send(Call(0, "pause"))
        member.send(Submit(1, [make_request(name, [1], 9) for name in "abc"]))
        member.send(Abort(list("abc")))
        assert member.receive() == Answer(0) and is_submitted(member, 1)
        while len(told) < 3:
            batch = next_batch(member)
            told |= {batch.request_ids[end.index]: end for end in batch.finished}
    assert {name: end.reason for name, end in told.items()} == {
        "a": "abort",
        "b": "error",
        "c": "abort",
    }
    assert "cannot be sent" in told["b"].message


def test_what_waits_for_credits_comes_in_order_whatever_is_asked_meanwhile(
    core: HostedCore, member: RawClient
) -> None:
    """An abort of who has ended changes nothing, and a second life of its id begins behind it."""
    num_tokens = NUM_CREDITS + 40
    member.send(Submit(0, [make_request("a", [1, 2], num_tokens)]))
    assert is_submitted(member, 0)
    assert wait_until(lambda: not core.inproc.num_unfinished())
    member.send(Abort(["a"]))
    member.send(Submit(1, [make_request("a", [3], 5)]))
    assert answer_of(member).refusals == []
    member.send(Credit(NUM_CREDITS))
    for wanted in (expected([1, 2], num_tokens)[NUM_CREDITS:], expected([3], 5)):
        tokens, end = tokens_of(member)
        assert (tokens, end.reason) == (wanted, "length")


def test_an_id_is_refused_until_the_core_has_told_its_end(
    core: HostedCore, member: RawClient
) -> None:
    member.send(Call(0, "pause"))
    requests = [make_request("a", [1], 9)]
    for number in (1, 2):
        member.send(Submit(number, requests))
    member.send(Abort(["a"]))
    member.send(Submit(3, requests))
    assert member.receive() == Answer(0)
    answers = [answer_of(member) for _ in range(3)]
    refused = [[each.failure.message for each in answer.refusals] for answer in answers]
    # The third may have come behind the step that told the end of the first.
    assert not refused[0] and "'a' is in use" in refused[1][0] and len(refused[2]) < 2


def test_who_says_hello_again_starts_anew(core: HostedCore, member: RawClient) -> None:
    """A client that reconnects with the same routing id starts anew, too."""
    member.send(Call(0, "pause"))
    member.send(Submit(1, [make_request("a", [1], 9)]))
    assert member.receive() == Answer(0) and is_submitted(member, 1)
    greet(member, core)
    member.send(Call(0, "resume"))
    member.send(Submit(1, [make_request("a", [5], 9)]))
    assert member.receive() == Answer(0) and is_submitted(member, 1)
    assert tokens_of(member)[0] == expected([5], 9)


@pytest.mark.parametrize("socket", ["data", "control"])
def test_a_flood_of_rubbish_fills_no_log(
    socket: str, core: HostedCore, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    rubbish = [b"rubbish", b"x" * (MAX_HELLO_BYTES + 1)]
    with (
        RawClient(getattr(core.address, socket)) as client,
        caplog.at_level(logging.WARNING, "engine.core"),
    ):
        for frame in rubbish * 100:
            client.send_bytes(frame)
            assert isinstance(client.receive(), Fault)
    lines = [line for line in caplog.messages if "refused" in line]
    assert 1 <= len(lines) <= 2 + (time.monotonic() - began) / THROTTLE_SECONDS


def test_what_was_held_back_is_counted() -> None:
    throttle = Throttle()
    seen = [throttle.admit(now) for now in (10.0, 10.1, 10.9, 11.0, 11.5, 30.0, 40.0)]
    assert seen == ["", None, None, " (2 more before it)", None, " (1 more before it)", ""]


# -- who is looked after


@pytest.mark.parametrize("lacks", ["credits", "steps"])
def test_who_vanishes_while_nothing_is_sent_to_it_leaves_nothing(lacks: str) -> None:
    with HostedCore(FakeBuild(), num_credits=1) as core:
        with RawClient(core.address.data) as gone:
            greet(gone, core)
            gone.send(Submit(0, [make_request("a", [1], 400)]))
            assert is_submitted(gone, 0)
            if lacks == "steps":
                gone.send(Call(1, "pause"))
                assert answer_of(gone) == Answer(1)
        health = core.host.health
        assert wait_until(
            lambda: not (health().num_clients or health().num_unfinished), WAIT_SECONDS
        )


class Stuck(Policy):
    """Takes a request only when it is let go."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def rank(self, req: Any, view: Any) -> tuple[Any, ...]:
        return ()

    def on_add(self, req: Any, view: Any) -> None:
        assert self.may_go_on.wait(WAIT_SECONDS)


def test_a_hang_in_what_was_asked_is_seen_from_outside() -> None:
    policy = Stuck()
    with (
        HostedCore(FakeBuild(options={"scheduling_policy": policy})) as core,
        RawClient(core.address.data) as client,
        RawClient(core.address.control) as asker,
    ):
        greet(client, core)
        client.send(Submit(0, [make_request("a", [1], 5)]))

        def seconds_in_step() -> float:
            asker.send(Ping(core.address.token))
            seconds: float = asker.receive().seconds_in_step
            return seconds

        assert wait_until(lambda: seconds_in_step() > 0.1)
        policy.may_go_on.set()
        assert tokens_of(client)[0] == expected([1], 5)
        assert wait_until(lambda: seconds_in_step() == 0.0)


def test_a_frame_says_what_it_is_before_it_is_read() -> None:
    frame = MessageEncoder().encode(Submit(0, []))
    array_16 = b"\xdc\x00\x03" + frame[1:]
    array_32 = b"\xdd\x00\x00\x00\x03" + frame[1:]
    string_8 = frame[:1] + b"\xd9\x06" + frame[2:]
    for each in (frame, array_16, array_32, string_8):
        assert is_tagged(each, "submit") and not is_tagged(each, "abort")
    for each in (b"", b"\xdc", frame[:3], MessageEncoder().encode(Call(1, "submit"))):
        assert not is_tagged(each, "submit")

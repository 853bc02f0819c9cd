"""A core behind sockets: strangers, rubbish, slow readers, deadlines of its own, the end."""

from __future__ import annotations

import logging
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import zmq
from support.core_clients import HostedCore, RawClient, drain, read
from support.gated import gated_core
from support.patience import WAIT_SECONDS
from support.simulate import expected, make_request
from support.spawned import FakeBuild, fake_config
from support.wire_frames import HOSTILE, mutated, recorded

from engine.config.core import PollConfig
from engine.config.engine import EngineConfig
from engine.errors import EngineDeadError, RefusedError
from engine.ipc import sockets
from engine.ipc.address import Address
from engine.messages.requests import Finished
from engine.messages.wire import (
    PROTOCOL_VERSION,
    Answer,
    Call,
    Credit,
    Dead,
    Fault,
    Hello,
    Outputs,
    Ping,
    Shutdown,
    Submit,
    Welcome,
)
from engine.rpc.health import HealthMonitor
from engine.rpc.sessions import NUM_CREDITS
from engine.rpc.zmq_client import EngineCoreClient

pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture
def raw(core: HostedCore) -> Iterator[RawClient]:
    with RawClient(core.address.data) as client:
        yield client


# -- strangers and rubbish


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        (Call(0, "echo", [1]), "the first message of a client must be hello"),
        (Hello(PROTOCOL_VERSION, b"0123456789abcdef"), "the token is not that of this core"),
        (Hello(PROTOCOL_VERSION, b""), "the token is not that of this core"),
        (Hello(PROTOCOL_VERSION + 1, b""), "the token is not"),
    ],
)
def test_strangers_are_told_so(raw: RawClient, hello: Any, message: str) -> None:
    raw.send(hello)
    answer = raw.receive()
    assert isinstance(answer, Fault) and message in answer.message


def test_another_version_is_told_so(core: HostedCore, raw: RawClient) -> None:
    """Also the one before, whose hello looks the same; what it says next is not read."""
    for version in (2, 4):
        raw.send(Hello(version, core.address.token))
        answer = raw.receive()
        assert isinstance(answer, Fault)
        told = f"the client uses version {version} of the protocol, this core uses version 3"
        assert told in answer.message
    raw.send_bytes(b"\x93\xa5abort\x02\x92\xa1a\xa1b")  # of version 1, from no client
    assert isinstance(raw.receive(), Fault)


def test_a_client_is_told_why_it_was_refused(core: HostedCore) -> None:
    told = "the core refused this client: .*the token is not that of this core"
    with pytest.raises(EngineDeadError, match=told):
        EngineCoreClient(Address(core.address.data, b"wrong"))


def test_hostile_frames_cost_their_sender_an_error_and_nothing_else(
    core: HostedCore, seed: int
) -> None:
    """Rubbish before and after a handshake, between the requests of others."""
    dice, seeds = random.Random(seed), [*recorded().values(), *HOSTILE[:17]]
    client = EngineCoreClient(core.address)
    with RawClient(core.address.data) as stranger, RawClient(core.address.data) as member:
        member.send(Hello(PROTOCOL_VERSION, core.address.token))
        assert isinstance(member.receive(), Welcome)
        for turn in range(20):
            client.add_all([make_request(f"{turn}/{i}", [turn + 1, i + 1], 5) for i in range(4)])
            for sender in (stranger, member):
                for _ in range(50):
                    sender.send_bytes(mutated(dice.choice(seeds), dice))
                sender.send_bytes(*[b"frame"] * dice.randrange(2, 5))
            tokens, _ = drain(client)
            assert tokens == {f"{turn}/{i}": expected([turn + 1, i + 1], 5) for i in range(4)}
        assert isinstance(stranger.receive(), Fault)
    assert client.call("echo", "alive") == "alive"
    client.shutdown()


def test_rubbish_at_the_bare_socket_is_ignored(core: HostedCore) -> None:
    """Not even ZeroMQ: as a port scanner would."""
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"\xff" * 5000, b""):
        for address in (core.address.data, core.address.control):
            with socket.socket(socket.AF_UNIX) as plain:
                plain.connect(address.removeprefix("ipc://"))
                plain.sendall(garbage)
    client = EngineCoreClient(core.address)
    client.add(make_request("a", [1], 5))
    assert drain(client)[0] == {"a": expected([1], 5)}
    client.shutdown()


# -- slow readers


def test_a_slow_reader_is_bounded_and_named_and_blocks_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        HostedCore(FakeBuild(step_seconds=0.001), max_backlog_bytes=3000) as core,
        RawClient(core.address.data) as slow,
        caplog.at_level(logging.WARNING),
    ):
        slow.send(Hello(PROTOCOL_VERSION, core.address.token, "sleepy"))
        assert isinstance(slow.receive(), Welcome)
        slow.send(Submit(0, [make_request("slow", [1, 2], 500)]))
        quick = EngineCoreClient(core.address)
        name = quick.id_prefix + "quick"
        quick.add(make_request(name, [3], 400))
        assert drain(quick)[0] == {name: expected([3], 400)}
        until = time.monotonic() + WAIT_SECONDS
        while quick.stats().num_running and time.monotonic() < until:
            time.sleep(0.01)
        assert "bytes of outputs waited for client 0 (sleepy)" in caplog.text
        batches = read_outputs(slow, NUM_CREDITS)
        assert [token for b in batches for token in b.token_ids] == expected([1, 2], 500)[:256]
        assert slow.receive(0.1) is None  # not a message without a credit
        slow.send(Credit(1))
        (end,) = read_outputs(slow, 1)[0].finished
        assert end.reason == "abort" and "client 0 (sleepy) to read them" in end.message
        quick.shutdown()


def read_outputs(client: RawClient, count: int) -> list[Any]:
    """So many batches; other messages are passed over."""
    batches: list[Any] = []
    while len(batches) < count:
        message = client.receive()
        assert message is not None
        if isinstance(message, Outputs):
            batches.append(message.batch)
    return batches


def test_outputs_wait_for_credits_and_come_in_order(core: HostedCore, raw: RawClient) -> None:
    raw.send(Hello(PROTOCOL_VERSION, core.address.token))
    raw.send(Submit(0, [make_request("a", [7], 500)]))
    raw.receive()
    batches = read_outputs(raw, NUM_CREDITS)
    raw.send(Call(1, "echo", [5]))
    assert raw.receive() == Answer(1, 5)  # what was asked is answered without a credit
    while sum(len(batch.token_ids) for batch in batches) < 500:
        raw.send(Credit(60))
        batches += read_outputs(raw, min(60, 500 - len(batches)))
    assert [token for batch in batches for token in batch.token_ids] == expected([7], 500)


def test_who_vanishes_without_a_word_leaves_nothing(core: HostedCore) -> None:
    client = EngineCoreClient(core.address)
    with RawClient(core.address.data) as gone:
        gone.send(Hello(PROTOCOL_VERSION, core.address.token))
        gone.send(Submit(0, [make_request(f"x{i}", [i + 1], 500) for i in range(8)]))
        read_outputs(gone, 1)
    until = time.monotonic() + WAIT_SECONDS
    while client.stats().num_running and time.monotonic() < until:
        time.sleep(0.01)
    counts = client.stats()
    assert (counts.num_running, counts.num_waiting, counts.kv_usage) == (0, 0, 0.0)
    client.shutdown()


def test_who_leaves_in_the_middle_of_a_step_is_not_complained_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        HostedCore(FakeBuild(step_seconds=0.1)) as core,
        caplog.at_level(logging.WARNING),
    ):
        stays = EngineCoreClient(core.address)
        # A request of its own each time: what comes by two connections comes in no order, and an
        # id is in use until the abort of the one before has come.
        for name in ("a", "b", "c"):
            client = EngineCoreClient(core.address)
            client.add(make_request(name, [1], 400))
            while not client.step():
                pass
            client.abort([name])
            client.shutdown()
        assert stays.call("echo", 1) == 1
        stays.shutdown()
    assert not caplog.text


# -- health and the end


def control(core: HostedCore) -> RawClient:
    return RawClient(core.address.control)


def test_health_is_told_while_a_step_runs() -> None:
    with gated_core() as (core, gate), control(core) as asker:
        asker.send(Ping(core.address.token))
        idle = asker.receive()
        assert (idle.state, idle.seconds_in_step, idle.num_unfinished) == ("ready", 0.0, 0)
        client = EngineCoreClient(core.address)
        client.add(make_request("a", [1], 2))
        gate.wait_until_in_step()
        health = idle
        while not health.seconds_in_step:
            asker.send(Ping(core.address.token))
            health = asker.receive()
        assert (health.num_unfinished, health.num_clients) == (1, 1)
        for wrong in (Ping(b"wrong"), Shutdown(b"wrong"), Shutdown(core.address.token, -1.0)):
            asker.send(wrong)
            assert isinstance(asker.receive(), Fault)
        for frame in HOSTILE[:17]:
            asker.send_bytes(frame)
            assert isinstance(asker.receive(), Fault)
        gate.open()
        assert drain(client)[0] == {"a": expected([1], 2)}
        client.shutdown()


def test_shutdown_drains_refuses_what_is_new_and_says_so() -> None:
    with HostedCore(FakeBuild(step_seconds=0.005)) as core, control(core) as asker:
        client = EngineCoreClient(core.address)
        client.add_all([make_request(str(i), [i + 1], 40) for i in range(4)])
        asker.send(Shutdown(core.address.token, 20.0))
        assert asker.receive().state == "draining"
        with pytest.raises(RefusedError, match="is shutting down and takes no more requests"):
            client.add(make_request("late", [1], 1))
        tokens, ends = drain(client)
        assert tokens == {str(i): expected([i + 1], 40) for i in range(4)}
        assert {end.reason for end in ends.values()} == {"length"}
        with pytest.raises(EngineDeadError, match="the engine core was shut down"):
            for _ in range(100):
                client.step()
        client.shutdown()


def test_when_time_is_up_whoever_is_left_is_told() -> None:
    with HostedCore(FakeBuild(step_seconds=0.01)) as core:
        client = EngineCoreClient(core.address)
        client.add_all([make_request(str(i), [i + 1], 400) for i in range(4)])
        core.host.drain(0.05)
        _, ends = drain(client)
        assert [(end.reason, end.message) for end in ends.values()] == [
            ("abort", "the core was shut down")
        ] * 4
        client.shutdown()


def test_silence_is_counted_in_questions_not_by_the_clock() -> None:
    """A laptop that slept for an hour asks once more before it gives up."""
    with HostedCore(FakeBuild()) as core:
        context: zmq.Context[Any] = zmq.Context()
        heart = HealthMonitor(context, core.address, 2.0)
        now = 1000.0
        assert heart.check(now) is None
        time.sleep(0.2)
        for hours in range(1, 6):
            assert heart.check(now + 3600 * hours) is None
            time.sleep(0.05)
        sockets.close(heart.socket)
        context.term()


def test_a_poll_while_decoding_waits_only_if_asked_to_and_never_before_a_prompt() -> None:
    asked = replace(fake_config(), polling=PollConfig(decode_poll_timeout_ms=20))
    assert min(seconds_to_decode_50(fake_config()) for _ in range(5)) < 0.8
    assert seconds_to_decode_50(asked) > 0.8


def seconds_to_decode_50(config: EngineConfig) -> float:
    """A busy machine adds to them, so the best of several is what counts."""
    with HostedCore(FakeBuild(), config=config) as core:
        client = EngineCoreClient(core.address)
        start = time.monotonic()
        client.add(make_request("a", [1], 50))
        assert drain(client)[0] == {"a": expected([1], 50)}
        seconds = time.monotonic() - start
        client.shutdown()
    return seconds


def test_a_dead_core_says_why_to_who_reads_late(raw: RawClient) -> None:
    with HostedCore(FakeBuild(raise_at=3)) as core, RawClient(core.address.data) as reader:
        reader.send(Hello(PROTOCOL_VERSION, core.address.token))
        reader.send(Submit(0, [make_request("a", [1], 9)]))
        time.sleep(0.3)
        messages = []
        while (message := reader.receive(1.0)) is not None:
            messages.append(message)
    tokens: dict[str, list[int]] = {}
    ends: dict[str, Finished] = {}
    for message in messages:
        if isinstance(message, Outputs):
            read(message.batch, tokens, ends)
    assert tokens == {"a": expected([1], 9)[: len(tokens["a"])]} and not ends
    assert isinstance(messages[-1], Dead) and "fell over" in messages[-1].message

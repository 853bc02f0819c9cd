"""What has opened other engines: code in messages, connections that cost, readers that stall."""

from __future__ import annotations

import io
import socket
import struct
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from support.core_clients import RawClient, drain
from support.live_core import SizedBuild, is_running, own_directory, pid_of, rss_mib, start
from support.simulate import make_request

from engine.ipc.address import IPC
from engine.messages.wire import PROTOCOL_VERSION, Fault, Hello, Submit, Welcome
from engine.rpc.zmq_client import EngineCoreClient

NUM_SILENT = 200
NUM_IDLE_READERS = 100
NUM_TOKENS = 40
GREETING = b"\xff" + struct.pack(">Q", 1) + b"\x7f\x03"  # the first bytes of a ZeroMQ peer


@pytest.fixture
def core() -> Iterator[EngineCoreClient]:
    with own_directory():
        client = start(SizedBuild(num_blocks=4000, num_seats=128))
        yield client
        client.shutdown()


def programs(canary: Path) -> list[bytes]:
    """Serialised calls that would make a file, as those who unpickle have met them."""
    call = f"touch {canary}".encode()
    opens = f"open({str(canary)!r}, 'w')".encode()
    old = b"cposix\nsystem\n(S'" + call + b"'\ntR."
    new = b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + _text(call) + b"\x85R."
    reduced = b"\x80\x02cbuiltins\neval\n" + _text(opens) + b"\x85R."
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("archive/data.pkl", new)
        made.writestr("archive/version", "3")
    plain = [old, new, reduced, archive.getvalue()]
    plain += [f"!!python/object/apply:os.system ['touch {canary}']".encode()]
    plain += [f"__import__('os').system('touch {canary}')".encode()]
    wrapped = [
        msgspec.msgpack.encode(["call", 0, "echo", [msgspec.msgpack.Ext(code, new)]])
        for code in (*range(0, 128, 7), -1, -128)
    ]
    tagged = [
        msgspec.msgpack.encode(body)
        for body in (
            ["call", 0, "__class__", []],
            ["call", 0, "shutdown", []],
            ["call", 0, "_utilities.call", ["echo"]],
            {"type": "call", "__type__": "os.system", "args": [call]},
            ["call", 0, "echo", [{"__reduce__": ["posix.system", [call]]}]],
        )
    ]
    return plain + wrapped + tagged


def _text(data: bytes) -> bytes:
    """A string, as pickles have it."""
    return b"X" + struct.pack("<I", len(data)) + data


def test_code_in_messages_is_refused_and_never_run(tmp_path: Path, core: EngineCoreClient) -> None:
    canary = tmp_path / "canary"
    payloads = programs(canary)
    assert len(payloads) >= 30
    hello = Hello(PROTOCOL_VERSION, core.address.token)
    for address in (core.address.data, core.address.control):
        with RawClient(address) as stranger:
            for payload in payloads:
                stranger.send_bytes(payload)
                assert isinstance(stranger.receive(), Fault)
    with RawClient(core.address.data) as member:
        member.send(hello)
        assert isinstance(member.receive(), Welcome)
        for payload in payloads:
            member.send_bytes(payload)
            member.send_bytes(b"", payload)
            assert member.receive() and member.receive()
    assert not canary.exists()
    assert core.call("echo", "alive") == "alive"


def test_connections_that_never_finish_their_greeting_cost_little(core: EngineCoreClient) -> None:
    pid = pid_of(core)
    before = rss_mib(pid)
    with ExitStack() as open_sockets:
        for index in range(NUM_SILENT):
            address = (core.address.data, core.address.control)[index % 2]
            plain = open_sockets.enter_context(socket.socket(socket.AF_UNIX))
            plain.connect(address.removeprefix(IPC))
            plain.sendall(GREETING[: index % (len(GREETING) + 1)])
        core.add_all([make_request(f"beside-{i}", [i + 1], NUM_TOKENS) for i in range(20)])
        tokens, _ = drain(core)
        assert sorted(map(len, tokens.values())) == [NUM_TOKENS] * 20
        assert rss_mib(pid) - before < 20
    assert is_running(pid)


def test_readers_who_do_not_read_cost_little_and_hold_up_nobody(core: EngineCoreClient) -> None:
    pid = pid_of(core)
    before = rss_mib(pid)
    with ExitStack() as idle:
        for index in range(NUM_IDLE_READERS):
            client = idle.enter_context(RawClient(core.address.data))
            client.send(Hello(PROTOCOL_VERSION, core.address.token, f"idle {index}"))
            welcome = client.receive()
            assert isinstance(welcome, Welcome)
            client.send(Submit(0, [make_request(f"{welcome.id_prefix}long", [index + 1], 300)]))
        core.add_all([make_request(f"beside-{i}", [i + 1], NUM_TOKENS) for i in range(20)])
        tokens, _ = drain(core)
        assert sorted(map(len, tokens.values())) == [NUM_TOKENS] * 20
        assert rss_mib(pid) - before < 50
    core.add_all([make_request(f"after-{i}", [i + 1], NUM_TOKENS) for i in range(20)])
    assert sorted(map(len, drain(core)[0].values())) == [NUM_TOKENS] * 20

"""Every kind of client of a core, for tests that hold for all."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import zmq

from engine.config.engine import EngineConfig
from engine.errors import EngineDeadError
from engine.ipc import sockets
from engine.ipc.address import Address, Directory
from engine.ipc.codec import MessageDecoder, MessageEncoder
from engine.messages.requests import CoreOutputs, Finished
from engine.messages.wire import Health, Probe, ToClient
from engine.rpc.host import EngineCoreHost
from engine.rpc.launch import start_core
from engine.rpc.many_client import ManyCoresClient
from engine.rpc.zmq_client import EngineCoreClient
from support.patience import WAIT_SECONDS
from support.spawned import FakeBuild, fake_config

IN_PROCESS, TWO_CORES = "in-process", "two cores"
REMOTE = "remote"  # one core, with sockets between
ELSEWHERE = "remote, another clock"  # the same, on another machine
KINDS = (IN_PROCESS, TWO_CORES, ELSEWHERE)  # the last is more than `REMOTE`
AHEAD_SECONDS = 1e6  # of a core's clock, as on a machine that was started long before


class HostedCore:
    """A core behind sockets in a thread of the test: all that a process has but the process."""

    def __init__(
        self,
        build: FakeBuild,
        address: Address | None = None,
        config: EngineConfig | None = None,
        ahead_seconds: float = 0.0,
        **options: Any,
    ) -> None:
        def clock() -> float:
            return time.monotonic() + ahead_seconds

        directory = Directory.create()
        config = config or fake_config()
        self.address = address or directory.address
        self.inproc = build(config, clock=clock)
        self.host = EngineCoreHost(
            self.inproc, config, self.address, directory=directory, clock=clock, **options
        )
        self._thread = threading.Thread(target=self._serve, name="hosted-core")
        self._thread.start()

    def _serve(self) -> None:
        with suppress(EngineDeadError):  # which its clients were told
            self.host.serve()

    def close(self) -> None:
        self.host.drain(0.0)
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()
        self.host.close()

    def __enter__(self) -> HostedCore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def a_client(kind: str, build: FakeBuild | None = None) -> Iterator[Any]:
    """A client of this kind, and a core for it."""
    build = build or FakeBuild()
    if kind == IN_PROCESS:
        client = build(fake_config())
        yield client
        client.shutdown()
        return
    if kind == ELSEWHERE:
        with HostedCore(build, ahead_seconds=AHEAD_SECONDS) as core:
            client = EngineCoreClient(core.address)
            yield client
            client.shutdown()
        return
    with HostedCore(build) as core, HostedCore(build, ahead_seconds=-AHEAD_SECONDS) as other:
        if kind == TWO_CORES:  # on two machines
            addresses = (core.address, other.address)
            client: Any = ManyCoresClient([EngineCoreClient(each) for each in addresses])
        else:
            client = EngineCoreClient(core.address)
        yield client
        client.shutdown()


def attach(client: EngineCoreClient) -> EngineCoreClient:
    """One more client of the core that ``client`` uses."""
    return EngineCoreClient(client.address)


def spawn_client(build: FakeBuild, **core: Any) -> EngineCoreClient:
    """A client with a core in a process of its own."""
    return start_core(fake_config(**core), build)


def drain(client: Any, seconds: float = WAIT_SECONDS) -> tuple[dict[str, list[int]], dict]:
    """Tokens and ends by request, until nobody is left. Checks that nothing follows an end."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, Finished] = {}
    until = time.monotonic() + seconds
    while client.has_unfinished() or not tokens:
        assert time.monotonic() < until, f"no end: {tokens}"
        for batch in client.step():
            read(batch, tokens, ends)
    return tokens, ends


def read(batch: CoreOutputs, tokens: dict[str, list[int]], ends: dict[str, Finished]) -> None:
    """Add what a batch brings."""
    left = iter(batch.token_ids)
    for name, count in zip(
        batch.request_ids, batch.counts or [1] * len(batch.request_ids), strict=True
    ):
        assert name not in ends, f"{name}: output after its end"
        tokens.setdefault(name, []).extend(next(left) for _ in range(count))
    assert next(left, None) is None
    for end in batch.finished:
        ends[batch.request_ids[end.index]] = end


@contextmanager
def own_place(monkeypatch: Any) -> Iterator[Path]:
    """Socket directories go to a directory of this test, which is to be empty in the end."""
    # Not tmp_path: the path of a socket file has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="m-") as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        yield Path(place)
        left = sorted(Path(place).rglob("*"))
        assert not left, left


class RawClient:
    """Speaks to a core by hand: sends any bytes, reads only when asked to."""

    def __init__(self, address: str, secret: str | None = None) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = sockets.dealer(self._context, secret)
        self._socket.connect(address)
        self._encode = MessageEncoder().encode
        self._decoder: MessageDecoder[Any] = MessageDecoder(ToClient | Health)

    def send(self, message: Any) -> None:
        self.send_bytes(self._encode(message))

    def send_bytes(self, *frames: bytes) -> None:
        with suppress(zmq.Again):  # the connection is lost
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def receive(self, seconds: float = 20.0) -> Any:
        """The next message that says anything; ``None`` if none comes."""
        while self._socket.poll(round(1000 * seconds)):
            message = self._decoder.decode(self._socket.recv_multipart())
            if not isinstance(message, Probe):
                return message
        return None

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""Every kind of client of a core behind one synchronous face, for tests that hold for all."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import zmq
from spawned import FakeBuild, fake_config

from engine.config.engine import EngineConfig
from engine.errors import EngineDeadError
from engine.ipc import sockets
from engine.ipc.codec import Decoder, Encoder
from engine.ipc.place import Address, Directory
from engine.messages.outputs import CoreOutputs, Finished
from engine.messages.requests import AddRequest
from engine.messages.wire import Health, Probe, ToClient
from engine.rpc.aio_client import AsyncEngineCoreClient
from engine.rpc.host import EngineCoreHost
from engine.rpc.launch import start_core
from engine.rpc.many_client import ManyCoresClient
from engine.rpc.zmq_client import EngineCoreClient

IN_PROCESS, TWO_CORES = "in-process", "two cores"
REMOTE = ("zmq", "asyncio")  # one core, with sockets between
ELSEWHERE = tuple(f"{kind}, another clock" for kind in REMOTE)  # the same, on another machine
KINDS = (IN_PROCESS, *REMOTE, TWO_CORES, *ELSEWHERE)
AHEAD_SECONDS = 1e6  # of a core's clock, as on a machine that was started long before
WAIT_SECONDS = 30.0  # for what should come at once, on a machine that may be busy


class AsyncFace:
    """An asyncio client, driven from a test that knows nothing of event loops."""

    def __init__(self, client: AsyncEngineCoreClient, runner: asyncio.Runner) -> None:
        self._client = client
        self._runner = runner
        self._is_shut_down = False

    @classmethod
    def connect(cls, *args: Any, **options: Any) -> AsyncFace:
        runner = asyncio.Runner()
        try:
            return cls(runner.run(AsyncEngineCoreClient.connect(*args, **options)), runner)
        except BaseException:
            runner.close()
            raise

    @property
    def decided(self) -> Any:
        return self._client.decided

    @property
    def id_prefix(self) -> str:
        return self._client.id_prefix

    def add(self, request: AddRequest) -> None:
        self._run(self._client.add(request))

    def add_all(self, requests: Sequence[AddRequest]) -> dict[int, Exception]:
        return self._run(self._client.add_all(requests))

    def abort(self, request_ids: Sequence[str]) -> None:
        self._run(self._client.abort(request_ids))

    def step(self) -> list[CoreOutputs]:
        async def step() -> list[CoreOutputs]:
            try:
                async with asyncio.timeout(0.1):
                    return await self._client.step()
            except TimeoutError:
                return []

        return self._run(step())

    def wake(self) -> None: ...

    def has_unfinished(self) -> bool:
        return self._client.has_unfinished()

    def num_unfinished(self) -> int:
        return self._client.num_unfinished()

    def stats(self) -> Any:
        return self._run(self._client.stats())

    def call(self, name: str, *args: Any) -> Any:
        return self._run(self._client.call(name, *args))

    def shutdown(self) -> None:
        self._run(self._client.shutdown())
        self._is_shut_down = True
        self._runner.close()

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(call) if self._is_shut_down else self._runner.run(call)


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
        core = build(config, clock=clock)
        self.host = EngineCoreHost(
            core, config, self.address, directory=directory, clock=clock, **options
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
    if kind in ELSEWHERE:
        with HostedCore(build, ahead_seconds=AHEAD_SECONDS) as core:
            client = connect(kind.split(",")[0], core.address)
            yield client
            client.shutdown()
        return
    with HostedCore(build) as core, HostedCore(build, ahead_seconds=-AHEAD_SECONDS) as other:
        if kind == TWO_CORES:  # on two machines
            addresses = (core.address, other.address)
            client: Any = ManyCoresClient([EngineCoreClient(each) for each in addresses])
        else:
            client = connect(kind, core.address)
        yield client
        client.shutdown()


def connect(kind: str, address: Address) -> Any:
    """A client of a core behind sockets."""
    return EngineCoreClient(address) if kind == "zmq" else AsyncFace.connect(address)


def spawn_client(kind: str, build: FakeBuild, **core: Any) -> Any:
    """A client with a core in a process of its own."""
    client = start_core(fake_config(**core), build)
    if kind == "zmq":
        return client
    child, client._child = client._child, None
    hang_timeout = fake_config(**core).core.core_hang_timeout
    owner = AsyncFace.connect(client.address, child=child, hang_timeout=hang_timeout)
    client.shutdown()
    return owner


def attach(kind: str, client: Any) -> Any:
    """One more client of the core that ``client`` uses."""
    return connect(kind, address_of(client))


def address_of(client: Any) -> Address:
    """Address of the core that a client uses."""
    return getattr(client, "_client", client).address


def pid_of(client: Any) -> int:
    """Process of the core that a client uses."""
    return getattr(client, "_client", client)._child.pid


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
        self._encode = Encoder().encode
        self._decoder: Decoder[Any] = Decoder(ToClient | Health)

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

"""uvicorn, and the engine behind it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import uvicorn
import uvloop

from engine.async_engine import AsyncLLMEngine
from engine.config.args import EngineArgs
from engine.errors import ConfigError
from engine.server.app import make_app
from engine.server.drain import Drain
from engine.server.gate import QueueGate
from engine.server.plain import WritingProtocol
from engine.server.readers import SlowReaders, cut

logger = logging.getLogger("engine.server")
BACKLOG = 2048  # connections that wait to be accepted
END_SECONDS = 0.5  # for the last bytes to leave, and for the engine's last step
SIGNALS = (signal.SIGINT, signal.SIGTERM)
QUEUE_PER_SEAT = 8  # requests that may wait for each that may run, and at least
MIN_QUEUE = 256
SEND_BUFFER = 64 << 10  # the system's own choice grows to megabytes for a client that does not read


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, to whom, and under which names."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # a socket file instead
    api_keys: Sequence[str] = ()
    served_model_name: Sequence[str] = ()  # the model's own, if none is given
    reader_timeout: float = 30.0  # seconds in which a client must read something
    max_queue_seconds: float | None = None  # longest estimated wait of a request that is taken

    def __post_init__(self) -> None:
        for name in ("reader_timeout", "max_queue_seconds"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < float("inf"):
                raise ConfigError(f"{name} is {value}, must be a number of seconds above 0")


def serve(args: EngineArgs, options: ServerOptions) -> None:
    """Serve until SIGINT or SIGTERM; then requests that are open go on to their ends."""
    with _ending_while_starting():
        engine = AsyncLLMEngine.from_engine_args(args)
    try:
        seats = args.max_num_seqs * args.data_parallel_size
        most = args.max_waiting_requests or max(MIN_QUEUE, QUEUE_PER_SEAT * seats)
        engine.limit_queue(most, options.max_queue_seconds, num_seats=seats)
        names = options.served_model_name or [str(args.model)]
        app = make_app(engine, names, engine.max_model_len, options.api_keys)
        drain = Drain(QueueGate(app, engine), engine, args.drain_timeout)
        place = options.uds or f"http://{options.host}:{options.port}"
        logger.warning("%s is served at %s", names[0], place)
        config = uvicorn.Config(
            drain,
            host=options.host,
            port=options.port,
            uds=options.uds,
            http=WritingProtocol,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=1,
        )
        server = Server(config, drain)
        readers = SlowReaders(engine, server.server_state.connections, options.reader_timeout)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(server, readers))
    finally:
        engine.shutdown(END_SECONDS)


class Server(uvicorn.Server):
    """Drains when it is told to end, and ends with status 0; uvicorn's own ends by the signal."""

    def __init__(self, config: uvicorn.Config, drain: Drain) -> None:
        super().__init__(config)
        self._drain = drain

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def on_signal(self) -> None:
        """The first drains, the second aborts what is open, a third ends the process."""
        if not self.should_exit:
            self._drain.begin()
            self.should_exit = True
            return
        self._drain.hurry()
        for number in SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Connections have the send buffer of the socket that accepts them."""
        await super().startup(sockets)
        for listener in (each for server in self.servers for each in server.sockets):
            with socket.socket(fileno=os.dup(listener.fileno())) as made:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Connections are taken until all requests have ended, so that they can be refused."""
        await self._drain.finish()
        await self._flush()
        await super().shutdown()

    async def _flush(self) -> None:
        """Wait for the last bytes to leave; cut the connections of those who do not read them."""
        until = time.monotonic() + END_SECONDS
        while unsent := self._unsent():
            if time.monotonic() > until:
                logger.warning("%d connections are cut: nobody reads them", len(unsent))
                for transport in unsent:
                    cut(transport)
                return
            await asyncio.sleep(0.01)

    def _unsent(self) -> list[asyncio.Transport]:
        transports = [connection.transport for connection in self.server_state.connections]
        return [each for each in transports if each.get_write_buffer_size()]


async def _serve(server: Server, readers: SlowReaders) -> None:
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, server.on_signal)
    watching = asyncio.create_task(readers.watch())
    await server.serve()
    watching.cancel()


@contextmanager
def _ending_while_starting() -> Iterator[None]:
    """SIGTERM ends the program in order while the model is loaded."""

    def end(number: int, frame: FrameType | None) -> None:
        logger.warning("the server is ended before it was ready")
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, before)

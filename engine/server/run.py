"""uvicorn, and the engine behind it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from engine.async_engine import AsyncLLMEngine
from engine.config.args import EngineArgs
from engine.errors import ConfigError
from engine.server.app import make_app
from engine.server.keys import KeyRing
from engine.server.operations import Operations

if TYPE_CHECKING:  # OpenTelemetry is optional
    from engine.server.tracing import Tracing

logger = logging.getLogger("engine.server")
BACKLOG = 2048  # connections that wait to be accepted


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, to whom, and under which names."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # a socket file instead
    api_keys: Sequence[str] = ()
    served_model_name: Sequence[str] = ()  # the model's own, if none is given
    chat_template: str | None = None  # instead of the model's own
    api_key_file: str | None = None
    admin_api_key: str | None = None
    health_timeout: float = 10.0  # seconds that a core may take to answer, and still be well
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.health_timeout < float("inf"):
            raise ConfigError(
                f"health_timeout is {self.health_timeout}, must be a number of seconds above 0"
            )


def serve(args: EngineArgs, options: ServerOptions) -> None:
    """Serve until SIGINT or SIGTERM; then streams that are open go on to their ends."""
    keys = KeyRing(options.api_keys, options.api_key_file, options.admin_api_key)
    tracing = make_tracing(options.otlp_traces_endpoint)
    engine = AsyncLLMEngine.from_engine_args(args)
    try:
        names = options.served_model_name or [str(args.model)]
        operations = Operations(engine, keys, names[0], options.health_timeout)
        app = make_app(engine, names, operations, options.chat_template)
        if tracing is not None:
            app = tracing.begin(engine, names[0], app)
        place = options.uds or f"http://{options.host}:{options.port}"
        logger.warning("%s is served at %s", names[0], place)
        config = uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            uds=options.uds,
            http="httptools",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=round(args.drain_timeout),
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(Server(config, operations)))
    finally:
        engine.shutdown()
        if tracing is not None:
            tracing.end()


def make_tracing(endpoint: str | None) -> Tracing | None:
    """Raises ``ConfigError`` for an endpoint that is none, and if the extra is missing."""
    if endpoint is None:
        return None
    try:
        from engine.server.tracing import Tracing
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"otlp_traces_endpoint takes {error.name}: pip install metronome-engine[otel]"
        ) from error
    return Tracing(endpoint)


class Server(uvicorn.Server):
    """Ends with status 0 when it was told to and has drained; uvicorn's own ends by the signal."""

    def __init__(self, config: uvicorn.Config, operations: Operations) -> None:
        super().__init__(config)
        self._operations = operations

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._operations.is_draining = True
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(server: Server) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.handle_exit, number, None)
    await server.serve()

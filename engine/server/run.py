"""uvicorn, and the engine behind it."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from engine.async_engine import AsyncLLMEngine
from engine.config.args import EngineArgs
from engine.errors import ConfigError
from engine.server.app import make_app
from engine.server.http.protocol import BoundedProtocol, HttpLimits
from engine.server.keys import KeyRing
from engine.server.limits import Limits
from engine.server.operations import Operations

if TYPE_CHECKING:  # OpenTelemetry is optional
    from engine.server.tracing import Tracing

logger = logging.getLogger("engine.server")
BACKLOG = 2048  # connections that wait to be accepted


@dataclass(frozen=True)
class Tls:
    """Certificate and key of the server, and those who sign its clients' certificates."""

    certfile: str | None = None
    keyfile: str | None = None  # unless it is in the same file
    ca_certs: str | None = None
    """Clients must show a certificate that one of these has signed."""

    def __post_init__(self) -> None:
        if self.certfile is None:
            if self.keyfile or self.ca_certs:
                raise ConfigError("ssl_keyfile or ssl_ca_certs is given without ssl_certfile")
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certfile, self.keyfile)
            context.load_verify_locations(self.ca_certs or self.certfile)
        except OSError as error:  # which an SSLError is, too
            raise ConfigError(
                f"ssl_certfile {self.certfile!r}, ssl_keyfile {self.keyfile!r} and ssl_ca_certs "
                f"{self.ca_certs!r} cannot be used: {error}"
            ) from error

    def options(self) -> dict[str, Any]:
        """As uvicorn takes them."""
        return {
            "ssl_certfile": self.certfile,
            "ssl_keyfile": self.keyfile,
            "ssl_ca_certs": self.ca_certs,
            "ssl_cert_reqs": ssl.CERT_NONE if self.ca_certs is None else ssl.CERT_REQUIRED,
        }


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
    limits: Limits = field(default_factory=Limits)
    http: HttpLimits = field(default_factory=HttpLimits)
    tls: Tls = field(default_factory=Tls)

    def __post_init__(self) -> None:
        most = self.limits.max_requests_per_key
        if most is not None and not self.api_keys and self.api_key_file is None:
            raise ConfigError(f"max_requests_per_key is {most} without any key: give --api-key")
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
        app = make_app(engine, names, operations, options.limits, options.chat_template)
        if tracing is not None:
            app = tracing.begin(engine, names[0], app)
        protocol: Any = partial(BoundedProtocol, limits=options.http)
        scheme = "http" if options.tls.certfile is None else "https"
        place = options.uds or f"{scheme}://{options.host}:{options.port}"
        logger.warning("%s is served at %s", names[0], place)
        config = uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            uds=options.uds,
            http=protocol,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            **options.tls.options(),
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

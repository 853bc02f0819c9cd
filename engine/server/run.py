"""Start the engine and the HTTP server, serve, and shut both down."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import uvicorn
import uvloop
from starlette.types import ASGIApp

from engine.async_engine import AsyncLLMEngine
from engine.config.args import EngineArgs
from engine.config.core import OnCoreDeath
from engine.config.engine import EngineConfig
from engine.errors import ConfigError
from engine.frontend.session import Session
from engine.observe.background import logging_in_background
from engine.observe.logs import set_up_logging
from engine.server.adapters import ServedAdapters
from engine.server.app import make_app, routes_of
from engine.server.drain import Drain
from engine.server.gate import QueueGate
from engine.server.http.origins import AllowedOrigins
from engine.server.http.protocol import BoundedProtocol, HttpLimits
from engine.server.keys import KeyGuard, KeyRing
from engine.server.limits import ServerLimits
from engine.server.listening import Listening, bound, check_port
from engine.server.names import names_of
from engine.server.operations import Operations
from engine.server.page.routes import Page
from engine.server.pooled.inputs import MAX_INPUTS
from engine.server.private_parts import TRANSFORMERS, check_private_parts
from engine.server.readers import SlowReaders, cut
from engine.server.request_log import RequestLog, RequestLogKind, writing_requests

if TYPE_CHECKING:  # OpenTelemetry is optional
    from engine.server.tracing import Tracing

logger = logging.getLogger("engine.server")
BACKLOG = 2048  # connections that wait to be accepted
END_SECONDS = 0.5  # for sending the last bytes, and for the engine's last step
DEATH_SECONDS = 2.0  # for sending errors to open requests after the engine has died
DEAD = 1  # exit status when the engine has died
SIGNALS = (signal.SIGINT, signal.SIGTERM)
QUEUE_PER_SEAT = 8  # waiting requests per ``max_num_seqs``, by default
MIN_QUEUE = 256  # waiting requests, by default at least
MIN_POOLED_QUEUE = 8 * MAX_INPUTS  # likewise, if requests may have that many inputs
SEND_BUFFER = 64 << 10  # bytes; the system's default grows to megabytes for a slow reader


@dataclass(frozen=True)
class Tls:
    """Files with the server's certificate and key, and with the authorities of its clients."""

    certfile: str | None = None
    keyfile: str | None = None  # ``None``: the key is in ``certfile``
    ca_certs: str | None = None
    """If given, clients must have a certificate that one of these authorities signed."""

    def __post_init__(self) -> None:
        if self.certfile is None:
            if self.keyfile or self.ca_certs:
                raise ConfigError(
                    f"ssl_keyfile is {self.keyfile!r} and ssl_ca_certs {self.ca_certs!r} without "
                    "ssl_certfile: add --ssl-certfile, or leave both out"
                )
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certfile, self.keyfile)
            context.load_verify_locations(self.ca_certs or self.certfile)
        except OSError as error:  # an SSLError is one, too
            raise ConfigError(
                f"ssl_certfile {self.certfile!r}, ssl_keyfile {self.keyfile!r} and ssl_ca_certs "
                f"{self.ca_certs!r} cannot be used: {error}; give PEM files that belong together"
            ) from error

    def options(self) -> dict[str, Any]:
        """The TLS options under uvicorn's names."""
        return {
            "ssl_certfile": self.certfile,
            "ssl_keyfile": self.keyfile,
            "ssl_ca_certs": self.ca_certs,
            "ssl_cert_reqs": ssl.CERT_NONE if self.ca_certs is None else ssl.CERT_REQUIRED,
        }


@dataclass(frozen=True)
class ServerOptions:
    """The options of ``metronome serve`` that are not the engine's."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # path of a Unix socket, in place of host and port
    api_keys: Sequence[str] = ()
    served_model_name: Sequence[str] = ()  # default: the model's own name
    chat_template: str | None = None  # text of a template that replaces the model's own
    api_key_file: str | None = None
    admin_api_key: str | None = None
    user_from_key: bool = False  # policies take the API key for the user
    health_timeout: float = 10.0  # seconds within which a healthy core answers
    otlp_traces_endpoint: str | None = None
    reader_timeout: float = 30.0  # seconds within which a client must read some bytes
    max_queue_seconds: float | None = None  # requests with a longer estimated wait are refused
    limits: ServerLimits = field(default_factory=ServerLimits)
    http: HttpLimits = field(default_factory=HttpLimits)
    tls: Tls = field(default_factory=Tls)
    origins: AllowedOrigins = field(default_factory=AllowedOrigins)
    has_page: bool = True  # a page for browsers at ``/``
    request_log: RequestLogKind | None = None  # default: text if the log level is info

    def __post_init__(self) -> None:
        for name, value in (
            ("max_requests_per_key", self.limits.max_requests_per_key),
            ("user_from_key", self.user_from_key or None),
        ):
            if value is not None and not self.api_keys and self.api_key_file is None:
                raise ConfigError(
                    f"{name} is {value} without API keys: add --api-key or --api-key-file"
                )
        if self.uds is None:
            check_port(self.port)
        for name in ("health_timeout", "reader_timeout", "max_queue_seconds"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < float("inf"):
                raise ConfigError(f"{name} is {value}, must be a finite number of seconds above 0")


def serve(args: EngineArgs, options: ServerOptions) -> int:
    """Serve until SIGINT or SIGTERM, then finish open requests. Returns the process's exit status:
    1 if the engine died and ``on_core_death`` is not ``stay``, else 0.

    The address is bound before the model is loaded, and the server listens once the model is ready.
    Raises ``ConfigError`` for an address that cannot be bound.
    """
    keys = KeyRing(options.api_keys, options.api_key_file, options.admin_api_key)
    tracing = make_tracing(options.otlp_traces_endpoint)
    config = args.create_config()
    set_up_logging(config.log_level)
    with ExitStack() as stack:
        listening = stack.enter_context(bound(options.host, options.port, options.uds))
        stack.enter_context(logging_in_background("uvicorn"))
        with _ending_while_starting():
            engine = AsyncLLMEngine(Session.open(config))
        stack.callback(engine.shutdown, END_SECONDS)
        app = assemble(stack, engine, config, args, options, keys, tracing)
        uvicorn_config = _uvicorn_config(app.app, options, app.log)
        server = Server(uvicorn_config, app.drain, listening, app.name)
        readers = SlowReaders(engine, server.server_state.connections, options.reader_timeout)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(server, readers, engine, args.on_core_death))
        return server.status


class Assembled(NamedTuple):
    """The ASGI application with all middleware, and the parts of it that a server uses."""

    app: ASGIApp
    drain: Drain
    log: RequestLog
    name: str
    """The model's name for clients."""


def assemble(
    stack: ExitStack,
    engine: AsyncLLMEngine,
    config: EngineConfig,
    args: EngineArgs,
    options: ServerOptions,
    keys: KeyRing,
    tracing: Tracing | None,
) -> Assembled:
    """Make the application that serves ``engine``. What it opens is closed with ``stack``. Not in
    a thread with an event loop."""
    kind = stack.enter_context(writing_requests(options.request_log))
    if engine.tokenizer is not None and engine.tokenizer.response_template is not None:
        check_private_parts(TRANSFORMERS)
    if policy := policy_name(config):
        logger.info("requests are scheduled by policy %s", policy)
    limit_queue(engine, args, options.max_queue_seconds)
    names = names_of(config.model.model, options.served_model_name)
    operations = Operations(engine, keys, names.first, options.health_timeout, policy)
    adapters = ServedAdapters(engine, names)
    asyncio.run(adapters.start())
    routes = routes_of(engine, names, adapters, operations, options.limits, options.chat_template)
    page = None
    if options.has_page:
        most_bytes = options.limits.max_body_bytes
        page = Page(engine, keys, names, adapters, options.chat_template, most_bytes)
        routes += page.routes()
    app = make_app(routes)
    # Middleware, from the innermost to the outermost.
    app = QueueGate(app, engine)
    if page is not None:
        app = page.owned(app)
    open_paths = () if page is None else page.open_paths
    most = options.limits.max_requests_per_key
    app = KeyGuard(app, keys, most, open_paths, key_is_user=options.user_from_key)
    app = operations.traffic.counting(app, routes)
    if tracing is not None:
        app = tracing.begin(engine, names.first, app)
        stack.callback(tracing.end)
    app = drain = Drain(app, engine, args.drain_timeout)
    app = log = RequestLog(app, kind)
    app = options.origins.around(app)
    engine.add_observer(log.observe)
    stack.callback(log.close)
    return Assembled(app, drain, log, names.first)


def policy_name(config: EngineConfig) -> str:
    """Name or dotted path of the scheduling policy; "" if the core was started elsewhere."""
    policy = config.scheduler.scheduling_policy
    if config.core.core_addresses:
        return ""
    if isinstance(policy, str):
        return policy
    cls = policy if isinstance(policy, type) else type(policy)
    return f"{cls.__module__}.{cls.__qualname__}"


def limit_queue(engine: AsyncLLMEngine, args: EngineArgs, max_seconds: float | None) -> None:
    """Limit the engine's queue: it refuses new requests while too many are waiting, or while they
    would wait more than ``max_seconds`` for their first token, by its estimate."""
    seats = args.max_num_seqs * (args.decode_cores or args.data_parallel_size)
    least = MIN_POOLED_QUEUE if engine.runner == "pooling" else MIN_QUEUE
    most = args.max_waiting_requests or max(least, QUEUE_PER_SEAT * seats)
    engine.limit_queue(most, max_seconds, num_seats=seats)


def _uvicorn_config(app: ASGIApp, options: ServerOptions, log: RequestLog) -> uvicorn.Config:
    protocol: Any = partial(BoundedProtocol, limits=options.http, on_refused=log.refused)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,  # uvicorn's would close all handlers of the process
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        **options.tls.options(),
        timeout_graceful_shutdown=1,
    )


def make_tracing(endpoint: str | None) -> Tracing | None:
    """Make the tracing to an endpoint (``None``: no tracing). Raises ``ConfigError`` for a
    malformed endpoint, or if the extra ``otel`` is not installed."""
    if endpoint is None:
        return None
    try:
        from engine.server.tracing import Tracing
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"otlp_traces_endpoint is {endpoint!r:.200}, which needs {error.name}: pip install "
            "metronome-engine[otel]"
        ) from error
    return Tracing(endpoint)


class Server(uvicorn.Server):
    """A uvicorn server that finishes open requests after a signal, and then exits with status 0."""

    def __init__(
        self, config: uvicorn.Config, drain: Drain, listening: Listening, name: str
    ) -> None:
        """name: the model's name, for the log."""
        super().__init__(config)
        self._drain = drain
        self.status = 0
        """Exit status of the process when serving ends."""
        self._listening = listening
        self._name = name

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def on_signal(self) -> None:
        """Finish open requests at the first signal, and abort them at the second."""
        self.status = 0  # the user wants the end, even if the engine has died before
        if not self.should_exit:
            self._drain.begin()
            self.should_exit = True
            return
        self._drain.hurry()
        for number in SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def on_death(self) -> None:
        """End with status 1 since the engine has died, after sending errors to open requests."""
        if not self.should_exit:
            logger.error("no core is left: the server ends with status %d", DEAD)
            self.status = DEAD
            self._drain.begin(DEATH_SECONDS)
            self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen at the bound sockets with small send buffers, and log the addresses."""
        for each in self._listening.sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._listening.prepare()
        await super().startup(self._listening.sockets)
        scheme = "http" if self.config.ssl_certfile is None else "https"
        places = " and ".join(self._listening.places(scheme))
        logger.info("%s is served at %s", self._name, places)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish open requests, then close the sockets. New requests meanwhile get status 503."""
        await self._drain.finish()
        await self._flush()
        await super().shutdown()

    async def _flush(self) -> None:
        """Wait until the last bytes are sent; cut connections whose clients do not read them."""
        until = time.monotonic() + END_SECONDS
        while unsent := self._unsent():
            if time.monotonic() > until:
                logger.warning("%d connections are cut: their clients do not read", len(unsent))
                for transport in unsent:
                    cut(transport)
                return
            await asyncio.sleep(0.01)

    def _unsent(self) -> list[asyncio.Transport]:
        transports = [connection.transport for connection in self.server_state.connections]
        return [each for each in transports if each.get_write_buffer_size()]


async def _serve(
    server: Server, readers: SlowReaders, engine: AsyncLLMEngine, on_core_death: OnCoreDeath
) -> None:
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, server.on_signal)

    def end() -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(server.on_death)

    def stay() -> None:
        logger.error("no core is left: requests are answered with 503")

    engine.on_death(stay if on_core_death == "stay" else end)
    watching = asyncio.create_task(readers.watch())
    await server.serve()
    watching.cancel()


@contextmanager
def _ending_while_starting() -> Iterator[None]:
    """End the program with status 0 if SIGTERM arrives while the model is being loaded."""

    def end(number: int, frame: FrameType | None) -> None:
        logger.warning("the server is ended by SIGTERM before it is ready")
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, before)

"""uvicorn, and the engine behind it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
import uvloop

from engine.async_engine import AsyncLLMEngine
from engine.config.args import EngineArgs
from engine.server.app import make_app

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


def serve(args: EngineArgs, options: ServerOptions) -> None:
    """Serve until SIGINT or SIGTERM; then streams that are open go on to their ends."""
    engine = AsyncLLMEngine.from_engine_args(args)
    try:
        names = options.served_model_name or [str(args.model)]
        app = make_app(engine, names, options.api_keys, options.chat_template)
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
            runner.run(_serve(Server(config)))
    finally:
        engine.shutdown()


class Server(uvicorn.Server):
    """Ends with status 0 when it was told to and has drained; uvicorn's own ends by the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(server: Server) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.handle_exit, number, None)
    await server.serve()

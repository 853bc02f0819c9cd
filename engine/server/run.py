"""uvicorn, and the engine behind it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import uvicorn

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


def serve(args: EngineArgs, options: ServerOptions) -> None:
    """Serve until SIGINT or SIGTERM; then streams that are open go on to their ends."""
    engine = AsyncLLMEngine.from_engine_args(args)
    try:
        names = options.served_model_name or [str(args.model)]
        app = make_app(engine, names, engine.max_model_len, options.api_keys)
        place = options.uds or f"http://{options.host}:{options.port}"
        logger.warning("%s is served at %s", names[0], place)
        uvicorn.run(
            app,
            host=options.host,
            port=options.port,
            uds=options.uds,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=round(args.drain_timeout),
        )
    finally:
        engine.shutdown()

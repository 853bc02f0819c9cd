"""The HTTP server as a deployment of Ray Serve, which starts replicas as requests queue up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.async_engine import AsyncLLMEngine
from engine.cluster.nodes.order import forget_main_module
from engine.config.args import EngineArgs
from engine.config.env import admin_api_key, api_keys
from engine.errors import ConfigError
from engine.frontend.session import Session
from engine.observe.logs import set_up_logging
from engine.server.keys import KeyRing
from engine.server.run import END_SECONDS, ServerOptions, assemble, make_tracing

NAME = "metronome"
MAX_ONGOING = 100_000  # per replica; the engine's own queue is the limit
LOOK_BACK_SECONDS = 15.0  # over which Serve averages the queues
UP_SECONDS = 10.0
DOWN_SECONDS = 300.0
RUNNING, WAITING = "running", "waiting"


def deployment(
    model: str | None = None,
    *,
    min_replicas: int = 1,
    max_replicas: int = 1,
    target_requests: float | None = None,
    num_gpus: float = 0,
    server: ServerOptions | None = None,
    serve_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> serve.Application:
    """The server of one model as an application for ``ray.serve.run``.

    Replicas are started and ended so that each has ``target_requests`` running and waiting
    requests, as its engine counts them; default: ``max_num_seqs``. Each replica reserves
    ``num_gpus`` GPUs, and ``num_threads`` CPUs (default: 1). server: options of the HTTP server, of
    which address and TLS are Serve's; serve_options: further options of Serve's deployment, which
    override these; options: those of ``EngineArgs``. Raises ``ConfigError``."""
    args = EngineArgs(model=model, **{"multiprocess": True, "num_threads": 1, **options})
    if args.device == "auto" and not num_gpus:
        args = replace(args, device="cpu")  # a GPU that is not reserved belongs to others
    target = float(args.max_num_seqs if target_requests is None else target_requests)
    if not 0.0 < target < math.inf:
        raise ConfigError(f"target_requests is {target_requests}, must be a finite number above 0")
    if not 0 <= min_replicas <= max_replicas or not max_replicas:
        raise ConfigError(
            f"min_replicas is {min_replicas} and max_replicas {max_replicas}: set max_replicas to "
            "at least 1, and min_replicas to at most that"
        )
    server = server or ServerOptions()
    keys = (*server.api_keys, *api_keys())
    server = replace(server, api_keys=keys, admin_api_key=server.admin_api_key or admin_api_key())
    wanted = {
        "name": NAME,
        "max_ongoing_requests": MAX_ONGOING,
        "ray_actor_options": {"num_cpus": args.num_threads, "num_gpus": num_gpus},
        "graceful_shutdown_timeout_s": args.drain_timeout,
        "health_check_timeout_s": server.health_timeout + 5.0,
        "autoscaling_config": AutoscalingConfig(
            min_replicas=min_replicas,
            max_replicas=max_replicas,
            target_ongoing_requests=target,
            look_back_period_s=LOOK_BACK_SECONDS,
            upscale_delay_s=UP_SECONDS,
            downscale_delay_s=DOWN_SECONDS,
            policy=AutoscalingPolicy(policy_function=f"{__name__}:replicas_for_queue"),
        ),
        **(serve_options or {}),
    }
    replica = serve.deployment(serve.ingress()(EngineReplica), **wanted)
    return replica.bind(args, server)


def replicas_for_queue(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Serve's policy: as many replicas as give each its target of running and waiting requests."""
    queues = context.aggregated_metrics or {}
    load = sum(sum(queues.get(name, {}).values()) for name in (RUNNING, WAITING))
    if not context.current_num_replicas:  # requests wait at Serve's proxies
        load = context.total_num_requests
    assert context.config is not None
    return math.ceil(load / context.config.target_ongoing_requests), {}


class EngineReplica:
    """A replica: an engine with the ASGI application of the HTTP server."""

    def __init__(self, args: EngineArgs, options: ServerOptions) -> None:
        """Load the model. Raises the errors of ``EngineArgs.create_config`` and of the core."""
        self._stack = ExitStack()
        self._timeout = options.health_timeout
        with ThreadPoolExecutor(1) as threads:  # Serve's event loop runs in this thread
            self._engine, self._app = threads.submit(self._open, args, options).result()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return without_lifespan(self._app)

    async def check_health(self) -> None:
        """Raise an error if the core has died or does not answer; Serve then ends the replica."""
        await self._engine.check_health(self._timeout)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The engine's queue, for Serve's policy."""
        stats = await self._engine.stats()
        if stats is None:
            return {RUNNING: 0.0, WAITING: 0.0}
        return {RUNNING: stats.num_running, WAITING: stats.num_waiting + stats.num_parked}

    def __del__(self) -> None:
        self._stack.close()

    def _open(self, args: EngineArgs, options: ServerOptions) -> tuple[AsyncLLMEngine, ASGIApp]:
        forget_main_module()
        keys = KeyRing(options.api_keys, options.api_key_file, options.admin_api_key)
        tracing = make_tracing(options.otlp_traces_endpoint)
        config = args.create_config()
        set_up_logging(config.log_level)
        engine = AsyncLLMEngine(Session.open(config))
        self._stack.callback(engine.shutdown, END_SECONDS)
        made = assemble(self._stack, engine, config, args, options, keys, tracing)
        return engine, made.app


def without_lifespan(app: ASGIApp) -> ASGIApp:
    """Answer the messages about the server's start and end, which ``app`` does not know."""

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        kind = ""
        while kind != "lifespan.shutdown":
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})

    return answering

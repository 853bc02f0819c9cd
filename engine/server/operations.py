"""Routes for operators: health, load and metrics; with the admin key also pause and profiling."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.async_engine import AsyncLLMEngine
from engine.config.env import ADMIN_API_KEY
from engine.errors import ConfigError
from engine.server.errors import ApiError, field_error
from engine.server.http.openapi import ApiRoute
from engine.server.http.origins import is_allowed
from engine.server.keys import KeyRing, no_key
from engine.server.metrics import MEDIA_TYPE, Metrics
from engine.server.traffic import Traffic

RETRY_SECONDS = 5.0  # ``Retry-After`` of a server that is not healthy
SCOPES = ("all", "new")  # what a pause stops: all requests, or only new ones
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[ASGIApp]]


class Operations:
    """The routes for operators. health_timeout: seconds within which a healthy core responds;
    policy: name of the scheduling policy, for metrics; "": unknown."""

    def __init__(
        self,
        engine: AsyncLLMEngine,
        keys: KeyRing,
        model: str,
        health_timeout: float,
        policy: str = "",
    ) -> None:
        self.traffic = Traffic()
        self.keys = keys
        self._engine = engine
        self._timeout = health_timeout
        self._metrics = Metrics(engine, model, self.traffic, policy)
        self._check: asyncio.Task[None] | None = None

    def routes(self) -> list[ApiRoute]:
        admin = self.for_admin
        return [
            ApiRoute("GET", "/health", self.health, None, dict),
            ApiRoute("GET", "/ping", self.health, None, dict),
            ApiRoute("POST", "/ping", self.health, None, dict),
            ApiRoute("GET", "/ready", self.ready),
            ApiRoute("GET", "/load", self.load, None, dict),
            ApiRoute("GET", "/metrics", self.metrics),
            ApiRoute("GET", "/is_paused", admin(self.is_paused), None, dict),
            ApiRoute("POST", "/pause", admin(self.pause), None, dict),
            ApiRoute("POST", "/resume", admin(self.resume), None, dict),
            ApiRoute("POST", "/reset_prefix_cache", admin(self.reset), None, dict, [409]),
            ApiRoute("POST", "/reset_encoder_cache", admin(self.reset_encoder), None, dict),
            ApiRoute("POST", "/reset_mm_cache", admin(self.reset_media), None, dict),
            ApiRoute("POST", "/start_profile", admin(self.start_profile), None, dict),
            ApiRoute("POST", "/stop_profile", admin(self.stop_profile), None, dict),
        ]

    async def health(self, request: Request) -> ASGIApp:
        """Check that the cores respond, and return how many there are and how many are alive."""
        await self._check_health()
        cores = self._engine.num_cores
        return _json({"cores": cores.total, "cores_alive": cores.alive})

    async def ready(self, request: Request) -> ASGIApp:
        """Return 200 if the server accepts new requests, else 503."""
        if self._engine.paused is not None:
            raise _unready("the engine is paused: resume it with POST /resume", "paused")
        await self._check_health()
        return Response(b"", 200)

    async def load(self, request: Request) -> ASGIApp:
        """Report the numbers of running and waiting requests and the KV usage."""
        stats = await self._metrics.stats()
        load: dict[str, float] = {"server_load": self.traffic.num_in_flight}
        if stats is not None:
            load["running"] = stats.num_running
            load["waiting"] = stats.num_waiting + stats.num_parked
            load["kv_usage"] = stats.kv_usage
        return _json(load)

    async def metrics(self, request: Request) -> ASGIApp:
        """Report metrics in Prometheus's format."""
        page = await self._metrics.text()
        if page is None:
            raise ApiError(
                500, "the metrics cannot be read; the error is in the log", code="metrics_failed"
            )
        return Response(page, headers={"Content-Type": MEDIA_TYPE})

    async def is_paused(self, request: Request) -> ASGIApp:
        """Report whether the engine is paused."""
        return _json({"is_paused": self._engine.paused is not None})

    async def pause(self, request: Request) -> ASGIApp:
        """Pause all requests, or only new ones, until the engine is resumed."""
        what = request.query_params.get("what", "all")
        if what not in SCOPES:
            raise field_error("what", f"is {what!r:.80}, must be all or new")
        await self._within_timeout(self._engine.pause("new" if what == "new" else "all"))
        return _json({"status": "paused", "what": what})

    async def resume(self, request: Request) -> ASGIApp:
        """Resume a paused engine."""
        await self._within_timeout(self._engine.resume())
        return _json({"status": "resumed"})

    async def reset(self, request: Request) -> ASGIApp:
        """Empty the prefix cache."""
        value = request.query_params.get("reset_running_requests", "false").lower()
        if value not in ("true", "false"):
            raise field_error("reset_running_requests", f"is {value!r:.80}, must be true or false")
        if not await self._within_timeout(self._engine.reset_prefix_cache(value == "true")):
            raise ApiError(
                409,
                "running requests use the prefix cache: try again later, or with "
                "?reset_running_requests=true, which computes them again",
            )
        return _json({"status": "reset"})

    async def reset_encoder(self, request: Request) -> ASGIApp:
        """Drop encoder outputs of pictures; running requests keep theirs."""
        await self._within_timeout(self._engine.reset_encoder_cache())
        return _json({"status": "reset"})

    async def reset_media(self, request: Request) -> ASGIApp:
        """Drop processed pictures that no request uses."""
        await self._within_timeout(self._engine.reset_mm_cache())
        return _json({"status": "reset"})

    async def start_profile(self, request: Request) -> ASGIApp:
        """Start to record a profile of the worker."""
        await self._within_timeout(self._engine.start_profile())
        return _json({"status": "started"})

    async def stop_profile(self, request: Request) -> ASGIApp:
        """Stop recording, and write the profile to files."""
        return _json({"traces": await self._engine.stop_profile()})

    async def _check_health(self) -> None:
        """Raise ``ApiError`` if a core does not respond, ``EngineDeadError`` if all have died."""
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._engine.check_health(self._timeout))
            self._check.add_done_callback(_retrieve_error)
        try:
            await asyncio.shield(self._check)
        except TimeoutError as error:
            raise _unready(str(error), "core_silent") from error

    async def _within_timeout(self, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout):
                return await call
        except TimeoutError as error:
            message = f"the core has not answered within {self._timeout:g} s: try again later"
            raise _unready(message, "core_silent") from error

    def for_admin(self, handle: Handler) -> Handler:
        """Wrap a handler so that it needs the admin key and refuses pages of other sites."""

        @wraps(handle)
        async def checked(request: Request) -> ASGIApp:
            refuse_foreign(request)
            if not self.keys.has_admin:
                raise ApiError(
                    403,
                    f"{request.url.path} is off: start the server with --admin-api-key KEY, or "
                    f"with {ADMIN_API_KEY} set, and send that key",
                    code="admin_key_not_set",
                )
            if not self.keys.is_admin(request.scope):
                raise no_key("the admin key")
            try:
                return await handle(request)
            except ConfigError as error:  # the requested feature is not set up
                raise ApiError(400, str(error)) from error

        return checked


def refuse_foreign(request: Request) -> None:
    """Raise ``ApiError`` if a browser sends the request for a page of another origin."""
    origin = request.headers.get("origin")
    if is_allowed(request.scope):
        return
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        message = (
            f"origin is {origin!r:.80}, which may not use this route: add it to --allowed-origins"
        )
        raise ApiError(403, message, code="foreign_origin")


def _unready(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code, retry_after=RETRY_SECONDS)


def _retrieve_error(check: asyncio.Task[None]) -> None:
    """Retrieve the error of a task, because asyncio logs errors that nobody has retrieved."""
    if not check.cancelled():
        check.exception()


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")

"""What operators ask: is it well, what does it do; and, with the admin key, to stop and go on."""

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
from engine.server.errors import ApiError
from engine.server.http.openapi import ApiRoute
from engine.server.http.origins import is_allowed
from engine.server.keys import KeyRing, no_key
from engine.server.metrics import MEDIA_TYPE, Metrics
from engine.server.traffic import Traffic

RETRY_SECONDS = 5.0  # until a server that is not well is checked again
SCOPES = ("all", "new")  # of a pause
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[ASGIApp]]


class Operations:
    """The routes of operators. The core must answer within ``health_timeout`` seconds."""

    def __init__(
        self, engine: AsyncLLMEngine, keys: KeyRing, model: str, health_timeout: float
    ) -> None:
        self.traffic = Traffic()
        self.keys = keys
        self._engine = engine
        self._timeout = health_timeout
        self._metrics = Metrics(engine, model, self.traffic)
        self._check: asyncio.Task[None] | None = None

    def routes(self) -> list[ApiRoute]:
        admin = self._for_admin
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
            ApiRoute("POST", "/start_profile", admin(self.start_profile), None, dict),
            ApiRoute("POST", "/stop_profile", admin(self.stop_profile), None, dict),
        ]

    async def health(self, request: Request) -> ASGIApp:
        """Whether the cores still answer, which they do between steps. Some may have died."""
        await self._check_health()
        cores = self._engine.num_cores
        return _json({"cores": cores.total, "cores_alive": cores.alive})

    async def ready(self, request: Request) -> ASGIApp:
        """200 if a request that came now would be served."""
        if self._engine.paused is not None:
            raise _unready("the engine is paused: resume it by POST /resume", "paused")
        await self._check_health()
        return Response(b"", 200)

    async def load(self, request: Request) -> ASGIApp:
        """What it has to do now."""
        stats = await self._metrics.stats()
        load: dict[str, float] = {"server_load": self.traffic.num_in_flight}
        if stats is not None:
            load["running"] = stats.num_running
            load["waiting"] = stats.num_waiting + stats.num_parked
            load["kv_usage"] = stats.kv_usage
        return _json(load)

    async def metrics(self, request: Request) -> ASGIApp:
        """What Prometheus reads."""
        page = await self._metrics.text()
        if page is None:
            raise ApiError(
                500, "the metrics cannot be read; the log says why", code="metrics_failed"
            )
        return Response(page, headers={"Content-Type": MEDIA_TYPE})

    async def is_paused(self, request: Request) -> ASGIApp:
        """Whether it computes nothing until it is resumed."""
        return _json({"is_paused": self._engine.paused is not None})

    async def pause(self, request: Request) -> ASGIApp:
        """Compute nothing until it is resumed."""
        what = request.query_params.get("what", "all")
        if what not in SCOPES:
            raise ApiError(400, f"what is {what!r:.80}, must be all or new", param="what")
        await self._soon(self._engine.pause("new" if what == "new" else "all"))
        return _json({"status": "paused", "what": what})

    async def resume(self, request: Request) -> ASGIApp:
        """Go on."""
        await self._soon(self._engine.resume())
        return _json({"status": "resumed"})

    async def reset(self, request: Request) -> ASGIApp:
        """Forget cached prefixes."""
        value = request.query_params.get("reset_running_requests", "false").lower()
        if value not in ("true", "false"):
            raise ApiError(
                400,
                f"reset_running_requests is {value!r:.80}, must be true or false",
                param="reset_running_requests",
            )
        if not await self._soon(self._engine.reset_prefix_cache(value == "true")):
            raise ApiError(
                409,
                "requests use cached prefixes: try again later, or with "
                "?reset_running_requests=true, which has them computed again",
            )
        return _json({"status": "reset"})

    async def start_profile(self, request: Request) -> ASGIApp:
        """Record what the worker does."""
        await self._soon(self._engine.start_profile())
        return _json({"status": "started"})

    async def stop_profile(self, request: Request) -> ASGIApp:
        """Write what was recorded."""
        return _json({"traces": await self._engine.stop_profile()})

    async def _check_health(self) -> None:
        """One check at a time, however many ask. Raises ``ApiError`` or ``EngineDeadError``."""
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._engine.check_health(self._timeout))
            self._check.add_done_callback(_look_at)
        try:
            await asyncio.shield(self._check)
        except TimeoutError as error:
            raise _unready(str(error), "core_silent") from error

    async def _soon(self, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout):
                return await call
        except TimeoutError as error:
            message = f"the core has not answered within {self._timeout:g} s"
            raise _unready(message, "core_silent") from error

    def _for_admin(self, handle: Handler) -> Handler:
        """The handler, for those who show the admin key, and for no page of another site."""

        @wraps(handle)
        async def checked(request: Request) -> ASGIApp:
            refuse_foreign(request)
            if not self.keys.has_admin:
                raise ApiError(
                    403,
                    f"{request.url.path} is off: start the server with --admin-api-key KEY, or "
                    f"with {ADMIN_API_KEY} set, and show that key",
                    code="admin_key_not_set",
                )
            if not self.keys.is_admin(request.scope):
                raise no_key("the admin key is missing or wrong")
            try:
                return await handle(request)
            except ConfigError as error:  # the requested feature is not set up
                raise ApiError(400, str(error)) from error

        return checked


def refuse_foreign(request: Request) -> None:
    """Raises ``ApiError`` for what a browser sends on behalf of a page from elsewhere."""
    origin = request.headers.get("origin")
    if is_allowed(request.scope):
        return
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise ApiError(403, f"a page of {origin!r:.80} may not ask for this", code="foreign_origin")


def _unready(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code, retry_after=RETRY_SECONDS)


def _look_at(check: asyncio.Task[None]) -> None:
    """Take the error of a task whose clients have all left: nobody else would."""
    if not check.cancelled():
        check.exception()


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")

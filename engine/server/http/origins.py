"""CORS: web pages of other origins that may use the server. By default none may."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import ConfigError

ANY = "*"
NULL = "null"  # the origin of pages from files
DEFAULT_PORTS = {"http": 80, "https": 443}
READABLE = ("X-Request-Id", "Retry-After")  # headers of answers that a page may read
MAX_AGE_SECONDS = 600  # how long a browser may cache the response to a preflight request
KEY = "metronome.origin_is_allowed"  # in the scope


@dataclass(frozen=True)
class AllowedOrigins:
    """The origins whose pages may use the server, and the methods and headers that they may send.

    An origin is a scheme and a host, and a port unless it is the default one; ``*`` allows all
    pages. Raises ``ConfigError`` for a malformed origin.
    """

    origins: Sequence[str] = ()
    methods: Sequence[str] = (ANY,)
    headers: Sequence[str] = (ANY,)
    credentials: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "origins", tuple(map(normal_origin, self.origins)))

    def around(self, app: ASGIApp) -> ASGIApp:
        """Wrap an application with CORS headers; return it unchanged if no origin is allowed."""
        return CrossOrigin(app, self) if self.origins else app


class CrossOrigin:
    """ASGI middleware that answers preflight requests of allowed pages and adds CORS headers to
    responses. It must be the outermost, so that errors of other middleware get the headers too."""

    def __init__(self, app: ASGIApp, allowed: AllowedOrigins) -> None:
        self._app = app
        self._origins = frozenset(allowed.origins)
        self._is_open = ANY in allowed.origins
        self._for_allowed = CORSMiddleware(
            app,
            allow_origins=allowed.origins,
            allow_methods=allowed.methods,
            allow_headers=allowed.headers,
            allow_credentials=allowed.credentials,
            allow_private_network=not self._is_open,
            expose_headers=READABLE,
            max_age=MAX_AGE_SECONDS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        origin = Headers(scope=scope).get("origin")
        if origin is not None and (self._is_open or origin in self._origins):
            scope[KEY] = True
            await self._for_allowed(scope, receive, send)
        else:
            await self._app(scope, receive, send if self._is_open else varying(send))


def is_allowed(scope: Scope) -> bool:
    """Whether a request comes from a page of an allowed origin."""
    return bool(scope.get(KEY, False))


def varying(send: Send) -> Send:
    """Add ``Vary: Origin`` to responses, so that no cache gives a page the response for another
    origin."""

    async def send_varying(message: Message) -> None:
        if message["type"] == "http.response.start":
            message.setdefault("headers", [])
            MutableHeaders(scope=message).add_vary_header("Origin")
        await send(message)

    return send_varying


def normal_origin(value: str) -> str:
    """The origin as browsers write it. Raises ``ConfigError`` if it is malformed."""
    text = value.strip().rstrip("/")
    if text in (ANY, NULL):
        return text
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise _no_origin(value) from None
    has_more = parts.path or parts.query or parts.fragment or parts.username is not None
    if not parts.scheme or not parts.hostname or has_more or ANY in text:
        raise _no_origin(value)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    shown = "" if port in (None, DEFAULT_PORTS.get(parts.scheme)) else f":{port}"
    return f"{parts.scheme}://{host}{shown}"


def listed(option: str, values: Collection[str]) -> tuple[str, ...]:
    """The values of an option that is given several times, or as a JSON list. Raises
    ``ConfigError`` for a malformed list."""
    found: list[str] = []
    for value in values:
        if not value.lstrip().startswith("["):
            found.append(value)
            continue
        try:
            found += msgspec.json.decode(value, type=list[str])
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"--{option} is {value!r:.200}, must be a JSON list of strings or one value: "
                f"{error}"
            ) from error
    return tuple(found)


def _no_origin(value: str) -> ConfigError:
    return ConfigError(
        f"allowed_origins has {value!r:.200}, must be an origin such as http://localhost:5173 "
        "(scheme, host and port, without a path), null, or *"
    )

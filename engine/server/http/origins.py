"""Pages of other origins that may use the server from a browser (CORS): none unless named."""

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
NULL = "null"  # pages without an origin, as files have
DEFAULT_PORTS = {"http": 80, "https": 443}
READABLE = ("X-Request-Id", "Retry-After")  # headers of answers that a page may read
MAX_AGE_SECONDS = 600  # that a browser may keep the answer to a preflight request
KEY = "metronome.origin_is_allowed"  # in the scope


@dataclass(frozen=True)
class AllowedOrigins:
    """Which pages may use the server, and what they may send.

    An origin is a scheme and a host, with a port unless it is the default one; ``*`` allows all
    pages. Raises ``ConfigError`` for what is no origin.
    """

    origins: Sequence[str] = ()
    methods: Sequence[str] = (ANY,)
    headers: Sequence[str] = (ANY,)
    credentials: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "origins", tuple(map(normal_origin, self.origins)))

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application with headers for these pages; as it is if none is allowed."""
        return CrossOrigin(app, self) if self.origins else app


class CrossOrigin:
    """Answers preflight requests of allowed pages, and has each answer to them say that they may
    read it. It is the outermost layer: refusals of the others carry the headers as well."""

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
    """Answers say that they differ by origin, so that no cache gives one page another's."""

    async def noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            message.setdefault("headers", [])
            MutableHeaders(scope=message).add_vary_header("Origin")
        await send(message)

    return noting


def normal_origin(value: str) -> str:
    """The origin as browsers write it. Raises ``ConfigError`` for any other text."""
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
    """Values of an option that may be repeated, or be given as a JSON list, as vLLM takes it.
    Raises ``ConfigError`` for a list that is none."""
    found: list[str] = []
    for value in values:
        if not value.lstrip().startswith("["):
            found.append(value)
            continue
        try:
            found += msgspec.json.decode(value, type=list[str])
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"--{option} is {value!r:.200}, which is no JSON list of strings: {error}"
            ) from error
    return tuple(found)


def _no_origin(value: str) -> ConfigError:
    return ConfigError(
        f"allowed_origins has {value!r:.200}, must be an origin as http://localhost:5173 (scheme, "
        "host and port, without a path), null, or *"
    )

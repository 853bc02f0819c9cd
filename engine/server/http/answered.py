"""Add ``X-Request-Id`` to responses, and turn the errors of handlers into responses."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from engine.server.blame import KEY as BODY
from engine.server.blame import with_client_names
from engine.server.errors import ApiError, as_api_error, error_response
from engine.server.http.origins import is_allowed
from engine.server.streams import Streaming

logger = logging.getLogger("engine.server")
HEADER = b"x-request-id"
WELL_FORMED = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
KEY = "metronome.request_id"  # in the scope


def request_id_of(scope: Scope) -> str:
    """The client's ``X-Request-Id`` if it is well-formed, otherwise a random id."""
    if KEY not in scope:
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        is_usable = WELL_FORMED.fullmatch(given) is not None
        scope[KEY] = given.decode() if is_usable else uuid.uuid4().hex
    return str(scope[KEY])


def stamped(answer: ASGIApp, scope: Scope) -> ASGIApp:
    """Add the request's id to the headers of its response."""
    name = request_id_of(scope).encode()
    if isinstance(answer, Response):
        answer.raw_headers.append((HEADER, name))
    elif isinstance(answer, Streaming):
        answer.headers.append((HEADER, name))
    return answer


def answered(handle: Callable[[Request], Awaitable[ASGIApp]]) -> Callable[..., Awaitable[ASGIApp]]:
    """Wrap a handler: its errors become responses, and all responses get the request's id."""

    async def endpoint(request: Request) -> ASGIApp:
        try:
            refuse_other_sites(request)
            answer = await handle(request)
        except ClientDisconnect:  # nobody receives this response
            answer = Response(b"", 400)
        except Exception as error:
            api_error = with_client_names(request.scope.get(BODY), as_api_error(error))
            if api_error.status == 500:
                logger.exception("%s %s failed", request.method, request.scope["path"])
            answer = error_response(api_error, request.scope["path"])
        return stamped(answer, request.scope)

    return endpoint


def refuse_other_sites(request: Request) -> None:
    """Raise ``ApiError`` for a POST that a browser sends for a page of another site, unless the
    page's origin is allowed. Any page could otherwise use a server without keys."""
    is_other = request.method not in ("GET", "HEAD") and not is_allowed(request.scope)
    if is_other and request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise ApiError(
            403,
            f"the page's origin is {request.headers.get('origin', 'unknown')!r:.80}, which may not "
            "use this server: add it to --allowed-origins of the server",
            code="foreign_origin",
        )

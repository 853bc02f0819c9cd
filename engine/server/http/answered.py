"""Answers to requests: each has the request's name, ``X-Request-Id``; errors are answers too."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from engine.server.blame import KEY as BODY
from engine.server.blame import in_words_of
from engine.server.errors import ApiError, as_api_error, error_response
from engine.server.http.origins import is_allowed
from engine.server.streams import Streaming

logger = logging.getLogger("engine.server")
HEADER = b"x-request-id"
WELL_FORMED = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
KEY = "metronome.request_id"  # in the scope


def request_id_of(scope: Scope) -> str:
    """The id that the client has chosen, if it is well-formed; else one of ours."""
    if KEY not in scope:
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        is_usable = WELL_FORMED.fullmatch(given) is not None
        scope[KEY] = given.decode() if is_usable else uuid.uuid4().hex
    return str(scope[KEY])


def stamped(answer: ASGIApp, scope: Scope) -> ASGIApp:
    """The answer, with the name of its request."""
    name = request_id_of(scope).encode()
    if isinstance(answer, Response):
        answer.raw_headers.append((HEADER, name))
    elif isinstance(answer, Streaming):
        answer.headers.append((HEADER, name))
    return answer


def answered(handle: Callable[[Request], Awaitable[ASGIApp]]) -> Callable[..., Awaitable[ASGIApp]]:
    """The handler; what it raises is answered as an error."""

    async def endpoint(request: Request) -> ASGIApp:
        try:
            refuse_other_sites(request)
            answer = await handle(request)
        except ClientDisconnect:  # with nobody to read this
            answer = Response(b"", 400)
        except Exception as error:
            api_error = in_words_of(request.scope.get(BODY), as_api_error(error))
            if api_error.status == 500:
                logger.exception("%s %s failed", request.method, request.scope["path"])
            answer = error_response(api_error, request.scope["path"])
        return stamped(answer, request.scope)

    return endpoint


def refuse_other_sites(request: Request) -> None:
    """Pages of other sites may not have a browser ask for anything, unless their origin is allowed:
    they could spend what a server without keys has. Raises ``ApiError``."""
    is_asking = request.method not in ("GET", "HEAD") and not is_allowed(request.scope)
    if is_asking and request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise ApiError(
            403,
            "the page is of another site, which --allowed-origins of the server does not name",
            code="foreign_origin",
        )

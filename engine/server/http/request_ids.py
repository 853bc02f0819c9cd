"""The name of each request, as its client and its answer have it: ``X-Request-Id``."""

from __future__ import annotations

import re
import uuid

from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from engine.server.streams import EventStream

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
    elif isinstance(answer, EventStream):
        answer.headers.append((HEADER, name))
    return answer

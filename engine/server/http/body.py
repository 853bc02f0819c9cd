"""Bodies of requests, with a bound on each and one on all that are being read."""

from __future__ import annotations

from starlette.requests import Request

from engine.server.errors import ApiError

TOTAL_BODIES = 16  # of the largest size, that are read at a time


class Bodies:
    """Reads bodies of ``most`` bytes each."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0  # bytes of those that are being read

    async def read(self, request: Request) -> bytes:
        """Raises ``ApiError`` as soon as it is known to be too large, before it is read."""
        self._check(_declared(request))
        parts: list[bytes] = []
        size = 0
        try:
            async for part in request.stream():
                size += len(part)
                self._total += len(part)
                self._check(size)
                parts.append(part)
            return b"".join(parts)
        finally:
            self._total -= size

    def _check(self, size: int) -> None:
        if size > self._most:
            raise ApiError(
                413,
                f"the body has {size} bytes or more, the limit is {self._most}: send less, or "
                "raise --max-body-bytes of the server",
            )
        if self._total > TOTAL_BODIES * self._most:
            raise ApiError(
                503,
                f"bodies being read have over {TOTAL_BODIES * self._most} bytes, the limit: "
                "try again",
                code="too_many_bodies",
            )


def _declared(request: Request) -> int:
    """What Content-Length says, which HTTP's parser has checked; 0 if nothing does."""
    return int(request.headers.get("content-length", 0))

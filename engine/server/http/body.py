"""Read request bodies, within a limit for each body and one for their total size."""

from __future__ import annotations

from starlette.requests import Request

from engine.server.errors import ApiError

TOTAL_BODIES = 16  # bodies of the largest size that may be read at the same time


class Bodies:
    """Reads bodies of at most ``most`` bytes each."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0  # bytes of all bodies that are being read

    async def read(self, request: Request) -> bytes:
        """Read the body of a request. Raises ``ApiError`` as soon as the body is known to be too
        large."""
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
                f"the body has at least {size} bytes, the limit is {self._most}: send a smaller "
                "one, or raise --max-body-bytes of the server",
            )
        if self._total > TOTAL_BODIES * self._most:
            raise ApiError(
                503,
                f"the server is reading bodies of {self._total} bytes together, the limit is "
                f"{TOTAL_BODIES * self._most}: send the request again, see Retry-After",
                code="too_many_bodies",
            )


def _declared(request: Request) -> int:
    """The Content-Length, which the HTTP parser has checked; 0 without the header."""
    return int(request.headers.get("content-length", 0))

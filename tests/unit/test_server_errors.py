"""Errors as clients of the server read them."""

from __future__ import annotations

import pytest

from engine.errors import RefusedError
from engine.server.errors import ApiError, as_api_error, error_response


def test_no_api_tells_of_the_inside_of_a_server() -> None:
    error = ApiError(500, "at 0x7f00deadbeef of /home/me/models/x.py it fell over")
    for body in (error.body().decode(), str(error.anthropic())):
        assert "fell over" in body and "0x7f00" not in body and "/home" not in body


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (ApiError(503, "it was read too slowly", code="aborted"), "1"),
        (ApiError(429, "too many"), "1"),
        (ApiError(503, "the server is ending", retry_after=-2.0), "1"),
        (ApiError(503, "the server is ending", retry_after=2.1), "3"),
        (as_api_error(RefusedError("the queue is full")), "1"),
        (ApiError(400, "wrong"), None),
        (ApiError(500, "failed"), None),
    ],
)
def test_what_is_refused_for_now_says_when_to_come_again(
    error: ApiError, seconds: str | None
) -> None:
    assert error_response(error).headers.get("Retry-After") == seconds

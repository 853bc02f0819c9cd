"""The files of the page, which are open to everyone and contain no data."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.server.errors import ApiError
from engine.server.http.openapi import ApiRoute

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
FILES = "/page/"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""The kinds of files that are served. Others in the directory, such as licences, are not."""
HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Asset(NamedTuple):
    """A file of the page."""

    data: bytes
    headers: dict[str, str]


class PageAssets:
    """The page's files, read once. A request can name only one of them, whatever its path."""

    def __init__(self, directory: Path = STATIC) -> None:
        self._by_path = {
            FILES + file.relative_to(directory).as_posix(): asset_of(file)
            for file in sorted(directory.rglob("*"))
            if file.suffix in MEDIA_TYPES and file.is_file()
        }
        data, headers = self._by_path[FILES + INDEX]
        # What is no browser gets another answer at this path.
        self._by_path["/"] = Asset(data, {**headers, "Vary": "Accept"})

    @property
    def paths(self) -> frozenset[str]:
        """The paths of all files, which need no key."""
        return frozenset(self._by_path)

    def routes(self) -> list[ApiRoute]:
        """The routes of the files. The second one must come after all others below ``/page/``."""
        return [
            ApiRoute("GET", "/", self.index),
            ApiRoute("GET", FILES + "{file:path}", self.file),
        ]

    async def index(self, request: Request) -> ASGIApp:
        """The page for browsers: a chat, and what the server does at the moment."""
        return self._answer(request)

    async def file(self, request: Request) -> ASGIApp:
        """A file that the page consists of."""
        return self._answer(request)

    def _answer(self, request: Request) -> ASGIApp:
        path = request.scope["path"]
        asset = self._by_path.get(path)
        if asset is None:
            raise ApiError(404, f"there is no route {path!r:.80}: see /openapi.json")
        if is_known(request.headers.get("if-none-match"), asset.headers["ETag"]):
            unchanged = {k: v for k, v in asset.headers.items() if k != "Content-Type"}
            return Response(status_code=304, headers=unchanged)
        return Response(asset.data, headers=asset.headers)


def asset_of(file: Path) -> Asset:
    """Read a file of the page."""
    data = file.read_bytes()
    about = {
        "Content-Type": MEDIA_TYPES[file.suffix],
        "ETag": f'"{hashlib.sha256(data).hexdigest()[:32]}"',
    }
    return Asset(data, {**HEADERS, **about})


def is_known(if_none_match: str | None, tag: str) -> bool:
    """Whether a header ``If-None-Match`` contains this tag. Proxies that compress an answer make
    its tag weak (``W/``)."""
    known = [each.strip().removeprefix("W/") for each in (if_none_match or "").split(",")]
    return tag in known or known == ["*"]

"""Loads a file from an allowed host, within limits of time and bytes."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import urljoin

from engine.errors import RequestError
from engine.pictures.addresses import PORTS, AllowedHosts, Place, place_of
from engine.pictures.errors import refused

SECONDS = 10.0  # for all of it, redirects included
CONNECT_SECONDS = 4.0  # for each address
MOST_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
CHUNK = 64 << 10
HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "metronome"}


def fetch(url: str, hosts: AllowedHosts, most_bytes: int, seconds: float = SECONDS) -> bytes:
    """The content at an http or https URL. Connects only to addresses that ``hosts`` allows, for
    each redirect anew, and uses no proxy. Blocks up to ``seconds``, and as long as the system's
    resolver needs. Raises ``RequestError``."""
    end = time.monotonic() + seconds
    for _ in range(MOST_REDIRECTS + 1):
        place = place_of(url)
        hosts.check(place)
        addresses = hosts.addresses(place)
        try:
            with _connection(place, addresses, end) as connection:
                found = _answer(connection, place, url, most_bytes)
        except RequestError:
            raise
        except (OSError, HTTPException, ValueError) as error:  # the last for wrong chunks
            is_late = time.monotonic() >= end
            raise _failed(place, seconds if is_late else None, error) from error
        if time.monotonic() >= end:  # the content may have been cut
            raise _failed(place, seconds)
        if isinstance(found, bytes):
            return found
        url = found
    raise refused(
        f"a picture's URL leads to more than {MOST_REDIRECTS} redirects: send the last URL"
    )


def _answer(connection: HTTPConnection, place: Place, url: str, most_bytes: int) -> bytes | str:
    """The content, or the URL of a redirect."""
    connection.request("GET", place.target, headers=HEADERS)
    answer = connection.getresponse()
    if answer.status in REDIRECTS:
        return _redirected(url, answer.getheader("Location") or "", place)
    if answer.status != 200:
        raise refused(
            f"a picture cannot be loaded: {place.shown} answers with status {answer.status}; "
            "correct its URL, or send the picture as a data URL"
        )
    coding = answer.getheader("Content-Encoding", "identity").lower()
    if coding != "identity":  # not requested, and a small body may be a large file
        raise refused(
            f"a picture cannot be loaded: {place.shown} answers with Content-Encoding "
            f"{coding!r:.40}; send the picture as a data URL"
        )
    return _content(answer, place, most_bytes)


def _redirected(url: str, location: str, place: Place) -> str:
    try:
        found = urljoin(url, location)
    except ValueError:
        found = ""
    if not location or found.partition(":")[0].lower() not in PORTS:
        raise refused(
            f"{place.shown} redirects a picture to {location!r:.80}, which is not http or https: "
            "send the picture as a data URL"
        )
    if place.scheme == "https" and not found.lower().startswith("https:"):
        raise refused(
            f"{place.shown} redirects a picture from https to http: send the picture as a data URL"
        )
    return found


def _content(answer: HTTPResponse, place: Place, most_bytes: int) -> bytes:
    pieces, size = list[bytes](), 0
    is_too_large = (answer.length or 0) > most_bytes
    while not is_too_large and (piece := answer.read(CHUNK)):
        pieces.append(piece)
        size += len(piece)
        is_too_large = size > most_bytes
    if is_too_large:
        raise refused(
            f"a picture at {place.shown} has more than {most_bytes} bytes, the limit: shrink it"
        )
    if answer.length:
        raise ConnectionError(f"it ends after {size} bytes, {answer.length} are missing")
    return b"".join(pieces)


@contextmanager
def _connection(place: Place, addresses: list[str], end: float) -> Iterator[HTTPConnection]:
    """A connection to one of the addresses, which is cut at the time ``end``."""
    sockets = [_connected(place, addresses, end)]
    cutter = threading.Timer(max(0.0, end - time.monotonic()), _cut, [sockets])
    cutter.daemon = True
    cutter.start()
    connection = HTTPConnection(place.host, place.port)
    connection.default_port = PORTS[place.scheme]
    try:
        if place.scheme == "https":
            secure = _tls().wrap_socket(
                sockets[0], server_hostname=place.host, do_handshake_on_connect=False
            )
            sockets.append(secure)
            secure.do_handshake()
        connection.sock = sockets[-1]
        yield connection
    finally:
        cutter.cancel()
        connection.close()
        for each in sockets:
            each.close()


def _connected(place: Place, addresses: list[str], end: float) -> socket.socket:
    """A socket to the first address that accepts."""
    reason: OSError = TimeoutError("it does not accept connections")
    for address in addresses:
        left = end - time.monotonic()
        if left <= 0:
            break
        try:
            # An address, so that nothing is resolved again.
            found = socket.create_connection((address, place.port), min(left, CONNECT_SECONDS))
        except OSError as error:
            reason = error
            continue
        found.settimeout(max(0.01, end - time.monotonic()))
        return found
    raise reason


def _cut(sockets: list[socket.socket]) -> None:
    with suppress(OSError):
        # Not the method of a TLS socket, which other threads must not call.
        socket.socket.shutdown(sockets[-1], socket.SHUT_RDWR)


def _failed(place: Place, limit: float | None, error: Exception | None = None) -> RequestError:
    """The error for a host. limit: seconds that were not enough; ``None``: it was not late."""
    why = str(error) or "it hangs up" if limit is None else f"it takes longer than {limit:g} s"
    return refused(f"a picture cannot be loaded from {place.shown}: {why}; send it as a data URL")


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()

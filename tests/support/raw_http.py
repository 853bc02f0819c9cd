"""Bytes to a server and what it says to them, where no client would send such bytes."""

from __future__ import annotations

import json
import socket
import time
from typing import Any, NamedTuple

from support.patience import WAIT_SECONDS


class Said(NamedTuple):
    """All that came until the server closed, or ``None`` of what did not come."""

    status: int | None
    headers: dict[str, str]
    body: bytes
    is_closed: bool
    seconds: float

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


def connect(port: int, seconds: float = WAIT_SECONDS) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=seconds)


def say(port: int, *parts: bytes, pause: float = 0.0, wait: float = WAIT_SECONDS) -> Said:
    """Send the parts, with pauses between them; what comes within ``wait`` seconds."""
    with connect(port, wait) as sock:
        began = time.monotonic()
        try:
            for part in parts:
                sock.sendall(part)
                time.sleep(pause)
        except OSError:  # it has heard enough
            pass
        return answer_of(sock, began)


def answer_of(sock: socket.socket, began: float) -> Said:
    """Everything up to the end of one answer."""
    data, is_closed = b"", False
    while not is_whole(data):
        try:
            part = sock.recv(1 << 16)
        except TimeoutError:
            break
        except OSError:
            part = b""
        if not part:
            is_closed = True
            break
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    status = int(lines[0].split()[1]) if lines[0].startswith("HTTP/") else None
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return Said(status, headers, body, is_closed, time.monotonic() - began)


def is_whole(data: bytes) -> bool:
    """Whether an answer of known length is all there."""
    head, blank, body = data.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length: "):
            return bool(blank) and len(body) >= int(line[16:])
    return False


def request(path: str, body: bytes = b"", **headers: str) -> bytes:
    """A good request; ``headers`` with _ for -."""
    method = "POST" if body else "GET"
    given = {"Host": "test", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if body:
        given.setdefault("Content-Length", str(len(body)))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

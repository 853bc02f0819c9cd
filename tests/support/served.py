"""A server in a process of its own, as users start it."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from support.patience import WAIT_SECONDS


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Served:
    """A running ``metronome serve``."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, scheme: str = "http") -> None:
        self.process = process
        self.port = port
        self.url = f"{scheme}://127.0.0.1:{port}"

    @classmethod
    def start(
        cls,
        port: int,
        *options: str,
        log: IO[bytes] | None = None,
        scheme: str = "http",
        **variables: str,
    ) -> Served:
        """One that is not ready yet."""
        command = [sys.executable, "-m", "engine.cli.main", "serve", "--port", str(port), *options]
        process = subprocess.Popen(command, env={**os.environ, **variables}, stderr=log)
        return cls(process, port, scheme)

    def end(self, number: int = signal.SIGTERM, seconds: float = WAIT_SECONDS) -> int:
        """Its exit status."""
        self.process.send_signal(number)
        return self.process.wait(seconds)


@contextmanager
def served(
    *options: str,
    log: IO[bytes] | None = None,
    tls: ssl.SSLContext | None = None,
    **variables: str,
) -> Iterator[Served]:
    """The model in the box, or another that the options name. ``log``: where its log goes;
    ``tls``: how to ask it, if the options give it a certificate."""
    scheme = "http" if tls is None else "https"
    server = Served.start(free_port(), *options, log=log, scheme=scheme, **variables)
    process = server.process
    try:
        end = time.monotonic() + WAIT_SECONDS
        while not is_ready(server.url, tls):
            assert process.poll() is None, "the server has ended before it was ready"
            assert time.monotonic() < end, "the server is not ready"
            time.sleep(0.05)
        yield server
    finally:
        process.kill()
        process.wait()


def is_ready(url: str, tls: ssl.SSLContext | None = None) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=WAIT_SECONDS, context=tls) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False

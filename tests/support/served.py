"""A server in a process of its own, as users start it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from email.message import Message
from pathlib import Path
from typing import IO, Any, NamedTuple

from engine.assets import BOX_MODEL
from support.patience import WAIT_SECONDS

# A server that is forked from a process that has imported these is ready in a quarter of the time.
IMPORTED = ("engine.server.run", "engine.worker.worker", "kernels.cpu.prepare", "transformers")


def free_ports(num: int) -> int:
    """The first of ``num`` ports in a row at which nobody listens."""
    while True:
        first = free_port()
        try:
            with ExitStack() as held:
                for port in range(first, first + num):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
        except OSError:
            continue


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Answer(NamedTuple):
    status: int
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def serve_command(port: int, options: tuple[str, ...]) -> tuple[str, ...]:
    """The command line of a server: with the model in the box, unless the options name another
    model or a running core."""
    is_first = bool(options) and not options[0].startswith("-")
    if not is_first and not {"--model", "--core-address"} & set(options):
        options += ("--model", str(BOX_MODEL))
    return ("serve", "--port", str(port), *options)


class Forked:
    """A process that runs the command, with the methods of a ``Popen`` that tests call."""

    def __init__(
        self,
        command: tuple[str, ...],
        log: Path | None,
        variables: dict[str, str],
        prepare: Callable[[], object] | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(IMPORTED))
        self._process = context.Process(target=run_command, args=(command, log, variables, prepare))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"the server has not ended within {timeout} s")
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_command(
    command: tuple[str, ...],
    log: Path | None,
    variables: dict[str, str],
    prepare: Callable[[], object] | None = None,
) -> None:
    """Run ``metronome`` in this process, with its log in a file. prepare: called before it."""
    from engine.cli.main import main

    os.environ.update(variables)
    if log is not None:
        with log.open("wb") as file:
            os.dup2(file.fileno(), sys.stderr.fileno())
    if prepare is not None:
        prepare()
    sys.exit(main(list(command)))


class Served:
    """A running ``metronome serve``."""

    def __init__(
        self, process: subprocess.Popen[bytes] | Forked, port: int, scheme: str = "http"
    ) -> None:
        self.process = process
        self.port = port
        self.url = f"{scheme}://127.0.0.1:{port}"

    @classmethod
    def start(
        cls,
        port: int,
        *options: str,
        log: IO[bytes] | None = None,
        **variables: str,
    ) -> Served:
        """One that is not ready yet."""
        command = (sys.executable, "-m", "engine.cli.main", *serve_command(port, options))
        return cls(subprocess.Popen(command, env={**os.environ, **variables}, stderr=log), port)

    def ask(
        self, path: str, body: object = None, *, method: str | None = None, **headers: str
    ) -> Answer:
        """An answer of any status. body: bytes, or a value to be written as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        about = {name.replace("_", "-"): value for name, value in headers.items()}
        about.setdefault("Content-Type", "application/json")
        request = urllib.request.Request(self.url + path, data, about, method=method)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
                return Answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read())

    def end(self, number: int = signal.SIGTERM, seconds: float = WAIT_SECONDS) -> int:
        """Its exit status."""
        self.process.send_signal(number)
        return self.process.wait(seconds)


@contextmanager
def served(*options: str, log: IO[bytes] | None = None, **variables: str) -> Iterator[Served]:
    """A fresh process. The model in the box, or another that the options name. ``log``: where its
    log goes."""
    yield from until_it_ends(Served.start(free_port(), *options, log=log, **variables))


@contextmanager
def forked(
    *options: str,
    log: Path | None = None,
    tls: ssl.SSLContext | None = None,
    prepare: Callable[[], object] | None = None,
    **variables: str,
) -> Iterator[Served]:
    """A process that need not import anything, for tests of what a server answers. Its core is in
    the same process unless the options say otherwise. ``tls``: how to connect, if the options give
    the server a certificate; ``prepare``: called in the process before the server."""
    port = free_port()
    command = serve_command(port, options)
    if "--multiprocess" not in options:
        command += ("--no-multiprocess",)
    process = Forked(command, log, {**os.environ, **variables}, prepare)
    yield from until_it_ends(Served(process, port, "http" if tls is None else "https"), tls)


def until_it_ends(server: Served, tls: ssl.SSLContext | None = None) -> Iterator[Served]:
    """The server, once it is ready."""
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

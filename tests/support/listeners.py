"""Servers of one answer, which note what reaches them."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from support.patience import WAIT_SECONDS

Answer = Callable[[socket.socket, bytes], object]


class Listener:
    """A server of one answer at an address of this machine, which counts its connections."""

    def __init__(
        self,
        answer: bytes | Answer,
        address: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.answer = answer
        self._tls = tls
        self.requests: list[bytes] = []
        self._connections: list[socket.socket] = []
        self._socket = socket.create_server((address, port))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"{'http' if tls is None else 'https'}://{address}:{self.port}"
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                thread = threading.Thread(target=self._reply, args=[connection], daemon=True)
                self._connections.append(connection)
                self._threads.append(thread)
                thread.start()

    def _reply(self, connection: socket.socket) -> None:
        with ExitStack() as stack, suppress(OSError):
            stack.enter_context(connection)
            if self._tls is not None:
                connection = stack.enter_context(
                    self._tls.wrap_socket(connection, server_side=True)
                )
            request = connection.recv(1 << 16)
            self.requests.append(request)
            if isinstance(self.answer, bytes):
                connection.sendall(self.answer)
            else:
                self.answer(connection, request)

    def close(self) -> None:
        """End all connections, and wait until their threads have ended: later tests may count the
        open files of this process."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._socket.close()
        for connection in self._connections:
            with suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_SECONDS)


@contextmanager
def listening(*answers: bytes | Answer, address: str = "127.0.0.1") -> Iterator[list[Listener]]:
    with ExitStack() as stack:
        found = [Listener(each, address) for each in answers]
        for each in found:
            stack.callback(each.close)
        yield found


def answered(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, "Connection: close", "", ""]
    return "\r\n".join(lines).encode() + body


def sized(body: bytes) -> bytes:
    return answered(body, f"Content-Length: {len(body)}")


def redirect(url: str) -> bytes:
    return answered(b"", f"Location: {url}", "Content-Length: 0", status="302 Found")


def drip(connection: socket.socket, request: bytes) -> None:
    """Send an answer for 45 s, and never longer than a fetch allows without a byte."""
    for byte in answered(b"x" * 900):
        connection.sendall(bytes([byte]))
        threading.Event().wait(0.05)


def silent(connection: socket.socket, request: bytes) -> None:
    """Keep a connection until the client closes it."""
    connection.recv(1)

"""A TCP connection to a server on this machine that is cut, stalls, is slow, or changes bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from support.patience import WAIT_SECONDS

SECONDS = {"stalled": WAIT_SECONDS, "slow": 0.02}  # for each 4 KiB


class Relay:
    """Passes bytes to a port of this machine and back. ``fault``: what happens to those that come
    back when ``after`` bytes have."""

    def __init__(self, port: int, fault: str, after: int) -> None:
        self._port = port
        self._fault = fault
        self._after = after
        self._is_over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._is_over.set()
        _shut(self._ends)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += near, far
                for work, args in ((self._there, (near, far)), (self._back, (far, near))):
                    self._threads.append(threading.Thread(target=work, args=args))
                    self._threads[-1].start()

    def _there(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)
        _shut((source, target))

    def _back(self, source: socket.socket, target: socket.socket) -> None:
        left = self._after
        with suppress(OSError):
            while data := source.recv(4096):
                if left < len(data):
                    data = self._fail(data, left)
                if not data:
                    break
                target.sendall(data)
                left -= len(data)
        _shut((source, target))

    def _fail(self, data: bytes, place: int) -> bytes:
        """What arrives of bytes of which the fault begins at ``place``, if not before them."""
        if self._fault == "cut":
            return data[: max(place, 0)]
        if self._fault == "changed" and place >= 0:
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        if self._fault in SECONDS:
            self._is_over.wait(SECONDS[self._fault])
        return data


def _shut(ends: Iterable[socket.socket]) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay(port: int, fault: str, after: int) -> Iterator[str]:
    """The address of a connection to a port that has a fault."""
    made = Relay(port, fault, after)
    try:
        yield made.address
    finally:
        made.close()

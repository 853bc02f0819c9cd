"""Messages of a core to ranks on other machines, over TCP: what the ring is on one machine.

    calls    from the core to a rank, in order; back come the words that the rank shows
    reports  from a rank: what its calls return and, every second, how far it is

A rank listens for both connections of the core, and nobody else has the secret to connect. A
connection that is lost is not made again: the rank is lost then, or for the rank its core. A call
carries its number, so that one that comes twice, or not at all, is found.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe

import zmq

from engine.errors import RankError
from engine.ipc import sockets
from engine.ipc.address import TCP
from engine.ipc.ring import NAP_SECONDS, RingError, Stopped

PIECE_BYTES = 1 << 22  # of a message, in a frame
BEAT_SECONDS = 1.0  # between two messages about how far a rank is
GREET_SECONDS = 120  # in which all other ranks have started, and the core connects
HELLO, REPORT, BEAT = b"h", b"r", b"b"  # what a message on the connection for reports begins with
_NUMBER = struct.Struct("<Q")
_WORD = struct.Struct("<Bq")  # index and value
_COUNT = struct.Struct("<Q")


class _Peer:
    """The core's connections to one rank."""

    def __init__(self, context: zmq.Context[sockets.Socket], address: str, secret: str) -> None:
        calls, reports = address.split()
        self.calls, self._calls_lost = sockets.connect(context, calls, secret)
        self.reports, self.lost = sockets.connect(context, reports, secret)
        self.reports.send(HELLO)
        self.line, self.feed = Pipe(duplex=False)
        self.num_begun = 0
        self._lock = threading.Lock()  # of ``calls``, which several threads use
        self._words: dict[int, int] = {}

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send a message, unless that must wait. Returns whether it was sent."""
        try:
            with self._lock:
                self.calls.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def word(self, index: int) -> int:
        with self._lock:
            while not self.calls.closed and self.calls.poll(0):
                self._words.update(_WORD.iter_unpack(self.calls.recv()))
            return self._words.get(index, 0)

    def close(self) -> None:
        with self._lock:
            sockets.close(self.calls, self._calls_lost, self.reports, self.lost)


class RankSockets:
    """The core's end of the connections to all ranks. It has the methods of ``RingWriter``.

    addresses: of ranks, as ``RankSocket.address``. on_lost: called in a thread with the index of a
    rank whose connection is lost. Raises ``ConfigError`` for an invalid address."""

    def __init__(
        self, addresses: Sequence[str], secret: str, on_lost: Callable[[int], object]
    ) -> None:
        self.num_sent = 0
        """Messages sent so far, or about to be."""
        self._on_lost = on_lost
        self._is_stopped = False
        self._waker = sockets.Waker()
        self._context: zmq.Context[sockets.Socket] = zmq.Context()
        self._peers: list[_Peer] = []
        try:
            for address in addresses:
                self._peers.append(_Peer(self._context, address, secret))
        except BaseException:
            self._context.destroy(linger=0)
            self._waker.close()
            raise
        self.lines = [peer.line for peer in self._peers]
        """From which the reports of each rank are received."""
        self._thread = threading.Thread(target=self._run, name="rank-reports", daemon=True)
        self._thread.start()

    def send(self, *parts: bytes) -> None:
        """Send a message, the concatenation of ``parts``, to all ranks. Waits for a rank that is
        hundreds of messages late. Raises ``Stopped``."""
        message = b"".join(parts)
        pieces = [
            message[begin : begin + PIECE_BYTES]
            for begin in range(0, max(1, len(message)), PIECE_BYTES)
        ]
        frames = [_NUMBER.pack(self.num_sent), *pieces]
        self.num_sent += 1
        for peer in self._peers:
            while self._is_stopped or not peer.send(frames):
                if self._is_stopped:
                    raise Stopped
                time.sleep(NAP_SECONDS)

    def stop(self) -> None:
        """Let no message be sent any more. Any thread may call it."""
        self._is_stopped = True

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def reported(self, reader: int, index: int) -> int:
        """The word that a rank has shown last; 0: none yet. Any thread may call it."""
        return self._peers[reader].word(index)

    def num_begun(self, reader: int) -> int:
        """The operations with others that a rank has begun, at most a second ago."""
        return self._peers[reader].num_begun

    def close(self) -> None:
        """Close the connections. May be repeated."""
        self.stop()
        for line in self.lines:
            line.close()  # the thread does not wait for a reader any more
        self._waker.wake()
        self._thread.join()
        for peer in self._peers:
            peer.close()
            peer.feed.close()
        self._context.term()
        self._waker.close()

    # -- in the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.fd, zmq.POLLIN)
        for peer in self._peers:
            poller.register(peer.reports, zmq.POLLIN)
            poller.register(peer.lost, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._waker.fd in ready:
                return
            for index, peer in enumerate(self._peers):
                if peer.reports in ready:
                    self._take(peer, peer.reports.recv())
                elif peer.lost in ready:  # what was received before is taken first
                    poller.unregister(peer.reports)
                    poller.unregister(peer.lost)
                    self._on_lost(index)

    def _take(self, peer: _Peer, message: bytes) -> None:
        kind, content = message[:1], message[1:]
        if kind == BEAT:
            (peer.num_begun,) = _COUNT.unpack(content)
        elif kind == REPORT:
            with suppress(OSError):  # nobody reads any more
                peer.feed.send_bytes(content)


class RankSocket:
    """A rank's end, in a process on another machine. It has the methods of ``RingReader``.

    ip: at which it listens. on_lost: called in a thread if the core is lost. Raises ``ConfigError``
    if it cannot listen there."""

    def __init__(
        self,
        ip: str,
        secret: str,
        on_lost: Callable[[], object],
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self.progress: Callable[[], int] = lambda: 0
        """Returns how many operations with other ranks this one has begun."""
        self._on_lost = on_lost
        self._beat_seconds = beat_seconds
        self._context: zmq.Context[sockets.Socket] = zmq.Context()
        self._calls = sockets.bind(self._context, f"{TCP}{ip}:*", secret)
        self._reports = sockets.bind(self._context, f"{TCP}{ip}:*", secret)
        self._core: bytes = b""  # identity of the core on the connection for calls
        self._listener: bytes = b""  # and on that for reports
        self._lock = threading.Lock()  # of ``_reports``, which two threads use
        self._num_received = 0
        self._words: dict[int, int] = {}  # which the core has not been sent
        self._is_closed = False

    @property
    def address(self) -> str:
        """Addresses for calls and for reports."""
        ends = self._calls, self._reports
        return " ".join(str(end.getsockopt_string(zmq.LAST_ENDPOINT)) for end in ends)

    def accept(self, seconds: int = GREET_SECONDS) -> None:
        """Wait for the core. Raises ``RankError`` if it does not connect."""
        if not self._reports.poll(1000 * seconds):
            raise RankError(f"the core has not connected to this rank in {seconds} s")
        self._listener, _ = self._reports.recv_multipart()
        threading.Thread(target=self._beat, name="rank-beat", daemon=True).start()

    def receive(self) -> bytes:
        """Let the core see the words, and wait for the next message. Raises ``RingError`` for one
        that is out of order."""
        self._show()
        self._core, number, *pieces = self._calls.recv_multipart()
        if _NUMBER.unpack(number)[0] != self._num_received:
            raise RingError(
                f"message {self._num_received} of the core is number {_NUMBER.unpack(number)[0]}: "
                "a message was lost, or was read twice"
            )
        self._num_received += 1
        return b"".join(pieces)

    def report(self, index: int, value: int) -> None:
        """Let the core see a word, before the next message is received."""
        self._words[index] = value

    def send_report(self, report: bytes) -> None:
        """Send what a call returns, or an error. Does nothing if the core has ended."""
        self._send(REPORT + report)

    def _show(self) -> None:
        if self._words:
            words = b"".join(_WORD.pack(*each) for each in self._words.items())
            with suppress(zmq.ZMQError):  # the core has ended
                self._calls.send_multipart([self._core, words])
            self._words.clear()

    def close(self) -> None:
        """Close the connections when what was sent has arrived, or does not in a second."""
        with self._lock:
            self._is_closed = True
            sockets.close(self._reports, self._calls, linger_ms=sockets.LINGER_MS)
        self._context.term()

    def _send(self, message: bytes) -> bool:
        """Returns whether the core is still connected."""
        try:
            with self._lock:
                self._reports.send_multipart([self._listener, message])
        except zmq.ZMQError:
            return False
        return True

    def _beat(self) -> None:
        while self._send(BEAT + _COUNT.pack(self.progress())):
            time.sleep(self._beat_seconds)
        if not self._is_closed:
            self._on_lost()

"""Opens streams on a server from one thread, without a framework, and notes when tokens arrive.

It must take much less of a processor than the server, with which it often shares a machine. So it
reads many streams at one look, and nothing is parsed but the data of events.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import json
import resource
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from selectors import EVENT_READ, EVENT_WRITE
from types import TracebackType
from typing import Any

import msgspec

from policylab.bench.answers import DONE, Answer, UnreadableAnswer, read_chunk

RECEIVE_BYTES = 1 << 16
TICK_SECONDS = 0.0005
CONNECT_SECONDS = 5.0
# A process has a limit of descriptors, of which some are used otherwise.
MOST_CONNECTIONS = min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64)
CHECK_SECONDS = 0.25  # between two searches for streams that have stalled or are lost
DONE_, REFUSED, CUT, UNREACHABLE, STALLED, LEFT = ENDED = (
    *("done", "refused", "cut", "unreachable", "stalled", "left"),
)
"""How a request may end: "done" is its own end, maybe with an error; "left": by this side."""


@dataclass(slots=True)
class Row:
    """One request. Times are seconds of ``time.perf_counter``."""

    due: float
    body: bytes
    leave_after: int = 0
    """After this many events the client leaves; 0: never."""
    reads: bool = True
    keeps: bool = False
    """Whether its text is kept in ``text``."""
    about: Any = None
    """What the caller wants to know of it."""
    sent: float = 0.0
    status: int = 0
    times: list[float] = field(default_factory=list)
    """The arrival of each event that has a token."""
    latest: float = 0.0
    """When anything has last arrived."""
    ended: float = 0.0
    how: str = ""
    """One of ``ENDED``; empty before its end."""
    retry_after: float = 0.0
    """After a refusal: seconds that the server wants to be left alone; 0 if it names none."""
    error: str = ""
    """What went wrong, in a few words that are equal for equal mistakes."""
    tail: bytes = b""
    """The answer if it is not a stream, or else the latest event."""
    text: list[str] = field(default_factory=list)
    num_input: int = 0
    """Prompt tokens as the server counts them; 0 if it does not."""
    num_output: int = 0
    """Output tokens, likewise."""
    num_cached: int = 0
    """Prompt tokens that the server found in its cache."""

    @property
    def num_events(self) -> int:
        return len(self.times)

    @property
    def num_tokens(self) -> int:
        """Output tokens: as the server counts them, or else the number of events."""
        return self.num_output or len(self.times)

    @property
    def ttft(self) -> float:
        """Seconds to the first token from when the request was due, not from when it was sent."""
        return self.times[0] - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def is_whole(self) -> bool:
        """Whether it came to its own end, with tokens and without an error."""
        return self.how == DONE_ and not self.error

    @property
    def is_failed(self) -> bool:
        """Whether an answer that began as it should ended with an error."""
        return self.how == DONE_ and bool(self.error)


class Connection:
    """A socket, and the request that it carries."""

    __slots__ = ("answer", "is_old", "is_shaking_hands", "out", "row", "socket")

    def __init__(self, made: socket.socket) -> None:
        self.socket = made
        self.row: Row | None = None
        self.answer = Answer()
        self.out = b""
        self.is_old = False  # it has carried another request before
        self.is_shaking_hands = isinstance(made, ssl.SSLSocket)


@dataclass(frozen=True)
class Endpoint:
    """Where requests go on a server, and what each must carry."""

    path: str = "/v1/completions"
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None


class Load:
    """Sends requests when they are due and reads what comes, in the thread that calls ``run``."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        endpoint: Endpoint | None = None,
        receive_buffer: int = 0,
        tick: float = TICK_SECONDS,
        most_connections: int = MOST_CONNECTIONS,
        stall_seconds: float = inf,
    ) -> None:
        """receive_buffer: of each socket, in bytes, if the system's own choice is too large;
        tick: seconds between two looks at the sockets while several streams are open, by so much
        later are times noted; most_connections: open at once. A request that is due while all are
        taken is sent later. stall_seconds: a request to which nothing arrives for this long is
        ended. Raises ``OSError`` if the host has no address."""
        self.on_end: Callable[[Row], object] = lambda row: None
        self.num_open = 0
        endpoint = endpoint or Endpoint()
        self._family, self._address = _address_of(host, port)
        self._host, self._tls = host, endpoint.tls
        self._receive_buffer = receive_buffer
        self._tick = tick
        self._most_connections = most_connections
        self._stall_seconds = stall_seconds
        self.rests = False
        """Whether a refused request counts as open for as long as its ``Retry-After`` says."""
        self._resting: list[float] = []  # ends of the rests, a heap
        self._next_check = 0.0
        name = f"[{host}]" if ":" in host else host
        lines = {"Host": f"{name}:{port}", "Content-Type": "application/json", **endpoint.headers}
        fields = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._head = f"POST {endpoint.path} HTTP/1.1\r\n{fields}"
        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        self._idle: list[Connection] = []
        self._due: list[tuple[float, int, Row]] = []
        self._num_added = 0
        self._buffer = bytearray(RECEIVE_BYTES)

    def add(self, row: Row) -> None:
        """Send it when it is due."""
        self._num_added += 1
        heapq.heappush(self._due, (row.due, self._num_added, row))

    def drop_unsent(self) -> None:
        """Forget the requests that have not been sent."""
        self._due.clear()

    @property
    def num_unsent(self) -> int:
        """Requests that wait until they are due, or for a connection."""
        return len(self._due)

    @property
    def num_pending(self) -> int:
        """Requests that have not ended."""
        return self.num_open + len(self._due)

    def run(self, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run until that time, until it is over, or until nothing is left to do."""
        while self.num_pending and not is_over():
            now = time.perf_counter()
            if now >= until:
                return
            while self._due and self._due[0][0] <= now and self._has_room:
                self._send(heapq.heappop(self._due)[2])
            wait = min([until, *self._resting[:1]])
            if self._due and self._has_room:
                wait = min(until, self._due[0][0])
            self._poll(min(max(0.0, wait - now), 0.1))
            if now >= self._next_check:
                self._next_check = now + CHECK_SECONDS
                self._check(now)

    def __enter__(self) -> Load:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._connections):
            self._end(connection, LEFT)
            self._forget(connection)
        self._selector.close()

    # -- helpers

    @property
    def _has_room(self) -> bool:
        while self._resting and self._resting[0] <= time.perf_counter():
            heapq.heappop(self._resting)
        if self.num_open + len(self._resting) >= self._most_connections:
            return False
        return bool(self._idle) or len(self._connections) < self._most_connections

    def _poll(self, seconds: float) -> None:
        if not self.num_open:  # a selector waits in whole milliseconds
            time.sleep(seconds)
            return
        if self.num_open > 1:  # what comes for several streams is read at one look
            time.sleep(self._tick)
        for key, what in self._selector.select(seconds):
            connection: Connection = key.data
            if connection not in self._connections:
                continue
            if connection.is_shaking_hands:
                self._shake_hands(connection)
            elif what & EVENT_WRITE:
                self._write(connection)
            else:
                self._read(connection)

    def _read(self, connection: Connection) -> None:
        """Read what has arrived; with TLS as much as has been decrypted, which no look shows."""
        while True:
            try:
                size = connection.socket.recv_into(self._buffer)
            except (BlockingIOError, ssl.SSLWantReadError):
                return
            except OSError:
                size = 0
            if not size:
                self._lost(connection)
                return
            row = connection.row
            if row is not None:
                self._received(connection, row, bytes(memoryview(self._buffer)[:size]))
            if self._tls is None or connection not in self._connections:
                return

    def _received(self, connection: Connection, row: Row, data: bytes) -> None:
        answer = connection.answer
        row.latest = now = time.perf_counter()
        try:
            events = answer.feed(data)
        except UnreadableAnswer as error:
            row.error = str(error)
            self._end(connection, CUT)
            self._forget(connection)
            return
        row.status = answer.status
        for event in events:
            if event != DONE:
                row.tail = event
                _note(row, event, now)
        if row.leave_after and len(row.times) >= row.leave_after:
            self._end(connection, LEFT)
            self._forget(connection)
        elif answer.is_complete:
            self._finish(connection, row)

    def _finish(self, connection: Connection, row: Row) -> None:
        """End a request whose answer is complete, and keep the connection if the server does."""
        answer = connection.answer
        if answer.body:
            row.tail = answer.body
            if row.status == 200:
                row.error = "the answer is no stream of events"
                self._end(connection, DONE_)
            else:
                row.error = f"HTTP {row.status}{_code_in(answer.body.partition(HEAD_END)[2])}"
                row.retry_after = answer.retry_after
                if self.rests and row.retry_after:
                    heapq.heappush(self._resting, row.latest + row.retry_after)
                self._end(connection, REFUSED)
        elif answer.is_done or row.error:
            if not row.times and not row.error:
                row.error = "an answer without a token"
            self._end(connection, DONE_)
        else:
            row.error = "the stream ended without [DONE]"
            self._end(connection, CUT)
        if answer.closes:
            self._forget(connection)
        else:
            connection.is_old, connection.answer = True, Answer()
            self._idle.append(connection)

    def _send(self, row: Row) -> None:
        self.num_open += 1
        length = f"Content-Length: {len(row.body)}\r\n\r\n"
        connection = self._idle.pop() if self._idle else self._connect()
        connection.row = row
        connection.out = (self._head + length).encode() + row.body
        row.sent = row.latest = time.perf_counter()
        if connection.is_old:
            self._write(connection)

    def _connect(self) -> Connection:
        made = socket.socket(self._family)
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._receive_buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        # What goes wrong here is reported by the first attempt to write.
        problem = made.connect_ex(self._address)
        if self._tls is not None and problem in (0, errno.EINPROGRESS):
            made = self._tls.wrap_socket(
                made, server_hostname=self._host, do_handshake_on_connect=False
            )
        connection = Connection(made)
        self._connections.add(connection)
        self._selector.register(made, EVENT_WRITE, connection)
        return connection

    def _shake_hands(self, connection: Connection) -> None:
        try:
            connection.socket.do_handshake()  # type: ignore[attr-defined]
        except ssl.SSLWantReadError:
            self._selector.modify(connection.socket, EVENT_READ, connection)
        except ssl.SSLWantWriteError:
            self._selector.modify(connection.socket, EVENT_WRITE, connection)
        except OSError as error:
            if connection.row is not None and isinstance(error, ssl.SSLError):
                connection.row.error = f"no TLS: {error.reason or error}"
            self._lost(connection)
        else:
            connection.is_shaking_hands = False
            self._write(connection)

    def _write(self, connection: Connection) -> None:
        row = connection.row
        if row is None:
            return
        try:
            connection.out = connection.out[connection.socket.send(connection.out) :]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError:
            self._lost(connection)
            return
        what = EVENT_WRITE if connection.out else EVENT_READ
        if not connection.out and not row.reads:
            self._selector.unregister(connection.socket)
        elif self._selector.get_key(connection.socket).events != what:
            self._selector.modify(connection.socket, what, connection)

    def _lost(self, connection: Connection) -> None:
        """The other side has closed the connection."""
        row, is_old, answer = connection.row, connection.is_old, connection.answer
        if row is not None and is_old and not row.status:  # it was closed before it could be used
            self._forget(connection)
            self.num_open -= 1
            self.add(row)  # others may be closed, too
            return
        if row is not None:
            answer.end()
            if answer.is_complete:
                self._finish(connection, row)
                return
            if row.status or not connection.out:
                when = "after the first token" if row.times else "before the first token"
                row.error = f"the connection was closed {when}"
                self._end(connection, CUT)
            else:
                row.error = row.error or "no connection"
                self._end(connection, UNREACHABLE)
        self._forget(connection)

    def _check(self, now: float) -> None:
        """End requests that have stalled, and find those whose connection is lost though this side
        does not read it."""
        for connection in list(self._connections):
            row = connection.row
            if row is None:
                continue
            if not row.reads and connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._lost(connection)
            elif now - row.latest > self._stall_seconds:
                row.error = f"nothing arrived for {self._stall_seconds:g} s"
                self._end(connection, STALLED)
                self._forget(connection)

    def _end(self, connection: Connection, how: str) -> None:
        row, connection.row = connection.row, None
        if row is not None:
            row.ended, row.how = time.perf_counter(), how
            self.num_open -= 1
            self.on_end(row)

    def _forget(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)
        self._connections.discard(connection)
        with contextlib.suppress(KeyError):  # a connection that is not read is not registered
            self._selector.unregister(connection.socket)
        connection.socket.close()


HEAD_END = b"\r\n\r\n"


def _address_of(host: str, port: int) -> tuple[int, Any]:
    """The family and address of a host: of several the first that takes a connection, since a
    server may listen at one of them only."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, address = found[0][0], found[0][4]
    if len(found) > 1:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, port), CONNECT_SECONDS) as made,
        ):
            return made.family, made.getpeername()
    return family, address


def _note(row: Row, event: bytes, now: float) -> None:
    """Note what an event has: a token, the counts at the end, or an error."""
    try:
        chunk = read_chunk(event)
    except msgspec.MsgspecError:
        row.error = "an event that is no chunk of an answer"
        return
    added = chunk.added
    if added is not None:
        row.times.append(now)
        if row.keeps:
            row.text.append(added)
    if chunk.usage is not None:
        row.num_input = chunk.usage.prompt_tokens
        row.num_output = chunk.usage.completion_tokens
        details = chunk.usage.prompt_tokens_details
        row.num_cached = (details and details.cached_tokens) or 0
    if bytes(chunk.error) not in (b"", b"null"):
        row.error = f"an error in the stream{_code_in(event)}"


def _code_in(body: bytes) -> str:
    """The code of an error in OpenAI's form, or else its type, to be added to the status."""
    try:
        error = json.loads(body)["error"]
        code = error.get("code") or error.get("type")
    except (ValueError, TypeError, KeyError, AttributeError):
        return ""
    return f": {code}" if isinstance(code, str) else ""

"""Opens streams on a server from one thread, without a framework, and notes when events arrive.

The client of `server.py`, `server_load.py` and `tools/server_campaign.py`. Needs no engine.
"""

import bisect
import contextlib
import errno
import heapq
import json
import random
import resource
import select
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import quantile

RECEIVE_BYTES = 1 << 16
END = b"0\r\n\r\n"  # the last chunk
DONE = b"data: [DONE]"
ENDED = ("done", "refused", "cut", "unreachable", "left")
TICK_SECONDS = 0.0005
# A process has a limit of descriptors, of which some are used otherwise.
MOST_CONNECTIONS = min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64)
DRAIN_SECONDS = 60.0  # for the last requests of a run


@dataclass(slots=True)
class Row:
    """One request. Times are seconds of ``time.perf_counter``."""

    due: float
    body: bytes
    leave_after: int = 0  # events; 0: stays to the end
    reads: bool = True
    keeps: bool = False  # what was sent, in ``received``
    sent: float = 0.0
    status: int = 0
    times: list[float] = field(default_factory=list)
    """When something came: of each event, or of several that came together."""
    num_events: int = 0
    ended: float = 0.0
    how: str = ""
    """One of ``ENDED``; "done": it came to its end, maybe with an error."""
    tail: bytes = b""
    received: list[bytes] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Seconds to the first token from when the request was due, not from when it was sent."""
        return self.times[0] - self.due

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def num_tokens(self) -> int:
        """From the usage at the end, or else the number of events."""
        before, _, after = self.tail.rpartition(b'"completion_tokens":')
        number = after.lstrip()[:12].split(b",")[0].split(b"}")[0] if before else b""
        return int(number) if number.strip().isdigit() else self.num_events

    @property
    def is_whole(self) -> bool:
        """Whether it came to its own end, without an error."""
        return self.how == "done" and self.status == 200 and not self.is_failed

    @property
    def is_failed(self) -> bool:
        """Whether an error came after the first event."""
        return b'data: {"error"' in self.tail


class Connection:
    """A socket, and the request that it carries."""

    __slots__ = ("is_old", "out", "row", "socket")

    def __init__(self, made: socket.socket) -> None:
        self.socket = made
        self.row: Row | None = None
        self.out = b""
        self.is_old = False  # it has carried another request before


class Load:
    """Sends requests when they are due and reads what comes, in the thread that calls ``run``."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        path: str = "/v1/completions",
        receive_buffer: int = 0,
        tick: float = TICK_SECONDS,
        most_connections: int = MOST_CONNECTIONS,
    ) -> None:
        """receive_buffer: of each socket, in bytes, if the system's own choice is too large;
        tick: seconds between two looks at the sockets, by so much later are times noted;
        most_connections: open at once. A request that is due while all are taken is sent later, and
        its times count from when it was due."""
        self.on_end: Callable[[Row], object] = lambda row: None
        self.num_open = 0
        self._address = (host, port)
        self._receive_buffer = receive_buffer
        self._tick = tick
        self._most_connections = most_connections
        self._head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self._epoll = select.epoll()
        self._by_fd: dict[int, Connection] = {}
        self._idle: list[Connection] = []
        self._due: list[tuple[float, int, Row]] = []
        self._num_added = 0
        self._buffer = bytearray(RECEIVE_BYTES)

    def add(self, row: Row) -> None:
        """Send it when it is due."""
        self._num_added += 1
        heapq.heappush(self._due, (row.due, self._num_added, row))

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
            wait = min(until, self._due[0][0]) - now if self._due else until - now
            self._poll(min(max(0.0, wait), 0.1))

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._by_fd.values()):
            self._end(connection, "left")
            self._forget(connection)
        self._epoll.close()

    # -- helpers

    @property
    def _has_room(self) -> bool:
        return bool(self._idle) or len(self._by_fd) < self._most_connections

    def _poll(self, seconds: float) -> None:
        time.sleep(self._tick)
        by_fd, buffer = self._by_fd, self._buffer
        for fd, what in self._epoll.poll(seconds, 4096):
            connection = by_fd.get(fd)
            if connection is None:
                continue
            if what & select.EPOLLOUT:
                self._write(connection)
                continue
            try:
                size = connection.socket.recv_into(buffer)
            except BlockingIOError:
                continue
            except OSError:
                size = 0
            row = connection.row
            if not size:
                self._lost(connection)
            elif row is not None:
                self._received(connection, row, bytes(memoryview(buffer)[:size]))

    def _received(self, connection: Connection, row: Row, data: bytes) -> None:
        if not row.status:
            row.status = int(data[9:12])
        if row.keeps:
            row.received.append(data)
        num = data.count(b"data: {")
        if num:
            row.times.append(time.perf_counter())
            row.num_events += num
            if row.leave_after and row.num_events >= row.leave_after:
                self._end(connection, "left")
                self._forget(connection)
                return
        if row.status != 200:
            row.tail += data
            if _is_complete(row.tail):
                self._finish(connection, "refused")
        elif data.endswith(END):
            row.tail = (row.tail + data)[-1000:]
            self._finish(connection, "done" if DONE in row.tail else "cut")
        else:
            row.tail = data

    def _send(self, row: Row) -> None:
        self.num_open += 1
        length = f"Content-Length: {len(row.body)}\r\n\r\n"
        connection = self._idle.pop() if self._idle else self._connect()
        connection.row = row
        connection.out = (self._head + length).encode() + row.body
        row.sent = time.perf_counter()
        if connection.is_old:
            self._write(connection)

    def _connect(self) -> Connection:
        made = socket.socket()
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._receive_buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        connection = Connection(made)
        if made.connect_ex(self._address) not in (0, errno.EINPROGRESS):
            connection.out = b""
        self._by_fd[made.fileno()] = connection
        self._epoll.register(made.fileno(), select.EPOLLOUT)
        return connection

    def _write(self, connection: Connection) -> None:
        row = connection.row
        if row is None:
            return
        try:
            connection.out = connection.out[connection.socket.send(connection.out) :]
        except BlockingIOError:
            pass
        except OSError:
            self._lost(connection)
            return
        what = select.EPOLLOUT if connection.out else select.EPOLLIN if row.reads else 0
        self._epoll.modify(connection.socket.fileno(), what)

    def _lost(self, connection: Connection) -> None:
        """The other side has closed it."""
        row, is_old = connection.row, connection.is_old
        if row is not None and is_old and not row.status:  # it was closed before it could be used
            self._forget(connection)
            self.num_open -= 1
            self._send(row)
            return
        if row is not None:
            self._end(connection, "cut" if row.status or not connection.out else "unreachable")
        self._forget(connection)

    def _finish(self, connection: Connection, how: str) -> None:
        row = connection.row
        assert row is not None
        self._end(connection, how)
        if b"onnection: close" in row.tail or how == "cut":
            self._forget(connection)
        else:
            connection.is_old = True
            self._idle.append(connection)

    def _end(self, connection: Connection, how: str) -> None:
        row, connection.row = connection.row, None
        if row is not None:
            row.ended, row.how = time.perf_counter(), how
            self.num_open -= 1
            self.on_end(row)

    def _forget(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)
        del self._by_fd[connection.socket.fileno()]
        self._epoll.unregister(connection.socket.fileno())
        connection.socket.close()


def _is_complete(answer: bytes) -> bool:
    """Whether an answer with a length has all of it."""
    head, blank, body = answer.partition(b"\r\n\r\n")
    _, _, length = head.lower().partition(b"content-length:")
    return bool(blank) and len(body) >= int(length.split(b"\r\n")[0] or 0)


# Requests


@dataclass(frozen=True)
class Shape:
    """Shape of the requests."""

    model: str
    num_prompt: int = 32
    num_tokens: int = 64
    vocab: int = 1000

    def body(self, rng: random.Random) -> bytes:
        """Lengths vary by a half to either side."""
        prompt = [rng.randrange(10, self.vocab) for _ in range(_around(rng, self.num_prompt))]
        return completion(self.model, prompt, _around(rng, self.num_tokens))


def completion(model: str, prompt: list[int], num_tokens: int, **more: Any) -> bytes:
    """The body of a request for a stream of exactly this many tokens."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    return json.dumps(body, separators=(",", ":")).encode()


def _around(rng: random.Random, number: int) -> int:
    return rng.randint(max(1, number // 2), max(1, number + number // 2))


def poisson(load: Load, shape: Shape, rate: float, seconds: float, seed: int) -> list[Row]:
    """Adds arrivals at this rate for this many seconds from now on."""
    rng, bodies, at = random.Random(seed), [], 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        bodies.append((at, shape.body(rng)))
    start = time.perf_counter()  # making tens of thousands of them takes seconds
    rows = [Row(start + at, body) for at, body in bodies]
    for row in rows:
        load.add(row)
    return rows


def open_loop(
    address: tuple[str, int], shape: Shape, rate: float, seconds: float, seed: int = 0
) -> list[Row]:
    """All requests of a run, ended."""
    with Load(*address) as load:
        rows = poisson(load, shape, rate, seconds, seed)
        load.run(time.perf_counter() + seconds + DRAIN_SECONDS)
    return rows


def closed_loop(
    address: tuple[str, int],
    shape: Shape,
    streams: int,
    seconds: float,
    *,
    seed: int = 0,
    tick: float = TICK_SECONDS,
) -> list[Row]:
    """Keeps this many streams running: as one ends, the next is sent. Those that the end cuts off
    are not among the rows."""
    load, rng, rows = Load(*address, tick=tick), random.Random(seed), []
    until = time.perf_counter() + seconds

    def again(row: Row) -> None:
        rows.append(row)
        if time.perf_counter() < until:
            load.add(Row(time.perf_counter(), shape.body(rng)))

    load.on_end = again
    for _ in range(streams):
        load.add(Row(time.perf_counter(), shape.body(rng)))
    load.run(until)
    load.on_end = rows.append
    load.close()
    return rows


# What came of it


@dataclass(frozen=True)
class Promise:
    """Promised latencies: seconds to the first token, and between two events (99th percentile)."""

    ttft: float = 1.0
    itl: float = 0.25

    def is_kept(self, row: Row) -> bool:
        return row.is_whole and row.ttft <= self.ttft and quantile(row.gaps, 0.99, 0.0) <= self.itl


def summary(rows: list[Row], promise: Promise, seconds: float) -> dict[str, Any]:
    """Figures of a run of this many seconds."""
    whole = [row for row in rows if row.is_whole]
    begun = [row for row in rows if row.times]
    ttfts, gaps = [row.ttft for row in begun], [gap for row in begun for gap in row.gaps]
    refusals = [row.ended - row.sent for row in rows if row.how == "refused"]
    kept = sum(map(promise.is_kept, rows))
    return {
        "requests": len(rows),
        "whole": len(whole),
        "refused": len(refusals),
        "other": len(rows) - len(whole) - len(refusals),
        "kept": kept,
        "kept_share": round(kept / len(rows), 4) if rows else 0.0,
        "goodput_per_s": round(kept / seconds, 3),
        "tokens_per_s": round(sum(row.num_tokens for row in begun) / seconds, 1),
        "events_per_s": round(sum(row.num_events for row in begun) / seconds, 1),
        **_percentiles("ttft", ttfts),
        **_percentiles("itl", gaps),
        **_percentiles("refusal", refusals),
    }


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {
        f"{name}_ms_{at}": round(1e3 * quantile(values, share, 0.0), 2)
        for at, share in shares.items()
    }


def settled_after(rows: list[Row], began: float, promise: Promise) -> float:
    """Seconds from ``began`` until requests that come keep the promise, with those after them:
    95 % of them, and the next ten nearly all."""
    ordered = sorted(rows, key=lambda row: row.due)
    kept = [promise.is_kept(row) for row in ordered]
    dues = [row.due for row in ordered]
    for index in range(bisect.bisect_left(dues, began), len(ordered)):
        rest, near = kept[index:], kept[index : index + 10]
        if statistics.mean(rest) >= 0.95 and statistics.mean(near) >= 0.9:
            return max(0.0, dues[index] - began)
    return float("inf")


def thread_seconds(pid: int) -> dict[str, float]:
    """Processor time of each thread of a process, to the nanosecond."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def cpu_between(before: dict[str, float], after: dict[str, float]) -> float:
    """Seconds of all threads that are still there."""
    return sum(seconds - before.get(thread, 0.0) for thread, seconds in after.items())

"""``RankWatch``: a thread that reads what the ranks of a group report, and notices which end or
hang."""

from __future__ import annotations

import multiprocessing.connection
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

import msgspec

from engine.errors import ConfigError, EngineError, ModelError, RankError
from engine.ipc.process import EXITED, CoreProcess
from engine.ipc.sockets import Waker
from engine.worker.rank import NO_CALL, NUM_DONE, RankReport

LOOK_SECONDS = 5.0  # at most, between two looks for ranks that hang
MORE_LOOKS = 1  # than the limit allows
CAUSE_SECONDS = 0.3  # in which the rank that failed first reports, after another one
KNOWN_SECONDS = 2.0  # in which this thread knows why the group has stopped
KINDS: dict[str, type[EngineError]] = {"ConfigError": ConfigError, "ModelError": ModelError}


class Calls(Protocol):
    """Carries the core's messages to the ranks: ``RingWriter``, or ``RankSockets``."""

    num_sent: int
    """Messages sent so far, or about to be."""

    @property
    def is_stopped(self) -> bool: ...

    def send(self, *parts: bytes) -> None:
        """Send a message, the concatenation of ``parts``, to all ranks. Raises ``Stopped``."""
        ...

    def stop(self) -> None:
        """End all waits, now and later. Any thread may call it."""
        ...

    def reported(self, reader: int, index: int) -> int:
        """The word that a rank has shown last, by its index."""
        ...

    def num_begun(self, reader: int) -> int:
        """The operations with others that a rank has begun, as far as is known."""
        ...

    def close(self) -> None:
        """Let go of it. May be repeated."""
        ...


class RankProcess(CoreProcess, Protocol):
    """The process of a rank: a ``Child``, or a process on another machine."""

    @property
    def line(self) -> Connection:
        """Where its reports come from."""
        ...


class RankTraceback(Exception):
    """The traceback of a rank that failed in another process; the cause of ``RankError``."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"in the process of rank {rank}:\n{text}")


class RankWatch:
    """Watches the processes of ranks 1, 2, ... When one fails, it keeps the error, stops the group
    so that no rank waits for another any more, and notifies the owner of the group."""

    def __init__(self, calls: Calls, children: Sequence[RankProcess], hang_timeout: float) -> None:
        """hang_timeout: seconds in which a rank must go on while it has something to do."""
        self.stops: list[Callable[[], object]] = [calls.stop]
        """What ends the waits of ranks for each other."""
        self.waits: Callable[[int], bool] = lambda rank: False
        """Whether a rank waits for another one that has not sent what it needs."""
        self._calls = calls
        self._children = children
        self._ranks = range(1, len(children) + 1)
        self._hang_timeout = hang_timeout
        self._look_seconds = min(LOOK_SECONDS, hang_timeout / 8)
        self.limits_steps = False
        """True once the ranks have started: what they do then must end in ``hang_timeout``."""
        self._stalls = [Stall() for _ in children]
        self._changed = threading.Condition()
        # Guarded by ``_changed``:
        self._error: RankError | None = None
        self._reports: dict[tuple[int, int], RankReport] = {}  # by rank and number of the call
        self._num_awaited = 0  # threads that wait for reports, with a limit of their own
        self._notify: Callable[[RankError], object] = lambda error: None
        self._is_over = False

        self._suspected: tuple[float, RankError] | None = None  # until when a cause may come
        self._ended: set[int] = set()  # ranks that have ended because the group has stopped
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def has_answers(self, number: int) -> bool:
        """True if all ranks have reported of a call."""
        with self._changed:
            return all((rank, number) in self._reports for rank in self._ranks)

    def answers(self, number: int, name: str, timeout: float) -> list[RankReport]:
        """Wait for what all ranks report of a call. Raises ``RankError`` if one fails, or reports
        nothing within ``timeout`` seconds."""
        wanted = [(rank, number) for rank in self._ranks]

        def late() -> list[int]:
            return [rank for rank, _ in wanted if (rank, number) not in self._reports]

        with self._changed:
            self._num_awaited += 1
            self._changed.wait_for(lambda: self._error or not late(), timeout)
            self._num_awaited -= 1
            missing = late()
            if not missing:
                return [self._reports.pop(each) for each in wanted]
        self.fail(RankError(f"{self._named(missing[0])} has not answered {name} in {timeout:g} s"))
        assert self._error is not None
        raise self._error

    def failure(self) -> RankError | None:
        """Why the group has stopped; ``None`` if this is not known soon."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None, KNOWN_SECONDS)
            return self._error

    def fail(self, error: RankError) -> None:
        """Stop the group because of this error, unless it has stopped already."""
        with self._changed:
            if self._error is not None:
                return
            self._error = error
            self._changed.notify_all()
            notify = self._notify
        for stop in self.stops:
            stop()
        notify(error)

    def on_failure(self, notify: Callable[[RankError], object]) -> None:
        """Call ``notify``, in any thread, if a rank fails; at once if one has."""
        with self._changed:
            self._notify = notify
            error = self._error
        if error is not None:
            notify(error)

    def close(self) -> None:
        """End the thread. What ranks do afterwards is of no interest."""
        with self._changed:
            self._is_over = True
        self._waker.wake()
        if threading.current_thread() is not self._thread:  # which may collect garbage, too
            self._thread.join()
        self._waker.close()

    # -- in the thread

    def _run(self) -> None:
        while True:
            ready = self._wait()
            if self._is_over:
                return
            for rank, child in self._running().items():
                if child.pidfd in ready:
                    self._note_end(rank, str(child.how_it_ended()))
            if self._suspected is not None and time.monotonic() >= self._suspected[0]:
                self.fail(self._suspected[1])
            if not ready:
                self._look_for_stalls()
            if self._error is not None:
                return

    def _running(self) -> dict[int, RankProcess]:
        children = enumerate(self._children, 1)
        return {rank: child for rank, child in children if rank not in self._ended}

    def _wait(self) -> list[object]:
        """Wait until a process reports something or ends, or for some seconds. Reads all reports,
        and returns what is ready."""
        ranks, seconds = self._running(), self._look_seconds
        if self._suspected is not None:
            seconds = max(0.0, self._suspected[0] - time.monotonic())
        sources: list[Any] = [self._waker.fd]
        for child in ranks.values():
            sources += [child.pidfd, child.line]
        ready: list[object] = [*multiprocessing.connection.wait(sources, seconds)]
        for rank, child in ranks.items():
            if child.line in ready or child.pidfd in ready:
                self._read(rank, child)
        return ready

    def _read(self, rank: int, child: RankProcess) -> None:
        with suppress(OSError, EOFError):
            while child.line.poll():
                report = msgspec.msgpack.decode(child.line.recv_bytes(), type=RankReport)
                if report.number == NO_CALL:
                    self._suspect(self.error_of(rank, report), report.kind)
                    continue
                with self._changed:
                    self._reports[rank, report.number] = report
                    self._changed.notify_all()

    def _note_end(self, rank: int, how: str) -> None:
        """Take the end of a process as the cause, unless it has ended by itself after a rank has
        stopped the group: that one has reported why."""
        error = RankError(f"{self._named(rank)} {how}")
        has_cause = self._calls.is_stopped or self._suspected is not None
        if not (has_cause and EXITED in how):
            self.fail(error)
            return
        self._ended.add(rank)
        if self._suspected is None:
            self._suspected = time.monotonic() + CAUSE_SECONDS, error

    def _suspect(self, error: RankError, kind: str) -> None:
        """Take the error that has ended a rank as the cause, unless it only says that the group
        has stopped: then another rank may report the cause."""
        if kind != RankError.__name__:
            self.fail(error)
        elif self._suspected is None:
            self._suspected = time.monotonic() + CAUSE_SECONDS, error

    def _look_for_stalls(self) -> None:
        """Count the looks at which a rank that has something to do has done nothing since the last
        one. Looks are counted, not seconds, since the clock also runs while all are stopped."""
        with self._changed:
            is_awaited = self._num_awaited > 0
        for rank, stall in enumerate(self._stalls, 1):
            num_done = self._calls.reported(rank - 1, NUM_DONE)
            is_idle = is_awaited or not self.limits_steps or num_done == self._calls.num_sent
            stall.look(0 if is_idle else num_done + 1)
        # A rank that waits for this one knows better which it is, and is first.
        most = MORE_LOOKS + self._hang_timeout / self._look_seconds
        if all(stall.num_looks < most for stall in self._stalls):
            return
        late = [rank for rank, each in enumerate(self._stalls, 1) if each.num_looks >= most - 1]
        rank = min(
            (rank for rank in late if not self.waits(rank)),
            key=lambda rank: self._calls.num_begun(rank - 1),  # others wait for the last of them
            default=0,
        )
        self.fail(
            RankError(
                f"{self._named(rank)} has not answered for {self._hang_timeout:g} s in a step "
                "(core_hang_timeout)"
            )
        )

    # -- words

    def error_of(self, rank: int, report: RankReport) -> RankError:
        """The error for what a rank has reported."""
        error = RankError(f"{self._named(rank)} raised {report.kind}: {report.message}")
        error.__cause__ = RankTraceback(rank, report.traceback)
        return error

    def start_error_of(self, rank: int, report: RankReport) -> EngineError:
        """The error for what a rank has reported of a start. A user's mistake keeps its class."""
        kind = KINDS.get(report.kind)
        return self.error_of(rank, report) if kind is None else kind(report.message)

    def _named(self, rank: int) -> str:
        if rank == 0:
            return f"rank 0 (process {os.getpid()})"
        child = self._children[rank - 1]
        where = f" on {child.place}" if child.place else ""
        return f"rank {rank} (process {child.pid}{where})"


class Stall:
    """How often a rank has been found in the middle of the same work."""

    def __init__(self) -> None:
        self.num_looks = 0
        self._last = 0

    def look(self, work: int) -> None:
        """work: which it does; 0: none."""
        self.num_looks = self.num_looks + 1 if work and work == self._last else 0
        self._last = work

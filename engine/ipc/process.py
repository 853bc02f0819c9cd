"""A child process and a line to it: it reports when it is ready, and each sees the other's death.

    line    a pair of sockets: the start's report one way, the wish to end it the other
    pidfd   of the other process, on both sides: readable once that has ended

A line alone is not enough: a fork of either process holds it open after that process is dead.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker as resource_tracker
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from engine.config.env import environment_for_child
from engine.errors import ConfigError, EngineDeadError

CLOSE_SECONDS = 2.0  # that a child has to end after a request to; then it is killed
KILL_SECONDS = 5.0  # from SIGKILL to the end, which only the system can delay
EXIT_SECONDS = 0.5  # from the end of a child's line to its exit code
NOTE_SECONDS = 0.2  # from the end of a child to its exit code, if another thread has it
LATE_SECONDS = 30.0  # from the start of a child to a line in the log that it is not ready yet
END = b"end"
NO_VALUES: Mapping[str, str] = MappingProxyType({})

Line = Connection

logger = logging.getLogger("engine.core")


class StartReport(msgspec.Struct, array_like=True, frozen=True):
    """A child's report of its start. ``kind`` and ``message`` are of the error, if it failed."""

    is_ready: bool
    kind: str = ""
    message: str = ""
    traceback: str = ""


class Child:
    """A spawned process that runs ``target(line, *args)``. Its end, and ours, is seen by both.

    ``args`` travel by import path, as everything does that is given to a spawned process. Raises
    ``ConfigError`` if one of them cannot, ``EngineDeadError`` if the system has no process to give.
    ``at_end`` is called when the process has gone, or if there is none. ``environment``: variables
    that differ from ours.
    """

    def __init__(
        self,
        name: str,
        target: Callable[..., None],
        *args: Any,
        at_end: Callable[[], object] = lambda: None,
        environment: Mapping[str, str] = NO_VALUES,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        with ExitStack() as failing:
            failing.callback(at_end)
            with _named(name):
                resource_tracker.ensure_running()  # it lets interrupts through when it is started
                self.line, theirs = context.Pipe()
                failing.callback(self.line.close)
                with theirs, without_interrupts(), environment_for_child(environment):
                    self._process = context.Process(
                        target=target, args=(theirs, *args), name=name, daemon=True
                    )
                    self._process.start()
                failing.callback(_dispose, self._process)
                self.pidfd = os.pidfd_open(self.pid)
                """Readable once the process has ended; valid until ``close``."""
            failing.pop_all()
        self._end_request = EndRequest()
        self._num_oom_kills = oom_kills()
        self._lock = threading.Lock()  # on the process: only one may wait for its end
        # Runs at exit before multiprocessing ends its children, which would let this one drain.
        self._end = weakref.finalize(
            self, _end, os.getpid(), self._process, self.line, self._end_request, self.pidfd, at_end
        )
        self._end.atexit = False
        atexit.register(self._end)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait_until_ready(self, timeout: float) -> StartReport:
        """What it reports of its start.

        Raises ``EngineDeadError`` if it ends before, or has sent nothing after ``timeout``
        seconds; it is then ended.
        """
        sources: list[Connection | int] = [self.line, self.pidfd]
        ready = multiprocessing.connection.wait(sources, min(timeout, LATE_SECONDS))
        if not ready and timeout > LATE_SECONDS:
            logger.warning(
                "the process of the %s is not ready after %g s; it is given up after %g s "
                "(core_ready_timeout)",
                self._process.name,
                LATE_SECONDS,
                timeout,
            )
            ready = multiprocessing.connection.wait(sources, timeout - LATE_SECONDS)
        with suppress(EOFError, OSError):
            if self.line in ready:
                return msgspec.msgpack.decode(self.line.recv_bytes(), type=StartReport)
        how = self.how_it_ended() if ready else None
        if how is None:
            self.kill()  # if it is stopped, it reads no message
        self.close()
        name = self._process.name
        if how is None:
            raise EngineDeadError(
                f"Engine core initialization failed: waited {timeout:g} s for the process of the "
                f"{name} to be ready (core_ready_timeout)"
            )
        raise EngineDeadError(
            f"Engine core initialization failed: the process of the {name} {how} before it was "
            "ready; what it wrote to standard error says why. A script that starts engines in "
            "processes needs `if __name__ == '__main__':` around what it runs"
        )

    def how_it_ended(self) -> str | None:
        """``"was killed by SIGKILL"``, ``"exited with status 1"``; ``None`` if it has not."""
        with self._lock:
            if not self._end.alive:
                return "was ended"
            if not _has_ended(self.pidfd, EXIT_SECONDS):
                return None
            code = _exit_code(self._process)
        if code is None:  # other code has reaped it, or the user's program ignores SIGCHLD
            return "ended"
        if code < 0:
            return f"was killed by {_name_of(-code)}{self._why_killed(-code)}"
        return f"exited with status {code}"

    def _why_killed(self, number: int) -> str:
        """A guess: the system kills by this signal when memory is short."""
        if number != signal.SIGKILL or self._num_oom_kills is None:
            return ""
        num = oom_kills()
        return "" if num in (None, self._num_oom_kills) else ", as the system does out of memory"

    def ask_to_end(self) -> None:
        """Ask it to end, without waiting; ``close`` must still be called."""
        with self._lock:
            if self._end.alive:
                self._end_request.send(self.line)

    def kill(self) -> None:
        """Kill it at once, even if it is stopped; ``close`` must still be called."""
        with self._lock:
            if self._end.alive:
                self._process.kill()

    def close(self) -> None:
        """Ask it to end, and kill it if it still runs two seconds after the first request.

        Harmless when repeated.
        """
        atexit.unregister(self._end)
        with self._lock:
            self._end()


def _end(
    owner: int,
    process: SpawnProcess,
    line: Line,
    end_request: EndRequest,
    pidfd: int,
    at_end: Callable[[], object],
) -> None:
    if os.getpid() != owner:  # a copy of the owner, forked by its user, which owns nothing
        return
    end_request.send(line)  # closing has no effect where a fork of ours holds it open
    line.close()
    has_ended = False
    try:
        has_ended = _has_ended(pidfd, end_request.seconds_left())
    finally:  # interrupted or not
        if not has_ended:
            process.kill()  # a stopped or hanging process would not handle a softer signal
            _has_ended(pidfd, KILL_SECONDS)
        if process.exitcode is not None:
            process.close()
        os.close(pidfd)
        at_end()


def _exit_code(process: SpawnProcess) -> int | None:
    """How a process that has ended did so; ``None`` if that is not known.

    ``multiprocessing`` asks the system for all dead children wherever one is started, in any
    thread. A thread that has got the answer notes it a moment later.
    """
    until = time.monotonic() + NOTE_SECONDS
    while (code := process.exitcode) is None and time.monotonic() < until:
        time.sleep(NOTE_SECONDS / 100)
    return code


def oom_kills() -> int | None:
    """Processes that the system has killed for lack of memory since it runs, if it tells."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
    return counts[0] if counts else None


def _name_of(number: int) -> str:
    """SIGKILL or the like; signals of the real-time range have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _dispose(process: SpawnProcess) -> None:
    """End a process whose start has failed."""
    process.kill()
    process.join(KILL_SECONDS)
    process.close()


class EndRequest:
    """Whether a child was requested to end, and how long it may still take."""

    def __init__(self) -> None:
        self._at: float | None = None

    def send(self, line: Line) -> None:
        self._at = time.monotonic() if self._at is None else self._at
        with suppress(OSError):
            line.send_bytes(END)

    def seconds_left(self) -> float:
        waited = 0.0 if self._at is None else time.monotonic() - self._at
        return max(0.0, CLOSE_SECONDS - waited)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Why a process could not be started, as errors of the engine."""
    try:
        yield
    except OSError as error:
        raise EngineDeadError(
            f"Engine core initialization failed: no process for the {name}: {error}"
        ) from error
    except Exception as error:  # pickling runs code of the user's objects, which may raise anything
        raise ConfigError(
            f"an option cannot be handed to the process of the {name}: {error}; give policies, "
            "resources and processors as dotted paths or module-level classes"
        ) from error


@contextmanager
def without_interrupts() -> Iterator[None]:
    """A process that is started here never gets one: that at a terminal is for its parent alone."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _has_ended(pidfd: int, seconds: float) -> bool:
    """Wait so long for the end of a process."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(1000 * seconds))


class ParentWatch:
    """A thread that calls ``on_death`` when the parent process has died or asks this one to end."""

    def __init__(self, line: Line, on_death: Callable[[], object]) -> None:
        self.on_death = on_death
        self._line = line
        threading.Thread(target=self._run, name="parent-watch", daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):  # there is no parent any more
            parent = os.pidfd_open(_parent())
            try:
                if os.getppid() == _parent():  # so it is not another with its number
                    multiprocessing.connection.wait([self._line, parent])
            finally:
                os.close(parent)
        self.on_death()


def report_to_parent(line: Line, report: StartReport) -> None:
    """Report how the start went, from the child; does nothing if the parent is gone."""
    with suppress(OSError):
        line.send_bytes(msgspec.msgpack.encode(report))


def _parent() -> int:
    """The process id of this process's parent, dead or alive."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    return parent.pid

"""Child: a spawned process that reports when it is ready; parent and child notice each other's
death.

    line    a pair of sockets: the child sends its start report, the parent a request to end
    pidfd   of the other process, in each of the two: readable once that process has ended

The line alone would not show a death: forks of a dead process keep its sockets open.
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
from typing import Any, Protocol

import msgspec

from engine.config.env import environment_with
from engine.errors import ConfigError, EngineDeadError

CLOSE_SECONDS = 2.0  # a child that was requested to end is killed after this time
KILL_SECONDS = 5.0  # wait at most this long for the end of a child after SIGKILL
LOOK_SECONDS = 0.1  # between two looks whether such a child is stopped
EXIT_SECONDS = 0.5  # wait for the exit code after the line was closed
NOTE_SECONDS = 0.2  # wait for the exit code if another thread has collected it
LATE_SECONDS = 30.0  # a child that is not ready after this time is logged
END = b"end"
EXITED = "exited with status"  # of a process that ended by itself
NO_VALUES: Mapping[str, str] = MappingProxyType({})

Line = Connection

logger = logging.getLogger("engine.core")


class StartReport(msgspec.Struct, array_like=True, frozen=True):
    """A child's report that it is ready, and at which address. If its start failed, ``kind`` and
    ``message`` have the error."""

    is_ready: bool
    kind: str = ""
    message: str = ""
    traceback: str = ""
    address: str = ""


class CoreProcess(Protocol):
    """The process of a core that a client owns: a ``Child``, or a process on another machine."""

    @property
    def pid(self) -> int:
        """The process id, on the machine on which the process runs."""
        ...

    @property
    def place(self) -> str:
        """Name of the machine on which it runs; empty for this one."""
        ...

    @property
    def pidfd(self) -> int:
        """A file descriptor of this process that is readable once the core's process has ended."""
        ...

    def how_it_ended(self) -> str | None:
        """How the process ended, e.g. "was killed by SIGKILL"; ``None`` if it runs."""
        ...

    def request_end(self) -> None:
        """Request the process to end, without waiting. ``close`` must still be called."""
        ...

    def kill(self) -> None:
        """End the process immediately. ``close`` must still be called."""
        ...

    def close(self) -> None:
        """Request the process to end, and kill it if it does not. May be repeated."""
        ...


class Child:
    """A spawned process that runs ``target(line, *args)``. Parent and child notice each other's
    death.

    ``line`` is the child's end of a pair of sockets; ``args`` are pickled. Raises ``ConfigError``
    if one of them cannot be pickled, ``EngineDeadError`` if the process cannot be started.
    ``at_end`` is called when the process has ended or could not be started. ``environment``:
    variables to set in the child. ``close_seconds``: after which a child that was requested to end
    is killed; one that has a child of its own must have more than that."""

    place = ""

    def __init__(
        self,
        name: str,
        target: Callable[..., None],
        *args: Any,
        at_end: Callable[[], object] = lambda: None,
        environment: Mapping[str, str] = NO_VALUES,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        # A child may have children, too: they end with it, by the descriptors of processes.
        multiprocessing.current_process().daemon = False
        with ExitStack() as failing:
            failing.callback(at_end)
            with _named(name):
                resource_tracker.ensure_running()  # its start would unblock interrupts later
                self.line, theirs = context.Pipe()
                failing.callback(self.line.close)
                with theirs, without_interrupts(), environment_with(environment):
                    self._process = context.Process(
                        target=target, args=(theirs, *args), name=name, daemon=True
                    )
                    self._process.start()
                failing.callback(_dispose, self._process)
                self._pidfd = os.pidfd_open(self.pid)
            failing.pop_all()
        self._end_request = EndRequest(close_seconds)
        self._num_oom_kills = oom_kills()
        self._lock = threading.Lock()  # only one thread may wait for the process
        # Runs at exit before multiprocessing ends its children, which would let this one drain.
        self._end = weakref.finalize(
            self,
            _end,
            os.getpid(),
            self._process,
            self.line,
            self._end_request,
            self._pidfd,
            at_end,
        )
        self._end.atexit = False
        atexit.register(self._end)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def pidfd(self) -> int:
        """Readable once the process has ended; valid until ``close``."""
        return self._pidfd

    def wait_until_ready(self, timeout: float) -> StartReport:
        """Wait for the child's start report.

        Raises ``EngineDeadError`` if the child ends before its report, or is not ready within
        ``timeout`` seconds; the child is ended then."""
        sources: list[Connection | int] = [self.line, self.pidfd]
        ready = multiprocessing.connection.wait(sources, min(timeout, LATE_SECONDS))
        if not ready and timeout > LATE_SECONDS:
            logger.info(
                "the process of the %s is not ready after %g s: it may still load the model or "
                "compile kernels; it is given up after %g s (core_ready_timeout)",
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
            self.kill()  # a stopped process reads no messages
        self.close()
        name = self._process.name
        if how is None:
            raise EngineDeadError(
                f"Engine core initialization failed: the process of the {name} was not ready in "
                f"{timeout:g} s; raise core_ready_timeout if loading takes longer"
            )
        raise EngineDeadError(
            f"Engine core initialization failed: the process of the {name} {how} before it was "
            "ready; see its output on standard error. A script that starts engines in processes "
            "needs `if __name__ == '__main__':` around its code"
        )

    def how_it_ended(self) -> str | None:
        """How the process ended, e.g. ``"was killed by SIGKILL"``; ``None`` if it runs."""
        with self._lock:
            if not self._end.alive:
                return "was ended"
            if not _has_ended(self.pidfd, EXIT_SECONDS):
                return None
            code = _exit_code(self._process)
        if code is None:  # other code has collected it, or the program ignores SIGCHLD
            return "ended"
        if code < 0:
            return f"was killed by {_name_of(-code)}{self._why_killed(-code)}"
        return f"{EXITED} {code}"

    def _why_killed(self, number: int) -> str:
        """Return ", perhaps for lack of memory" if the child may be a victim of the system's
        out-of-memory killer, otherwise "". ``number``: the signal that ended the child."""
        if number != signal.SIGKILL or self._num_oom_kills is None:
            return ""
        num = oom_kills()
        return "" if num in (None, self._num_oom_kills) else ", perhaps for lack of memory"

    def request_end(self) -> None:
        """Request the child to end, without waiting. ``close`` must still be called."""
        with self._lock:
            if self._end.alive:
                self._end_request.send(self.line)

    def kill(self) -> None:
        """Kill the child immediately, even if it is stopped. ``close`` must still be called."""
        with self._lock:
            if self._end.alive:
                self._process.kill()

    def close(self) -> None:
        """Request the child to end, and kill it two seconds after the first request.

        May be repeated.
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
    if os.getpid() != owner:  # a forked copy of the owner does not own the child
        return
    end_request.send(line)  # closing the line has no effect while a fork holds it open
    line.close()
    has_ended = False
    try:
        while not has_ended and end_request.seconds_left() and not is_stopped(process.pid):
            has_ended = _has_ended(pidfd, min(LOOK_SECONDS, end_request.seconds_left()))
    finally:  # interrupted or not
        if not has_ended:
            process.kill()  # a stopped or hanging process would not handle another signal
            _has_ended(pidfd, KILL_SECONDS)
        if process.exitcode is not None:
            process.close()
        os.close(pidfd)
        at_end()


def _exit_code(process: SpawnProcess) -> int | None:
    """The exit code of a process that has ended; ``None`` if it is not known.

    Waits a moment: another thread may have collected the process but not yet stored its code."""
    until = time.monotonic() + NOTE_SECONDS
    while (code := process.exitcode) is None and time.monotonic() < until:
        time.sleep(NOTE_SECONDS / 100)
    return code


def oom_kills() -> int | None:
    """How many processes the system has killed for lack of memory; None if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
    return counts[0] if counts else None


def _name_of(number: int) -> str:
    """The name of a signal, e.g. SIGKILL; most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _dispose(process: SpawnProcess) -> None:
    """Kill a process whose start has failed."""
    process.kill()
    process.join(KILL_SECONDS)
    process.close()


class EndRequest:
    """Records when a child process was first requested to end, and so when to kill it."""

    def __init__(self, close_seconds: float) -> None:
        self._close_seconds = close_seconds
        self._at: float | None = None

    def send(self, line: Line) -> None:
        self._at = time.monotonic() if self._at is None else self._at
        with suppress(OSError):
            line.send_bytes(END)

    def seconds_left(self) -> float:
        waited = 0.0 if self._at is None else time.monotonic() - self._at
        return max(0.0, self._close_seconds - waited)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Context for starting process ``name``: converts errors to engine errors that name it."""
    try:
        yield
    except OSError as error:
        raise EngineDeadError(
            f"Engine core initialization failed: no process for the {name}: {error}"
        ) from error
    except Exception as error:  # pickling runs code of the user's objects, which may raise
        raise ConfigError(
            f"an option cannot be sent to the process of the {name}: {error}; give policies, "
            "resources and processors as dotted paths or module-level classes"
        ) from error


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes that are started in the block ignore interrupts; only their parent handles them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _has_ended(pidfd: int, seconds: float) -> bool:
    """Wait at most ``seconds`` for the end of a process. True if it has ended."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(1000 * seconds))


def is_stopped(pid: int | None) -> bool:
    """Whether a process is stopped, and so would not hear that it is requested to end."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"


class ParentWatch:
    """Starts a thread that calls ``on_death`` when the parent process dies or requests an end."""

    def __init__(self, line: Line, on_death: Callable[[], object]) -> None:
        self.on_death = on_death
        self.is_requested = False
        """Whether the parent has requested the end; False if it has died."""
        self._line = line
        threading.Thread(target=self._run, name="parent-watch", daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):  # the parent has ended
            parent = os.pidfd_open(_parent())
            try:
                if os.getppid() == _parent():  # else the number belongs to another process
                    multiprocessing.connection.wait([self._line, parent])
            finally:
                os.close(parent)
        with suppress(OSError, EOFError):
            self.is_requested = self._line.poll() and self._line.recv_bytes() == END
        self.on_death()


def report_to_parent(line: Line, report: StartReport) -> None:
    """Send the start report from the child. Does nothing if the parent has ended."""
    with suppress(OSError):
        line.send_bytes(msgspec.msgpack.encode(report))


def _parent() -> int:
    """The process id of the process that started this one, even if the parent has died."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    return parent.pid

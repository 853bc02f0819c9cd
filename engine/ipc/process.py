"""A child process and a line to it: it says when it is ready, each side sees the other end.

The line is a pipe that nobody else inherits. When a process dies, however it dies, the system
closes its end, and the other side reads the end of the line.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import msgspec

from engine.errors import ConfigError, EngineDeadError

STOP_SECONDS = 5.0  # from one way of ending a child to the next, harder one
EXIT_SECONDS = 0.5  # from the end of a child's line to its exit code

Line = Connection


class Report(msgspec.Struct, array_like=True, frozen=True):
    """What a child says of its start. ``kind`` and ``message`` are of the error, if it failed."""

    is_ready: bool
    kind: str = ""
    message: str = ""
    traceback: str = ""


class Child:
    """A spawned process that runs ``target(line, *args)``. Its end, and ours, is seen by both.

    ``args`` travel by import path, as everything does that is given to a spawned process. Raises
    ``ConfigError`` if one of them cannot. ``at_end`` is called when the process has gone.
    """

    def __init__(
        self,
        name: str,
        target: Callable[..., None],
        *args: Any,
        at_end: Callable[[], object] = lambda: None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, theirs = context.Pipe()
        self._lock = threading.Lock()  # on the process: only one may wait for its end
        self._process = context.Process(target=target, args=(theirs, *args), name=name, daemon=True)
        try:
            self._process.start()
        except Exception as error:  # whatever the objects in it raise when they are written down
            self.line.close()
            at_end()
            raise ConfigError(
                f"an option cannot be handed to the process of the {name}: {error}; give policies, "
                "resources and processors as dotted paths or module-level classes"
            ) from error
        finally:
            theirs.close()
        # Runs at exit before multiprocessing ends its children, which would let this one drain.
        self._end = weakref.finalize(self, _end, self._process, self.line, at_end)
        self._end.atexit = False
        atexit.register(self._end)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._end.alive and self._process.is_alive()

    def wait_until_ready(self, timeout: float) -> Report:
        """What it reports of its start.

        Raises ``EngineDeadError`` if it ends before, or has not said anything after ``timeout``
        seconds; it is then ended.
        """
        ready = multiprocessing.connection.wait([self.line, self._process.sentinel], timeout)
        with suppress(EOFError, OSError):
            if self.line in ready:
                return msgspec.msgpack.decode(self.line.recv_bytes(), type=Report)
        how = self.how_it_ended() if ready else None
        if how is None:
            self.kill()  # it may be stopped, and hear nothing
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
            self._process.join(EXIT_SECONDS)
            code = self._process.exitcode
        if code is None:
            return None
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"

    def kill(self) -> None:
        """End it at once, even one that is stopped; ``close`` is still to come."""
        with self._lock:
            if self._end.alive:
                self._process.kill()

    def close(self) -> None:
        """Ask it to end, wait, insist; harmless when repeated."""
        atexit.unregister(self._end)
        with self._lock:
            self._end()


def _end(process: SpawnProcess, line: Line, at_end: Callable[[], object]) -> None:
    line.close()  # which it sees as our death
    process.join(STOP_SECONDS)
    for insist in (process.terminate, process.kill):
        if process.exitcode is None:
            insist()
            process.join(STOP_SECONDS)
    process.close()
    at_end()


class ParentWatch:
    """A thread that calls ``on_death`` when the parent process has gone, in the child."""

    def __init__(self, line: Line, on_death: Callable[[], object]) -> None:
        self.on_death = on_death
        self._line = line
        threading.Thread(target=self._run, name="parent-watch", daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            multiprocessing.connection.wait([self._line])
        self.on_death()


def report_to_parent(line: Line, report: Report) -> None:
    """Say how the start went, in the child. A parent that has gone does not hear it."""
    with suppress(OSError):
        line.send_bytes(msgspec.msgpack.encode(report))

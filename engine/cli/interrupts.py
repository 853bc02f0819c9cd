"""Ends the command with a one-line message when it is interrupted, even during imports.

Imports little, so that its signal handlers are installed before slow imports.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO, NoReturn, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import ReadableBuffer

INTERRUPTED = 130  # the exit status that shells use
INTERRUPTION = (INTERRUPTED, "interrupted")
TERMINATION = (143, "ended by SIGTERM")
END_SECONDS = 4.0  # for child processes and open files to be closed
IMPORTING = "<frozen importlib._bootstrap>"  # the file of frames that import a module


class Terminated(SystemExit):
    """SIGTERM was received."""


class Interrupts:
    """Handles SIGINT and SIGTERM for the whole command.

    While the command runs, the signals raise ``KeyboardInterrupt`` and ``Terminated``. Before and
    after the run, they end the process immediately. During an import they do so too, because
    libraries would turn an exception there into another error."""

    can_be_held = True  # raising KeyboardInterrupt may be postponed a little

    def __init__(self) -> None:
        self.is_running = False
        self._is_reported = False

    @classmethod
    def install(cls) -> Interrupts:
        """Install the signal handlers. A signal that the parent process set to "ignore" stays
        ignored."""
        _prepare_streams()
        self = cls()
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminate)
        sys.unraisablehook = self._unraisable
        return self

    def run(self, command: Callable[[], int]) -> int:
        """Run the command and return its exit status."""
        self.is_running = True
        try:
            status = command()
        except KeyboardInterrupt:
            self.end(*INTERRUPTION)
        except Terminated:
            self.end(*TERMINATION)
        self.is_running = False
        if status == INTERRUPTED:  # already reported
            self.end(INTERRUPTED)
        return status

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_running and not _is_importing(frame):
            raise KeyboardInterrupt
        self.end(*INTERRUPTION)

    def end(self, status: int, why: str = "") -> NoReturn:
        """End the process with this exit status, without waiting for threads. ``why``: the reason
        to print, unless one was printed before. Workers of process pools are killed."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if why and not self._is_reported:
            self._is_reported = True
            _write_line(f"metronome: {why}\n")
        _be_silent()
        _leave(status)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self.is_running and not _is_importing(frame):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise Terminated
        self.end(*TERMINATION)

    def _unraisable(self, lost: sys.UnraisableHookArgs) -> None:
        """Handle an interrupt in a destructor or C callback, where it cannot be raised."""
        if isinstance(lost.exc_value, KeyboardInterrupt):
            self.end(*INTERRUPTION)
        if isinstance(lost.exc_value, Terminated):
            self.end(*TERMINATION)
        if isinstance(lost.exc_value, SystemExit):  # from a handler of the command itself
            self.end(lost.exc_value.code if isinstance(lost.exc_value.code, int) else 1)
        sys.__unraisablehook__(lost)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            return True
        frame = frame.f_back
    return False


def _leave(status: int) -> NoReturn:
    """Kill workers, flush output and run the registered exit functions, for a limited time, then
    exit."""
    late = threading.Timer(END_SECONDS, os._exit, (status,))
    late.daemon = True
    late.start()
    for step in (_kill_workers, _flush, atexit._run_exitfuncs, _flush):
        _try(step)
    os._exit(status)


def _try(step: Callable[[], object]) -> None:
    try:
        step()
    except BaseException:  # nothing may prevent the exit
        return


def _kill_workers() -> None:
    """Kill the workers of process pools, since this process would wait for them at its exit."""
    if (multiprocessing := sys.modules.get("multiprocessing")) is not None:
        for child in multiprocessing.active_children():
            if not child.daemon:
                child.kill()


def _flush() -> None:
    sys.stdout.flush()


def _be_silent() -> None:
    """Discard what threads, logs and libraries print while they are torn down."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _write_line(text: str) -> None:
    try:
        os.write(2, text.encode())
    except OSError:  # the reader is gone
        return


class Lossy(io.FileIO):
    """A file that drops writes which fail, because its reader is gone or the disk is full."""

    num_lost = 0
    """Number of dropped writes, which the log reports."""

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except OSError:
            self.num_lost += 1
            return len(memoryview(data))


def _prepare_streams() -> None:
    """Open all three standard streams, and make standard error never fail.

    Otherwise a file that is opened later could become standard error, which libraries write to.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    raw = cast(BinaryIO, Lossy(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(raw, errors="backslashreplace", write_through=True)

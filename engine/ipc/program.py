"""Program: a module run in a new process that imports and copies nothing of its parent.

It starts in a fraction of a second, whatever the parent has imported. In contrast,
``ipc.process.Child`` accepts any object but imports the parent's main module again. A program gets
a start message of bytes through a pipe, and inherits file descriptors:

    parent   writes the start message and keeps its end open; when that is closed, the child ends
    child    reads the message; the end of the pipe raises a signal, even within library code
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

LENGTH = struct.Struct("<I")


class Program:
    """A new process that runs ``module.main(descriptor)``; it reads the message ``start`` from the
    pipe ``descriptor``. It inherits the file descriptors ``fds`` under the same numbers."""

    def __init__(self, module: str, start: bytes, fds: Sequence[int] = ()) -> None:
        theirs, self._ours = os.pipe()
        code = (
            f"import sys; sys.path[:] = {list(map(str, sys.path))}; import {module} as program; "
            f"program.main({theirs})"
        )
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs, *fds),
                process_group=0,  # only the parent handles interrupts from the terminal
            )
        except BaseException:
            os.close(self._ours)
            raise
        finally:
            os.close(theirs)
        try:
            self.pidfd = os.pidfd_open(self._popen.pid)
            """Readable once the process has ended."""
        except OSError:  # no file descriptor is left
            self.kill()
            os.close(self._ours)
            raise
        with suppress(BrokenPipeError):  # it has died already; the descriptor shows that
            os.write(self._ours, LENGTH.pack(len(start)) + start)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def close(self) -> None:
        """Kill the process immediately. May be repeated."""
        if self.pidfd < 0:
            return
        self.kill()
        os.close(self._ours)
        os.close(self.pidfd)
        self.pidfd = -1

    def kill(self) -> None:
        """Kill the process and wait until it has ended."""
        self._popen.kill()
        self._popen.wait()

    def how_it_ended(self) -> str:
        """How the process ended, e.g. ``"was killed by SIGKILL"``. Call it only after the end."""
        code = self._popen.wait()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"


def start_message(descriptor: int) -> bytes:
    """Read the start message in the new process, which from then on ends with its parent."""
    (length,) = LENGTH.unpack(_read(descriptor, LENGTH.size))
    message = _read(descriptor, length)
    # SIGIO's default action: a Python handler would wait for library calls, which take minutes.
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([descriptor], [], [], 0)[0]:
        sys.exit(1)  # the parent is gone: there is no process to report to
    return message


def _read(descriptor: int, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = os.read(descriptor, size - len(parts))
        if not part:
            sys.exit(1)  # the parent is gone: there is no process to report to
        parts += part
    return parts

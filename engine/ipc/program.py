"""A program of ours in a process of its own: nothing of the parent's is imported or copied into it.

``ipc.process.Child`` can be given any object but runs the parent's main module once more. A program
gets one message of bytes and the descriptors it is to inherit, and so is up in a fraction of a
second whatever the parent has imported. Both hold the same pipe:

    parent   writes the start message, then keeps its end open; closing it, or dying, ends the child
    child    reads the message; the end of the pipe is a signal to it, even within foreign code
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
    """A spawned process that runs ``module.main(descriptor)``. ``fds`` keep their numbers in it."""

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
                process_group=0,  # an interrupt at the terminal is for the parent alone
            )
        except BaseException:
            os.close(self._ours)
            raise
        finally:
            os.close(theirs)
        try:
            self.pidfd = os.pidfd_open(self._popen.pid)
            """Readable once the process has ended."""
        except OSError:  # no descriptor is left
            self.kill()
            os.close(self._ours)
            raise
        with suppress(BrokenPipeError):  # it died at once, which the descriptor tells
            os.write(self._ours, LENGTH.pack(len(start)) + start)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def close(self) -> None:
        """Kill it at once; harmless when repeated."""
        if self.pidfd < 0:
            return
        self.kill()
        os.close(self._ours)
        os.close(self.pidfd)
        self.pidfd = -1

    def kill(self) -> None:
        """End it at once and wait until it has."""
        self._popen.kill()
        self._popen.wait()

    def how_it_ended(self) -> str:
        """``"was killed by SIGKILL"`` or ``"exited with status 1"``, once it has ended."""
        code = self._popen.wait()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"


def start_message(descriptor: int) -> bytes:
    """The start message, in the program. From here on it ends with its parent.

    The end of the pipe raises SIGIO, whose default ends a process without asking it: Python could
    only answer between two instructions, and a library may not return for minutes.
    """
    (length,) = LENGTH.unpack(_read(descriptor, LENGTH.size))
    message = _read(descriptor, length)
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

"""Sealed files: anonymous shared memory that another process opens as ``/proc/PID/fd/N``.

A file that is sealed cannot change its size, so what was checked stays true. It has no name, needs
no space in ``/dev/shm``, and its memory is freed when the last process that holds or maps it closes
it or ends. Handles are valid where ``place()`` is their ``namespace()``: in processes of one user
and one namespace of processes, on one running system.
"""

from __future__ import annotations

import os
import resource
import stat
import sys
from pathlib import Path
from typing import NamedTuple

from engine.errors import WireError, reason_of

if sys.platform == "linux":
    import fcntl

    SIZE_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    ALL_SEALS = SIZE_SEALS | fcntl.F_SEAL_WRITE


class SealedFile(NamedTuple):
    """Which file is meant: its number in process ``pid``, and its inode, which tells it from later
    files with that number. ``size``: bytes."""

    namespace: str
    pid: int
    fd: int
    inode: int
    size: int

    def __str__(self) -> str:
        return f"file {self.fd} of process {self.pid}"


def namespace() -> str:
    """Where this process's handles are valid; "" if nowhere: on systems without anonymous files, or
    if others may not look into this process, since it has changed its user or has capabilities."""
    try:
        is_open = os.stat("/proc/self/fd").st_uid == os.geteuid()
    except OSError:
        return ""
    return place() if is_open else ""


def place() -> str:
    """Where the handles are valid that this process can open; "" on systems without such files."""
    if sys.platform != "linux":
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} user:{os.geteuid()}"
    except OSError:
        return ""


def create(name: str, size: int) -> int:
    """Create a file of ``size`` zeros, not sealed yet. Returns its descriptor.

    Raises ``OSError`` if the system has no such files or no memory, or half of the files that this
    process may open are open."""
    if not namespace():
        raise OSError("no anonymous shared memory: this system has none, or hides this process's")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        leave_numbers(fd)
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def seal(fd: int, *, can_be_written: bool = False) -> SealedFile:
    """Fix a file's size and, by default, its content, which must not be mapped for writing then.
    Returns its handle."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS if can_be_written else ALL_SEALS)
    found = os.fstat(fd)
    return SealedFile(namespace(), os.getpid(), fd, found.st_ino, found.st_size)


class SharedFile:
    """A file of ``size`` bytes, ``first`` and then zeros, that processes of this user open by its
    ``handle`` to write to it.

    Raises ``OSError`` if there is no anonymous memory that other processes can open."""

    def __init__(self, name: str, size: int, first: bytes = b"") -> None:
        self._fd: int | None = create(name, size)
        try:
            os.pwrite(self._fd, first, 0)
            self.handle = seal(self._fd, can_be_written=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. Processes that have opened its memory keep it. May be repeated."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def open_sealed(file: SealedFile, name: str, *, to_write: bool = False) -> int:
    """Open a file of another process. ``name``: which it must have been created with. Returns a
    descriptor. Raises ``WireError`` for any other file."""
    if not file.namespace or file.namespace != place():
        raise WireError(f"shared memory of {file.namespace!r:.80} cannot be opened in {place()!r}")
    path = f"/proc/{file.pid}/fd/{file.fd}"
    mode = os.O_RDWR if to_write else os.O_RDONLY
    try:
        # An open file could be a device or a pipe, which must not even be opened.
        if not os.readlink(path).startswith(f"/memfd:{name} "):
            raise WireError(f"{file} is not shared memory named {name}")
        fd = os.open(path, mode | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, OverflowError) as error:
        raise WireError(f"shared memory ({file}) cannot be opened: {reason_of(error)}") from error
    try:
        _check_file(fd, file, SIZE_SEALS if to_write else ALL_SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_there(file: SealedFile) -> bool:
    """True if the file's process still has it open."""
    try:
        return os.stat(f"/proc/{file.pid}/fd/{file.fd}").st_ino == file.inode
    except (OSError, OverflowError):
        return False


def leave_numbers(fd: int) -> None:
    """Leave half of the files that this process may open to others. New files get the lowest free
    number. Raises ``OSError``."""
    if not has_numbers(fd):
        raise OSError(f"file {fd} is open: half of this process's limit (ulimit -n) is in use")


def has_numbers(fd: int) -> bool:
    """True if less than half of the files that this process may open are open, by the number of
    the latest."""
    return fd < most_open_files() // 2


def most_open_files() -> int:
    """Number of files that this process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _check_file(fd: int, file: SealedFile, seals: int) -> None:
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        raise WireError(f"{file} is not shared memory of this user")
    if (found.st_ino, found.st_size) != (file.inode, file.size):
        raise WireError(
            f"{file} is number {found.st_ino} of {found.st_size} bytes, must be number "
            f"{file.inode} of {file.size} bytes: it was closed before it was opened here"
        )
    try:
        has = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        has = 0
    if has & seals != seals:
        raise WireError(f"{file} is not sealed, so it could change")

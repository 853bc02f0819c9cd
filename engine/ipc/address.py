"""Addresses of cores: socket files in a private directory, or a TCP port.

    <temporary directory>/metronome-core-XXXX/      accessible to its user only
        core            data socket
        core-control    control socket
        core-token      the token that clients send in Hello
        lock            locked by every process that uses the directory

A new core removes directories that killed processes left: those whose lock no process holds, and
those that have had no lock file for a minute.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError

IPC, TCP = "ipc://", "tcp://"
PREFIX = "metronome-core-"
LOCK = "lock"
TOKEN_BYTES = 16
PORT = re.compile("[0-9]{1,5}")
MIN_SECRET_CHARS = 16
MAX_SOCKET_PATH = 107  # bytes, a limit of the operating system
UNLOCKED_SECONDS = 60.0  # a directory older than this must have a lock


@dataclass(frozen=True)
class Address:
    """The address of a core's data socket, and the secret or token that clients need.

    ``secret``, shared by both sides, encrypts a TCP connection; it is ``None`` for socket files."""

    data: str
    token: bytes
    secret: str | None = None

    @property
    def control(self) -> str:
        """Address of the control socket: a file next to the data socket's, or the next TCP port."""
        if self.data.startswith(IPC):
            return self.data + "-control"
        host, _, port = self.data.rpartition(":")
        return f"{host}:{int(port) + 1}"


def address_of(core: str, secret: str | None) -> Address:
    """Parse the address of a running core, as ``metronome core`` prints it.

    Raises ``ConfigError`` if it is invalid, or if the token or secret is missing.
    """
    if core.startswith(TCP):
        return tcp_address(core, secret)
    if not core.startswith(IPC):
        raise ConfigError(f"core address {core!r} must begin with {IPC} or {TCP}")
    try:
        token = Path(core.removeprefix(IPC) + "-token").read_bytes()
    except OSError as error:
        raise ConfigError(f"there is no core at {core!r}: {error}") from error
    return Address(core, token)


def tcp_address(address: str, secret: str | None) -> Address:
    """A TCP address with its secret. Raises ``ConfigError`` if either is invalid."""
    host, _, port = address.removeprefix(TCP).rpartition(":")
    if not host or not PORT.fullmatch(port) or not 0 < int(port) < 65535:
        raise ConfigError(
            f"core address {address!r} must be {TCP}HOST:PORT with a port in 1..65534"
        )
    if secret is None or len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"a core at {address} needs a shared secret of at least {MIN_SECRET_CHARS} characters: "
            "set METRONOME_CORE_SECRET for core and clients, or use an ipc:// address"
        )
    return Address(address, derive_key(secret, "token")[:TOKEN_BYTES], secret)


def derive_key(secret: str, purpose: str) -> bytes:
    """Derive a key of 32 bytes from the shared secret."""
    return hashlib.sha256(f"metronome/{purpose}/{secret}".encode()).digest()


class Directory:
    """A directory for one core's socket files. Each process that uses it holds a shared lock on it
    until ``close``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = _hold(path)

    @classmethod
    def create(cls) -> Directory:
        """Create a directory with a token; removes directories left by killed processes.

        Raises ``ConfigError`` if it cannot be created.
        """
        try:
            parent = Path(tempfile.gettempdir())
        except OSError as error:
            raise ConfigError(
                f"the directory of a core's sockets cannot be created: {error.strerror}; set "
                "TMPDIR to a writable directory"
            ) from error
        try:
            for left in parent.glob(PREFIX + "*"):
                _remove_if_left(left)
            directory = cls._make(parent)
        except OSError as error:
            raise _no_place(parent, error) from error
        try:
            (directory.path / "core-token").write_bytes(secrets.token_bytes(TOKEN_BYTES))
            if len(os.fsencode(directory.path / "core-control")) > MAX_SOCKET_PATH:
                raise OSError(f"a path of more than {MAX_SOCKET_PATH} bytes is too long")
        except OSError as error:
            directory.remove()
            raise _no_place(parent, error) from error
        return directory

    @classmethod
    def _make(cls, parent: Path) -> Directory:
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            with suppress(FileNotFoundError):  # another process has removed it
                return cls(path)

    @property
    def address(self) -> Address:
        return Address(f"{IPC}{self.path}/core", (self.path / "core-token").read_bytes())

    def close(self) -> None:
        """Release the lock. May be repeated."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove(self) -> None:
        """Delete the directory, even if other processes still use it. May be repeated."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()


def _no_place(parent: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the directory of a core's sockets cannot be created in {parent}: {error}; set TMPDIR"
    )


def _hold(path: Path) -> int:
    """Take a shared lock on a directory. Raises ``FileNotFoundError`` if it was removed."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        is_same = os.path.samestat(os.stat(path / LOCK), os.fstat(lock))
    except FileNotFoundError:
        is_same = False
    if not is_same:
        os.close(lock)
        raise FileNotFoundError(path)
    return lock


def _remove_if_left(path: Path) -> None:
    """Delete a directory if this user owns it and no process has locked it."""
    with suppress(OSError):
        known = path.lstat()  # does not follow links
        if known.st_uid != os.getuid():
            return
        is_old = time.time() - known.st_mtime > UNLOCKED_SECONDS
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if is_old else 0), 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)

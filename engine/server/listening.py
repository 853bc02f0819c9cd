"""The server's address: bound before the model is loaded, listening once the model is ready.

While the model is loading, clients get "connection refused", and no other program can bind the
address.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from engine.errors import ConfigError, reason_of

MAX_PORT = 65535
UDS_MODE = 0o666  # every user may connect who has access to the directory of the file
PORT_TRIES = 20  # with port 0, until all addresses of a host can have the same port
MIN_FREE_PORT = 1024  # lower ports need privileges


@dataclass(frozen=True)
class Listening:
    """Sockets that are bound to the server's addresses and do not listen yet."""

    sockets: list[socket.socket]
    uds: str | None = None

    def places(self, scheme: str) -> list[str]:
        """The addresses for clients: URLs with the bound ports, or the path of the socket file."""
        if self.uds is not None:
            return [f"{scheme}+unix:{self.uds}"]
        return [_url(scheme, *each.getsockname()[:2]) for each in self.sockets]

    def prepare(self) -> None:
        """Allow the port to be bound again as soon as this server ends, even while old connections
        are still closing. Call this directly before listening."""
        for each in self.sockets:
            if each.family != socket.AF_UNIX:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


@contextlib.contextmanager
def bound(host: str, port: int, uds: str | None) -> Iterator[Listening]:
    """Context with sockets bound to all addresses of ``host``, or to the socket file ``uds``; on
    exit they are closed and the file is removed. Raises ``ConfigError`` if one cannot be bound."""
    if uds is not None:
        with _bound_file(uds) as listener:
            yield Listening([listener], uds)
        return
    listeners = _bound_port(host, port)
    try:
        yield Listening(listeners)
    finally:
        for each in listeners:
            each.close()


def check_port(port: int) -> None:
    """Raise ``ConfigError`` if a port is not in 0..65535."""
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"port is {port}, must be in 0..{MAX_PORT} (0: any free port)")


def _bound_port(host: str, port: int) -> list[socket.socket]:
    addresses = _addresses_of(host)
    for _ in range(PORT_TRIES if port == 0 and len(addresses) > 1 else 1):
        try:
            return _bind_all(addresses, port)
        except OSError as error:
            last = error
            if error.errno != errno.EADDRINUSE:
                break
    raise _cannot_bind(host, port, last)


def _addresses_of(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """The addresses of a host with their families, without duplicates."""
    try:
        found = socket.getaddrinfo(
            host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host is {host!r:.200}, which cannot be resolved ({error}): give an address of this "
            "machine, such as 127.0.0.1 or 0.0.0.0"
        ) from error
    return list(dict.fromkeys((family, str(place[0])) for family, _, _, _, place in found))


def _bind_all(addresses: list[tuple[socket.AddressFamily, str]], port: int) -> list[socket.socket]:
    """Bind a socket to each address, all with the same port. Addresses that this machine does not
    have are skipped, but ``OSError`` is raised if it has none of them."""
    listeners: list[socket.socket] = []
    missing: OSError | None = None
    with contextlib.ExitStack() as failing:
        for family, address in addresses:
            try:
                listeners.append(_bind(family, address, port))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
                continue
            failing.callback(listeners[-1].close)
            port = listeners[0].getsockname()[1]
        if missing is not None and not listeners:
            raise missing
        failing.pop_all()
    return listeners


def _bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    """Bind a socket that no other program can share. Raises ``OSError``."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            made.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address, port))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except BaseException:
        made.close()
        raise
    return made


def _cannot_bind(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port is {port}, which another program uses at {host}: end that program, or choose "
            "another port with --port"
        )
    if error.errno == errno.EACCES and 0 < port < MIN_FREE_PORT:
        return ConfigError(
            f"port is {port}, which this user may not bind: choose one of at least {MIN_FREE_PORT}"
        )
    reason = os.strerror(error.errno or 0)
    return ConfigError(
        f"host is {host!r:.200}, where port {port} cannot be bound ({reason}): give an address of "
        "this machine, such as 127.0.0.1 or 0.0.0.0"
    )


@contextlib.contextmanager
def _bound_file(path: str) -> Iterator[socket.socket]:
    """Bind a socket to a file, after removing the file of a server that does not run any more."""
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(path)
            os.chmod(path, UDS_MODE)
            made = os.stat(path)
        except (OSError, ValueError) as error:  # a ValueError for a null character
            raise _cannot_make(path, error) from error
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(made, os.stat(path)):  # not replaced by another server's
                    os.unlink(path)
    finally:
        listener.close()


def _remove_stale(path: str) -> None:
    """Remove a socket file that no server uses. Raises ``ConfigError`` for any other file."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise _cannot_make(path, error) from error
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"uds is {path!r:.200}, which exists and is not a socket: choose another path"
        )
    if _is_in_use(path):
        raise ConfigError(
            f"uds is {path!r:.200}, which another server uses: end that server, or choose another "
            "path"
        )
    try:
        os.unlink(path)
    except OSError as error:
        raise _cannot_make(path, error) from error


def _is_in_use(path: str) -> bool:
    """Whether a running process has bound this socket file, even if it does not listen yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError as error:
            if error.errno == errno.EPROTOTYPE:
                return True
            raise _cannot_make(path, error) from error
    return True


def _cannot_make(path: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"uds is {path!r:.200}, where no socket file can be made ({reason_of(error)}): choose a "
        "path in a directory that exists and that this user may write to"
    )


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

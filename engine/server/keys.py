"""Authentication: API keys, the admin key, and a key file that may change."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import ConfigError, reason_of
from engine.server.callers import CALLER, Caller, name_of_key
from engine.server.errors import ApiError, error_response
from engine.server.http.answered import stamped

logger = logging.getLogger("engine.server")
OPEN_PATHS = ("/", "/health", "/ready", "/ping", "/version", "/api/version")  # need no key
UNCOUNTED = "/page/"  # paths of data that a page polls while its own requests are open
LOOK_SECONDS = 1.0  # between two checks whether the file has changed


class KeyFile:
    """API keys from a file with one key per line, blank lines and ``#`` comments. A changed file is
    read again; if that fails, the previous keys stay valid and the error is logged once."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the keys. Raises ``ConfigError`` if the file is unreadable or has no valid keys."""
        self._path = Path(path)
        self._clock = clock
        self._looked_at = clock()
        self._state = self._stamp()
        try:
            self._digests = _digests(self._path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"api_key_file is {path!r:.200}, which cannot be used: {reason_of(error)}"
            ) from error

    def digests(self) -> list[bytes]:
        """Digests of the current keys, after reading the file again if it has changed."""
        now = self._clock()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._look()
        return self._digests

    def _look(self) -> None:
        state = self._stamp()
        if state == self._state:
            return
        self._state = state
        try:
            self._digests = _digests(self._path)
        except (OSError, ValueError) as error:
            logger.error("%s cannot be used, the keys stay as they were: %s", self._path, error)
        else:
            logger.warning("%s was read: %d keys", self._path, len(self._digests))

    def _stamp(self) -> tuple[int, int, int] | None:
        """Modification time, inode and size of the file; ``None`` if it cannot be read."""
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size


class KeyRing:
    """The valid keys, stored as digests. The time of a check reveals nothing about them."""

    def __init__(
        self, keys: Sequence[str] = (), file: str | None = None, admin: str | None = None
    ) -> None:
        """keys, file: API keys. Raises ``ConfigError`` for an empty key or an unusable file."""
        for name, given in (("api_key", keys), ("admin_api_key", (admin,))):
            if "" in given:
                raise ConfigError(
                    f"{name} is empty, must be a text: leave the option out, or set it"
                )
        self._digests = [digest_of(key.encode()) for key in keys]
        self._file = None if file is None else KeyFile(file)
        self._admin = None if admin is None else digest_of(admin.encode())

    @property
    def has_admin(self) -> bool:
        return self._admin is not None

    @property
    def has_any(self) -> bool:
        """Whether requests need a key. False if no key is set: all clients are accepted then."""
        return bool(self._all())

    def key_of(self, scope: Scope) -> bytes | None:
        """The digest of the request's key if that is an API key or the admin key, else ``None``."""
        admin = [] if self._admin is None else [self._admin]
        return _valid_key(scope, [*self._all(), *admin])

    def is_admin(self, scope: Scope) -> bool:
        return self._admin is not None and _valid_key(scope, [self._admin]) is not None

    def _all(self) -> list[bytes]:
        return self._digests if self._file is None else self._digests + self._file.digests()


class KeyGuard:
    """ASGI middleware that answers a request without a valid key with status 401, and a request
    whose key has too many open requests with 429."""

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        most: int | None = None,
        also_open: Collection[str] = (),
        *,
        key_is_user: bool = False,
    ) -> None:
        """most: maximum number of open requests per API key; ``None``: no limit. also_open: paths
        that need no key, in addition to ``OPEN_PATHS``. key_is_user: policies take the key for the
        user."""
        self.app = app
        self._keys = keys
        self._most = most
        self._open_paths = frozenset((*OPEN_PATHS, *also_open))
        self._key_is_user = key_is_user
        self._num_open: Counter[bytes] = Counter()  # requests, by the digest of their key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        CALLER.set(Caller())
        is_open = scope["type"] != "http" or scope["path"] in self._open_paths
        if is_open or not self._keys.has_any:
            await self.app(scope, receive, send)
            return
        digest = self._keys.key_of(scope)
        if digest is None:
            await _refused(no_key("the API key"), scope)(scope, receive, send)
            return
        CALLER.set(Caller(name_of_key(digest), self._key_is_user))
        if scope["path"].startswith(UNCOUNTED):
            await self.app(scope, receive, send)
        elif self._most is not None and self._num_open[digest] >= self._most:
            await _refused(self._too_many(), scope)(scope, receive, send)
        else:
            self._num_open[digest] += 1
            try:
                await self.app(scope, receive, send)
            finally:
                self._num_open[digest] -= 1

    def _too_many(self) -> ApiError:
        return ApiError(
            429,
            f"this API key has {self._most} open requests, the limit (--max-requests-per-key of "
            "the server): send the request again when one of them has ended",
            code="too_many_requests",
        )


def _refused(error: ApiError, scope: Scope) -> ASGIApp:
    return stamped(error_response(error, scope["path"]), scope)


def no_key(key: str) -> ApiError:
    message = f"{key} is missing or wrong: send it in the header Authorization or x-api-key"
    return ApiError(401, message, code="invalid_api_key")


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def owner_of(scope: Scope) -> str:
    """The owner of the data that a request stores: a digest of its key, or of "" without a key."""
    return hashlib.sha256(b" ".join(_keys_of(scope)[:1])).hexdigest()


def _keys_of(scope: Scope) -> list[bytes]:
    """The keys in a request's headers: the bearer token and the value of ``x-api-key``, if any."""
    headers = dict(scope["headers"])
    kind, _, token = headers.get(b"authorization", b"").partition(b" ")
    bearer = [token] if kind.lower() == b"bearer" else []
    return [*bearer, *([headers[b"x-api-key"]] if b"x-api-key" in headers else [])]


def _valid_key(scope: Scope, digests: Sequence[bytes]) -> bytes | None:
    """The first of ``digests`` that belongs to a key in the request's headers, or ``None``."""
    given = [digest_of(key) for key in _keys_of(scope)]
    fitting = [own for each in given for own in digests if hmac.compare_digest(own, each)]
    return fitting[0] if fitting else None


def _digests(path: Path) -> list[bytes]:
    """Digests of the keys in a file. Raises ``ValueError`` if the file has no keys, or has a key
    that cannot be sent in a header."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError("the file has no keys; write one per line")
    if wrong := [number for number, key in enumerate(keys, 1) if not _is_key(key)]:
        raise ValueError(f"key {wrong[0]} must have printable ASCII characters without blanks")
    return [digest_of(key.encode()) for key in keys]


def _is_key(key: str) -> bool:
    return key.isascii() and key.isprintable() and " " not in key

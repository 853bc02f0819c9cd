"""Who may ask: API keys, the admin key, and a file of keys that may change."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import ConfigError, reason_of
from engine.server.errors import ApiError, error_response
from engine.server.http.answered import stamped

logger = logging.getLogger("engine.server")
OPEN_PATHS = ("/health", "/ready", "/ping", "/version")  # without a key
LOOK_SECONDS = 1.0  # between two looks whether the file has changed


class KeyFile:
    """The keys in a file, one a line, blank lines and ``#`` comments aside; read again when it has
    changed. A file that cannot be used leaves the keys as they were, and is logged once."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ``ConfigError`` for a file that cannot be used."""
        self._path = Path(path)
        self._clock = clock
        self._looked_at = clock()
        self._state = self._stamp()
        try:
            self._digests = _digests(self._path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"api_key_file {path!r:.200} cannot be used: {reason_of(error)}"
            ) from error

    def digests(self) -> list[bytes]:
        """Digests of the keys that are valid now."""
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
        """What changes with the file, by whatever way it is replaced."""
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size


class KeyRing:
    """Which keys let a client in. Keys are kept and compared as digests, all of them each time, so
    that the time tells nothing of them."""

    def __init__(
        self, keys: Sequence[str] = (), file: str | None = None, admin: str | None = None
    ) -> None:
        """Raises ``ConfigError`` for an empty key, and for a file that cannot be used."""
        if not all((*keys, admin is None or admin)):
            raise ConfigError("a key is empty: it would let in clients without a key")
        self._digests = [digest_of(key.encode()) for key in keys]
        self._file = None if file is None else KeyFile(file)
        self._admin = None if admin is None else digest_of(admin.encode())

    @property
    def has_admin(self) -> bool:
        return self._admin is not None

    @property
    def has_any(self) -> bool:
        """Without any key, all are let in."""
        return bool(self._all())

    def key_of(self, scope: Scope) -> bytes | None:
        """The digest of the key that was shown, if it is one of ours: who asks. The admin key is
        as good as any other."""
        admin = [] if self._admin is None else [self._admin]
        return _shown(scope, [*self._all(), *admin])

    def is_admin(self, scope: Scope) -> bool:
        return self._admin is not None and _shown(scope, [self._admin]) is not None

    def _all(self) -> list[bytes]:
        return self._digests if self._file is None else self._digests + self._file.digests()


class KeyGuard:
    """Answers 401 to those without a key, and 429 to a key with too many requests under way."""

    def __init__(self, app: ASGIApp, keys: KeyRing, most: int | None = None) -> None:
        """most: requests of one key at a time."""
        self.app = app
        self._keys = keys
        self._most = most
        self._num_open: Counter[bytes] = Counter()  # requests, by the digest of their key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        if is_open or not self._keys.has_any:
            await self.app(scope, receive, send)
            return
        digest = self._keys.key_of(scope)
        if digest is None:
            await _refused(no_key("the API key is missing or wrong"), scope)(scope, receive, send)
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
            f"this key has {self._most} requests under way, the limit (--max-requests-per-key of "
            "the server): try again when one has ended",
            code="too_many_requests",
        )


def _refused(error: ApiError, scope: Scope) -> ASGIApp:
    return stamped(error_response(error, scope["path"]), scope)


def no_key(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def owner_of(scope: Scope) -> str:
    """Whose a request is: names the key that was shown, ours or not, and does not tell it."""
    return hashlib.sha256(b" ".join(_given(scope)[:1])).hexdigest()


def _given(scope: Scope) -> list[bytes]:
    """Keys that were shown, as a bearer token or as Anthropic's clients do."""
    headers = dict(scope["headers"])
    kind, _, token = headers.get(b"authorization", b"").partition(b" ")
    bearer = [token] if kind.lower() == b"bearer" else []
    return [*bearer, *([headers[b"x-api-key"]] if b"x-api-key" in headers else [])]


def _shown(scope: Scope, digests: Sequence[bytes]) -> bytes | None:
    """Which of these was shown."""
    given = [digest_of(key) for key in _given(scope)]
    fitting = [own for each in given for own in digests if hmac.compare_digest(own, each)]
    return fitting[0] if fitting else None


def _digests(path: Path) -> list[bytes]:
    """Raises ``ValueError`` for a file without keys: it would let everyone in."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError("it has no keys; write one a line")
    if wrong := [number for number, key in enumerate(keys, 1) if not _is_key(key)]:
        raise ValueError(f"key {wrong[0]} has blanks or characters that no header may have")
    return [digest_of(key.encode()) for key in keys]


def _is_key(key: str) -> bool:
    return key.isascii() and key.isprintable() and " " not in key

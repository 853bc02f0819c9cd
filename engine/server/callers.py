"""Who sent an HTTP request: the short name of its key, and the user."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

MAX_SHOWN = 64  # characters of a user's name
DIGITS = 12  # of the digest of a key


@dataclass(eq=False)
class Caller:
    """The sender of an HTTP request."""

    key: str | None = None
    """A short name of the API key; ``None`` without one."""
    is_user: bool = False
    """Whether the key is the user, whatever the request says."""
    user: str | None = None
    """The user for policies, once the request has been read."""

    def fields(self) -> dict[str, str]:
        """What logs and pages show of the sender."""
        known = {} if self.key is None else {"key": self.key}
        if self.user is not None and self.user != self.key:
            known["user"] = self.user[:MAX_SHOWN]
        return known


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""The sender of the HTTP request that the current task answers."""


def name_of_key(digest: bytes) -> str:
    """The name of a key with this SHA-256 digest, as ``printf %s KEY | sha256sum | cut -c-12``."""
    return digest.hex()[:DIGITS]


def charged_user(user: str | None) -> str | None:
    """The user that policies see for the current request: its key with ``--user-from-key``, else
    ``user``, which the request names. Notes it for logs."""
    caller = CALLER.get()
    if caller is None:
        return user
    caller.user = caller.key if caller.is_user else user
    return caller.user

"""Followers: sends clients what changes in the prefix cache, and how much work others have given.

A follower first gets the whole cache, then changes: with the outputs of each step in which a
request ends, and otherwise at most every ``NEWS_SECONDS``. Nothing is queued for a follower that
does not read as fast: it gets the whole cache again when it has caught up."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from engine.core.inproc_client import InprocClient
from engine.kv.changes import CacheChanges
from engine.messages.wire import CacheNews
from engine.rpc.sessions import ClientSession, ClientSessions

NEWS_SECONDS = 0.02
RETRY_SECONDS = 0.5  # between two attempts to send the whole cache to a client that does not read


@dataclass
class Follower:
    """What a client that follows the cache knows."""

    needs_whole: bool = True
    retry_at: float = 0.0
    """When the whole cache may be sent, if it is needed."""
    num_sent: int = 0
    """Messages since the whole cache was sent."""
    load: int = 0
    """The work of other clients that it was sent last, in tokens."""


class Followers:
    """The clients of a core that follow its prefix cache."""

    def __init__(self, core: InprocClient, sessions: ClientSessions) -> None:
        self._core = core
        self._sessions = sessions
        self._changes: CacheChanges | None = None
        self._known: dict[int, Follower] = {}  # by client index
        self._next_at = 0.0

    def add(self, session: ClientSession) -> None:
        """Send this client the whole cache next, and then its changes."""
        if self._changes is None:
            self._changes = self._core.follow_cache()
        self._known[session.index] = Follower()
        self._next_at = 0.0  # at once

    def tell(self, now: float, *, at_once: bool = False) -> None:
        """Send each follower what has changed, if news are due. Costs what has changed."""
        if not self._known or (now < self._next_at and not at_once):
            return
        self._next_at = now + NEWS_SECONDS
        changes = self._changes
        is_cleared, stored, removed = changes.take() if changes else (False, b"", b"")
        total = self._sessions.load
        has_changed = bool(is_cleared or stored or removed)
        for index, follower in list(self._known.items()):
            session = self._sessions.at(index)
            if session is None:
                del self._known[index]
                continue
            load = total - session.work.load
            if follower.needs_whole:
                if now < follower.retry_at:
                    continue
                follower.retry_at = now + RETRY_SECONDS
            elif not has_changed and load == follower.load:
                continue
            self._send(session, follower, load, (is_cleared, stored, removed))
        if not self._known and changes is not None:
            changes.stop()
            self._changes = None

    def next_look(self) -> float:
        """The time at which ``tell`` must be called next, if nothing else happens before."""
        waiting = (each.retry_at for each in self._known.values() if each.needs_whole)
        return min(waiting, default=inf)

    def _send(
        self,
        session: ClientSession,
        follower: Follower,
        load: int,
        changed: tuple[bool, bytes, bytes],
    ) -> None:
        changes = self._changes
        is_whole, stored, removed = changed
        if follower.needs_whole:
            is_whole, removed = True, b""
            stored = b"" if changes is None else changes.whole()
        number = 0 if is_whole else follower.num_sent + 1
        secret = b"" if changes is None or not is_whole else changes.secret
        has_cache = changes is not None
        news = CacheNews(number, is_whole, stored, removed, load, secret, has_cache)
        follower.needs_whole = not self._sessions.try_to_send(session, news)
        follower.num_sent, follower.load = number, load

"""Followers: sends clients what changes in the prefix cache, and how much work others have given.

A follower first gets the whole cache, then changes: with the outputs of each step in which a
request ends, and otherwise at most every ``NEWS_SECONDS``. Nothing is queued for a follower that
does not read as fast: it gets the whole cache again when it has caught up."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from msgspec.structs import replace

from engine.core.inproc_client import InprocClient
from engine.kv.changes import CacheChanges
from engine.messages.wire import CacheNews
from engine.rpc.sessions import ClientSession, ClientSessions

NEWS_SECONDS = 0.02
ADAPTER_SECONDS = 1.0  # between two looks at the adapters
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
        self._adapters: dict[str, str] = {}  # digests by name
        self._look_at = 0.0  # when to look at the adapters

    def add(self, session: ClientSession) -> None:
        """Send this client the whole cache next, and then its changes."""
        if self._changes is None:
            self._changes = self._core.follow_cache()
        self._known[session.index] = Follower()
        self._next_at = 0.0  # at once

    def report(self, now: float, *, at_once: bool = False) -> None:
        """Send each follower what has changed, if news are due. Costs what has changed."""
        if not self._known or (now < self._next_at and not at_once):
            return
        self._next_at = now + NEWS_SECONDS
        changes = self._changes
        is_cleared, stored, removed = changes.take() if changes else (False, b"", b"")
        new_adapters = self._new_adapters(now)
        total = self._sessions.load
        has_changed = bool(is_cleared or stored or removed or new_adapters)
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
            changed = CacheNews(0, is_cleared, stored, removed, load, adapters=new_adapters)
            self._send(session, follower, changed)
        if not self._known and changes is not None:
            changes.stop()
            self._changes = None

    def next_look(self) -> float:
        """The time at which ``report`` must be called next, if nothing else happens before."""
        waiting = (each.retry_at for each in self._known.values() if each.needs_whole)
        return min(waiting, default=inf)

    def _new_adapters(self, now: float) -> dict[str, str]:
        """Digests of the adapters, if they have changed since the last look."""
        if now < self._look_at:
            return {}
        self._look_at = now + ADAPTER_SECONDS
        before, self._adapters = self._adapters, self._core.adapter_digests()
        return {} if self._adapters == before else self._adapters

    def _send(self, session: ClientSession, follower: Follower, changed: CacheNews) -> None:
        """Send what has changed, or the whole cache if it is needed."""
        changes, news = self._changes, changed
        if follower.needs_whole:
            stored = b"" if changes is None else changes.whole()
            news = replace(news, is_whole=True, stored=stored, removed=b"")
        if news.is_whole:
            secret = b"" if changes is None else changes.secret
            news = replace(news, secret=secret, adapters=self._adapters)
        number = 0 if news.is_whole else follower.num_sent + 1
        news = replace(news, sequence=number, has_cache=changes is not None)
        follower.needs_whole = not self._sessions.try_to_send(session, news)
        follower.num_sent, follower.load = number, news.load

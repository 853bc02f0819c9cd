"""PixelStore: the content of media of unfinished requests, which scheduler and worker share."""

from __future__ import annotations

from collections.abc import Mapping

from engine.messages.media import Pixels
from engine.messages.requests import AddRequest


class PixelStore:
    """The content of media by hash. Only the thread of the core uses it.

    It is kept until the last of its requests ends, because an encoder output may be evicted while a
    request is preempted."""

    def __init__(self) -> None:
        self._pixels: dict[str, Pixels] = {}
        self._users: dict[str, set[str]] = {}  # hash -> request ids
        self._used_by: dict[str, set[str]] = {}  # request id -> hashes

    def __len__(self) -> int:
        return len(self._pixels)

    def keep(self, request: AddRequest, pixels: Mapping[str, Pixels]) -> None:
        """Keep the content of a queued request's media until ``forget``."""
        for key, content in pixels.items():
            self._pixels.setdefault(key, content)
        used = {item.hash for item in request.media} & self._pixels.keys()
        if used:
            self._used_by[request.request_id] = used
        for key in used:
            self._users.setdefault(key, set()).add(request.request_id)

    def get(self, key: str) -> Pixels | None:
        """The content with this hash; ``None`` if no unfinished request has brought it."""
        return self._pixels.get(key)

    def forget(self, request_id: str) -> None:
        """Drop what only this request uses. Unknown ids are ignored."""
        for key in self._used_by.pop(request_id, ()):
            users = self._users[key]
            users.discard(request_id)
            if not users:
                del self._users[key], self._pixels[key]

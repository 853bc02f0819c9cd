"""PixelStore: the content of media that has come to a core, for the worker to encode."""

from __future__ import annotations

from collections.abc import Sequence

from engine.messages.media import MediaContent, Pixels
from engine.messages.requests import Arrival, code_of


class PixelStore:
    """The content of media by hash. Only the thread of the core uses it."""

    def __init__(self) -> None:
        self._pixels: dict[str, Pixels] = {}

    def __len__(self) -> int:
        return len(self._pixels)

    def take(self, request_ids: Sequence[str], content: MediaContent) -> Arrival:
        """Keep content that has come for these requests, until ``drop``. Returns the arrival for
        the scheduler, with a fault if the content cannot be used."""
        names = list(request_ids)
        if content.error:
            code = code_of("error", content.code)
            assert code is not None
            return Arrival(content.key, names, content.error, code)
        self._pixels.setdefault(content.key, content.pixels or {})
        return Arrival(content.key, names)

    def get(self, key: str) -> Pixels | None:
        """The content with this hash; ``None`` if no unfinished request has brought it."""
        return self._pixels.get(key)

    def drop(self, key: str) -> None:
        """Drop content that no unfinished request uses, if there is any."""
        self._pixels.pop(key, None)

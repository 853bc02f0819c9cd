"""PixelStore: the content of media that has come to a core, for the worker to encode."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import WireError
from engine.ipc.pixel_segments import check, read
from engine.messages.media import Kinds, MediaContent, Pixels, kinds_of
from engine.messages.requests import Arrival, code_of


class PixelStore:
    """The content of media by hash. Only the thread of the core uses it."""

    def __init__(self, kinds: Kinds | None = None) -> None:
        """kinds: of the arrays that the model's image processor makes; ``None``: not known."""
        self._kinds = kinds
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
        try:
            if content.key not in self._pixels:
                self._pixels[content.key] = self._checked(content)
        except WireError as error:
            fault = f"the content of a picture cannot be used: {error}"
            return Arrival(content.key, names, fault, "invalid_media")
        return Arrival(content.key, names)

    def get(self, key: str) -> Pixels | None:
        """The content with this hash; ``None`` if no unfinished request has brought it."""
        return self._pixels.get(key)

    def drop(self, key: str) -> None:
        """Drop content that no unfinished request uses, if there is any."""
        self._pixels.pop(key, None)

    def _checked(self, content: MediaContent) -> Pixels:
        """The arrays of content from another process. Raises ``WireError`` for arrays that the
        model's image processor could not have made."""
        pixels = content.pixels or {}
        if content.shared is not None:
            pixels = read(content.shared)
        else:
            check(pixels)
        if self._kinds is not None and (found := kinds_of(pixels)) != self._kinds:
            raise WireError(
                f"its arrays are {_shown(found)}, the model needs {_shown(self._kinds)}"
            )
        return pixels


def _shown(kinds: Kinds) -> str:
    texts = [f"{name:.80} ({dtype}, {num} dimensions)" for name, (dtype, num) in kinds.items()]
    return ", ".join(texts[:8]) or "none"

"""PixelStore: the content of media that has come to a core, for the worker to encode.

A copy in the device's memory is used once, and returned when the step that encoded it is settled,
or when no request needs the content. The host's copy stays, in case the output is evicted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from engine.errors import WireError
from engine.ipc.device_pixels import DeviceReader
from engine.ipc.pixel_segments import check, read
from engine.messages.media import DevicePixels, Kinds, MediaContent, Pixels, kinds_of
from engine.messages.requests import Arrival, code_of

logger = logging.getLogger("engine.core")
KEEP, DROP = "keep_pixels", "drop_pixels"  # methods of the workers of other ranks


class OtherRanks(Protocol):
    """The workers of further ranks."""

    def notify_others(self, name: str, *args: Any) -> None:
        """Let them run a method, before the plans that come after."""
        ...


class PixelStore:
    """The content of media by hash. Only the thread of the core uses it."""

    def __init__(self, kinds: Kinds | None = None) -> None:
        """kinds: of the arrays that the model's image processor makes; ``None``: not known."""
        self.reader: DeviceReader | None = None
        """Reads the memory of the core's device, if clients may copy pixels there."""
        self._others: OtherRanks | None = None
        self._kinds = kinds
        self._counts: Counter[str] = Counter()
        self._on_device: dict[str, DevicePixels] = {}
        self._pixels: dict[str, Pixels] = {}

    def __len__(self) -> int:
        return len(self._pixels)

    def take(self, request_ids: Sequence[str], content: MediaContent) -> Arrival:
        """Keep content that has come for these requests, until ``drop``. Returns the arrival for
        the scheduler, with a fault if the content cannot be used."""
        is_new = content.key not in self._pixels
        arrival = self._take(list(request_ids), content)
        if content.device is not None and self.reader is not None:
            if is_new and _is_same(content.device, self._pixels.get(content.key)):
                self._on_device[content.key] = content.device
            else:
                self.reader.give_back(content.device)
        return arrival

    def keep(self, key: str, pixels: Pixels) -> None:
        """Keep checked content until ``drop``."""
        self._pixels[key] = pixels
        if self._others is not None:
            self._others.notify_others(KEEP, key, msgspec.msgpack.encode(pixels))

    def share(self, group: OtherRanks) -> None:
        """Let the other ranks of a group keep what this store keeps."""
        self._others = group

    def get(self, key: str) -> Pixels | None:
        """The content with this hash; ``None`` if no unfinished request has brought it."""
        return self._pixels.get(key)

    @property
    def device(self) -> str:
        """Name of the device to which clients may copy pixels; "" for none."""
        return "" if self.reader is None else self.reader.name

    @property
    def counters(self) -> dict[str, int]:
        """Media items that were read on the device, and those whose copy there could not be."""
        return dict(self._counts)

    def on_device(self, key: str) -> Mapping[str, Any] | None:
        """The content as tensors on the device; ``None`` if it is not there."""
        if self.reader is None or (handle := self._on_device.get(key)) is None:
            return None
        try:
            tensors = self.reader.open(handle)
        except WireError as error:
            if not self._counts["unread_on_device"]:
                logger.warning("pixels are read from the host's memory, not the GPU's: %s", error)
            self._counts["unread_on_device"] += 1
            self.encoded(key)
            return None
        self._counts["read_on_device"] += 1
        return tensors

    def has_read(self, key: str) -> None:
        """Note that the work that reads the tensors of ``on_device`` is queued."""
        if self.reader is not None and (handle := self._on_device.get(key)) is not None:
            self.reader.has_read(handle)

    def encoded(self, key: str) -> None:
        """Return the device's copy of content, when a step that encoded it is settled."""
        if self.reader is not None and (handle := self._on_device.pop(key, None)) is not None:
            self.reader.give_back(handle)

    def drop(self, key: str) -> None:
        """Drop content that no unfinished request uses, if there is any."""
        if self._pixels.pop(key, None) is not None and self._others is not None:
            self._others.notify_others(DROP, key)
        self.encoded(key)

    # -- helpers

    def _take(self, names: list[str], content: MediaContent) -> Arrival:
        if content.error:
            code = code_of("error", content.code)
            assert code is not None
            return Arrival(content.key, names, content.error, code)
        try:
            if content.key not in self._pixels:
                self.keep(content.key, self._checked(content))
        except WireError as error:
            fault = f"the content of a picture cannot be used: {error}"
            return Arrival(content.key, names, fault, "invalid_media")
        return Arrival(content.key, names)

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


def _is_same(handle: DevicePixels, pixels: Pixels | None) -> bool:
    """True if the arrays on the device have the dtypes and shapes of those of the host."""
    arrays = {name: (each.dtype, each.shape) for name, each in handle.arrays.items()}
    wanted = {name: (each.dtype, each.shape) for name, each in (pixels or {}).items()}
    return arrays == wanted

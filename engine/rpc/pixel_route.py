"""PixelRoute: copies pixels to the GPU of one core, as ``mm_tensor_transport`` says.

    cuda_ipc_pool ──pool is full──> cuda_ipc ──no memory, no GPU──> default: nothing is copied

Each step down is counted, and logged the first time. The core gets the pixels by default's way,
too: for a second encoding, and in case that it cannot open the GPU's memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from engine.config.media import MIB, MediaConfig
from engine.ipc.codec import MAX_MESSAGE_BYTES
from engine.ipc.device_pixels import DeviceMemory, DeviceSender, NoRoom
from engine.messages.media import DevicePixels, MediaContent, Pixels, num_bytes_of
from engine.messages.stats import SchedulerStats

logger = logging.getLogger(__name__)
PREFIX = "pixels."
"""With it begin the names of the counters in the statistics."""


def find_cuda(name: str) -> DeviceMemory:
    """The memory of the GPU with this name. Raises ``OSError`` if this process cannot use it."""
    from engine.pictures.cuda_memory import find_device  # imports torch

    return find_device(name)


class PixelRoute:
    """The way of pixels to one core's device."""

    def __init__(
        self,
        options: MediaConfig,
        device: str,
        find_device: Callable[[str], DeviceMemory] = find_cuda,
    ) -> None:
        """device: name of the core's device, "" if it has none whose memory can be shared."""
        self._pool_bytes = options.pool_bytes
        self._wanted = options.mm_tensor_transport
        self._counts: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}  # why there is no pool or sender, by cause
        self._lent: dict[str, DevicePixels] = {}  # by key
        self._sender: DeviceSender | None = None
        if self._wanted != "default":
            self._sender = self._open(device, find_device)

    @property
    def counters(self) -> dict[str, int]:
        """Numbers of pictures by their way to the core: copied to the device, into the pool
        (``pooled``) or outside of it (``copied``); in messages, without shared memory
        (``in_messages``). The other names are causes of a slower way."""
        return {PREFIX + name: num for name, num in self._counts.items()}

    @property
    def num_lent(self) -> int:
        """Pictures whose copies the core had not returned at the last ``collect``."""
        return 0 if self._sender is None else self._sender.num_lent

    def prepared(self, content: MediaContent) -> MediaContent:
        """Content with a copy of its pixels on the core's device, if there is one."""
        if content.pixels is None:
            return content
        if content.shared is None:
            self._counts["in_messages"] += 1
        if self._wanted == "default":
            return content
        # A message that is too large is not sent, and with it no handle.
        if content.shared is None and num_bytes_of(content.pixels) > MAX_MESSAGE_BYTES // 2:
            return content
        return replace(content, device=self._put(content.key, content.pixels))

    def collect(self) -> None:
        """Free what the core has returned from its device."""
        if self._sender is not None and self.num_lent:
            self._sender.collect()

    def close(self) -> None:
        """Free everything: the core has ended, or the connection to it. May be repeated."""
        if self._sender is not None:
            self._sender.close()

    # -- helpers

    def _put(self, key: str, pixels: Pixels) -> DevicePixels | None:
        """Copy the pixels of a media item to the device. ``None`` if that is not possible, or if
        the core still has those of an earlier call."""
        if self._sender is None:
            self._fall(*next(iter(self._reasons.items())))
            return None
        self._sender.collect()
        self._lent = {key: each for key, each in self._lent.items() if self._sender.is_lent(each)}
        if key in self._lent:
            return None
        handle = self._in_pool(self._sender, pixels) or self._alone(self._sender, pixels)
        if handle is not None:
            self._lent[key] = handle
        return handle

    def _open(self, device: str, find_device: Callable[[str], DeviceMemory]) -> DeviceSender | None:
        if not device:
            self._reasons["no_device"] = "the core has no GPU whose memory can be shared"
            return None
        try:
            memory = find_device(device)
        except (OSError, ImportError, RuntimeError) as error:  # torch raises RuntimeError
            self._reasons["no_device"] = str(error)
            return None
        try:
            return DeviceSender(memory, pool_bytes=self._pool_bytes)
        except (OSError, MemoryError) as error:
            self._reasons["no_pool"] = f"a pool of {self._pool_bytes // MIB} MiB: {error}"
            return None

    def _in_pool(self, sender: DeviceSender, pixels: Pixels) -> DevicePixels | None:
        if not self._pool_bytes:
            return None
        try:
            handle = sender.lend(pixels)
        except NoRoom as full:
            self._fall(full.cause, f"{full}; raise mm_tensor_pool_mib", to="cuda_ipc")
            return None
        self._counts["pooled"] += 1
        return handle

    def _alone(self, sender: DeviceSender, pixels: Pixels) -> DevicePixels | None:
        try:
            handle = sender.lend(pixels, in_pool=False)
        except NoRoom as full:
            self._fall(full.cause, str(full))
            return None
        self._counts["copied"] += 1
        return handle

    def _fall(self, cause: str, why: str, to: str = "default") -> None:
        if not self._counts[cause]:
            logger.warning(
                "pixels are sent by %s, not by %s: %s; the statistics count this as %s%s",
                *(to, self._wanted, why, PREFIX, cause),
            )
        self._counts[cause] += 1


def with_counters(stats: SchedulerStats | None, route: PixelRoute | None) -> SchedulerStats | None:
    """The statistics of a core with the counters of the way to it."""
    if stats is None or route is None or not (counters := route.counters):
        return stats
    return replace(stats, counters={**stats.counters, **counters})

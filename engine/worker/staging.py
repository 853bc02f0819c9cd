"""The inputs of a step for the device: one buffer, one copy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages.step import Column
from engine.worker.platform import Platform

ALIGNMENT = 16  # of what a kernel reads, or it is compiled a second time
EXTRA_BYTES = 1 << 20  # beside the fixed columns


class HostColumns(NamedTuple):
    """A step's columns as the host fills them. S sequences, N tokens."""

    slots: Column  # [S], -1: padding
    draw_slots: Column  # [S]: the slot again where one token is drawn, else -1
    draw_starts: Column  # [S + 1]: rows of the draw of each sequence
    query_start: Column  # [S + 1]
    host_ids: Column  # [N]: input ids, UNKNOWN where only the device knows them


class DeviceColumns(NamedTuple):
    """The same on the device, at addresses that never change."""

    slots: torch.Tensor
    draw_slots: torch.Tensor
    draw_starts: torch.Tensor
    query_start: torch.Tensor
    host_ids: torch.Tensor

    def of(self, num_seqs: int, num_tokens: int) -> DeviceColumns:
        """Those of a step of this size."""
        ends = (num_seqs, num_seqs, num_seqs + 1, num_seqs + 1, num_tokens)
        return DeviceColumns(*(column[:end] for column, end in zip(self, ends, strict=True)))


class Staging:
    """One pinned buffer for each step in flight, and its place on the device.

    Fixed columns come first, the token ids last of them; any other data of a step follows
    right behind the ids in use. A buffer is filled again only when its last copy is done. Where
    host and device are one, the buffer is the place, and nothing is copied.
    """

    def __init__(
        self, platform: Platform, max_num_seqs: int, max_num_tokens: int, num_buffers: int
    ) -> None:
        self._platform = platform
        self._shares = platform.shares_memory
        counts = (max_num_seqs, max_num_seqs, max_num_seqs + 1, max_num_seqs + 1, max_num_tokens)
        begins, end = [], 0
        for count in counts:
            begins.append(end)
            end = _aligned(end + 4 * count)
        self._ids_begin = begins[-1]
        self._room = end + EXTRA_BYTES
        num_buffers = 1 if self._shares else num_buffers
        self._pinned = [platform.pinned(self._room) for _ in range(num_buffers)]
        self._place = (
            self._pinned[0] if self._shares else platform.zeros((self._room,), torch.uint8)
        )
        spans = [slice(begin, begin + 4 * n) for begin, n in zip(begins, counts, strict=True)]
        self.device = DeviceColumns(*(self._place[span].view(torch.int32) for span in spans))
        self._host = [
            HostColumns(*(pinned.numpy()[span].view(np.int32) for span in spans))
            for pinned in self._pinned
        ]
        self._copied = [platform.mark() for _ in range(num_buffers)]
        self._turn = 0
        self._end = 0

    def open(self, num_tokens: int) -> HostColumns:
        """The columns of the next step, for the host to fill."""
        self._turn = (self._turn + 1) % len(self._pinned)
        self._copied[self._turn].synchronize()
        self._end = _aligned(self._ids_begin + 4 * num_tokens)
        return self._host[self._turn]

    def add(self, values: NDArray[np.generic]) -> torch.Tensor:
        """Add values to the copy; returns where they lie from ``send`` to the next ``send``."""
        if self._shares:  # a plan's columns may be read-only, and torch warns of such
            return torch.from_numpy(values if values.flags.writeable else values.copy())
        begin, end = self._end, self._end + values.nbytes
        if end > self._room:  # hundreds of long prompts found in the cache at once
            return self._platform.upload(values)
        self._end = _aligned(end)
        buffer = self._pinned[self._turn].numpy()
        buffer[begin:end] = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        place = self._place[begin:end].view(torch.from_numpy(np.empty(0, values.dtype)).dtype)
        return place.view(values.shape)

    def send(self) -> None:
        """Send everything with one copy."""
        if self._shares:
            return
        end = min(self._end, self._room)
        pinned = self._pinned[self._turn]
        self._place[:end].copy_(pinned[:end], non_blocking=True)
        self._copied[self._turn].record()


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT

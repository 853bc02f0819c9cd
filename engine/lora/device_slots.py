"""Adapters in the memory of a GPU: their products, and the tables in which layers find them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.layers.adapted_linear import AdaptedLinear
from engine.lora.adapter import AdapterError
from engine.lora.placing import EMBED, HEAD, PlacedAdapter
from engine.models.spec import DecoderSpec
from engine.models.targets import targets
from engine.worker.platform import Mark, Platform
from kernels.low_rank import ENTRY_WORDS, PANEL, RECORD_WORDS, DeviceTable, LowRankProduct

USUAL_RANK = 32  # of adapters, one of which fits into the memory of each slot
ALIGNMENT = 128  # bytes
MATRICES, ENDS = [3, 4], [6, 7]  # words of a record that are addresses; those of ENDS may be 0
NOWHERE = -1  # in place of an offset


class Packed(NamedTuple):
    """The products of an adapter in one piece of page-locked memory."""

    data: torch.Tensor  # [bytes] uint8
    records: NDArray[np.int64]  # [products, RECORD_WORDS], with offsets in ``data`` for addresses
    counts: NDArray[np.int64]  # [layers], how many of the records each layer has

    @property
    def num_bytes(self) -> int:
        """What it takes on the device."""
        return self.data.nbytes + aligned(self.records.nbytes)


class DeviceSlots:
    """The adapters in slots. Those that running requests use are on the device; others stay there
    until their memory is needed, least recently used first.

    Memory is reserved for an adapter of the largest rank next to others of a usual one."""

    def __init__(
        self,
        layers: Mapping[str, AdaptedLinear],
        spec: DecoderSpec,
        num_slots: int,
        max_rank: int,
        platform: Platform,
        itemsize: int,
    ) -> None:
        """layers: those that take adapters, by the names of their targets; itemsize: bytes of an
        element of a product."""
        self._platform = platform
        self._names = list(layers)
        self._entries = platform.zeros((len(layers), num_slots, ENTRY_WORDS), torch.int64)
        nums = most_products(spec)
        for name, entries in zip(layers, self._entries, strict=True):
            layers[name].attach_device(DeviceTable(entries, nums[name], max_rank))
        shapes = [(one.in_features, one.out_features, nums[name]) for name, one in layers.items()]
        self.num_bytes = most_bytes(shapes, max_rank, itemsize)
        usual = most_bytes(shapes, min(max_rank, USUAL_RANK), itemsize)
        self.num_bytes += (num_slots - 1) * usual
        self._memory = platform.zeros((self.num_bytes,), torch.uint8)
        self._adapters: dict[int, Packed] = {}  # by slot
        self._places: dict[int, int] = {}  # by slot: first byte; least recently used first
        self._rested: dict[int, tuple[int, Mark]] = {}  # by slot that no request uses, see ``rest``
        self._num_rests = 0
        self._free_after = (0, platform.mark())  # the last use of memory that is free now

    def pack(self, linears: Mapping[str, Sequence[LowRankProduct]]) -> Packed:
        """Copy the products of layers to page-locked memory. Any thread may call this."""
        records: list[tuple[int, ...]] = []
        places: dict[int, tuple[int, torch.Tensor]] = {}  # by address: products may share tensors
        size = 0
        for name in self._names:
            for one in linears.get(name, ()):
                words = list(one.record())
                parts = (one.a, one.panels, one.factors, one.added)
                for word, part in zip((*MATRICES, *ENDS), parts, strict=True):
                    if part is not None and words[word] not in places:
                        places[words[word]] = size, part
                        size += aligned(part.nbytes)
                    words[word] = NOWHERE if part is None else places[words[word]][0]
                records.append(tuple(words))
        data = self._platform.pinned(size)
        for begin, part in places.values():
            data[begin : begin + part.nbytes] = part.reshape(-1).view(torch.uint8)
        counts = [len(linears.get(name, ())) for name in self._names]
        table = np.array(records, dtype=np.int64).reshape(-1, RECORD_WORDS)
        return Packed(data, table, np.array(counts, dtype=np.int64))

    def put(self, slot: int, adapter: Packed) -> None:
        """Set the adapter of a slot that no request uses."""
        self._drop(slot)
        self._adapters[slot] = adapter

    def bring(self, slot: int, in_use: Collection[int]) -> str:
        """Start to copy the adapter of a slot to the device, unless it is there; work queued later
        finds it. in_use: slots of running requests, this one included. Returns "", or why there is
        no memory for it."""
        adapter = self._adapters[slot]
        self._rested.pop(slot, None)
        if slot in self._places:
            self._places[slot] = self._places.pop(slot)
            return ""
        while (begin := self._gap(adapter.num_bytes)) is None:
            idle = next((one for one in self._places if one not in in_use), None)
            if idle is not None:
                self._drop(idle)
            elif adapter.num_bytes <= self._num_free():
                self._gather()
            else:
                return self._shortage(adapter)
        self._places[slot] = begin
        self._copy(slot, adapter)
        return ""

    def rest(self, slot: int) -> None:
        """Note that only work queued so far uses the adapter of a slot."""
        self._num_rests += 1
        self._rested[slot] = self._num_rests, self._platform.mark()

    # -- helpers

    def _gather(self) -> None:
        """Copy the adapters that are on the device again, without free memory between them."""
        slots = list(self._places)
        for slot in slots:
            self._drop(slot)
        begin = 0
        for slot in slots:
            self._places[slot] = begin
            self._copy(slot, self._adapters[slot])
            begin += self._adapters[slot].num_bytes

    def _copy(self, slot: int, adapter: Packed) -> None:
        begin, upload = self._places[slot], self._platform.upload
        middle, end = begin + adapter.data.nbytes, begin + adapter.num_bytes
        self._platform.send(adapter.data, self._memory[begin:middle], self._free_after[1])
        first = self._memory.data_ptr() + begin
        records = adapter.records.copy()
        records[:, MATRICES] += first
        ends = records[:, ENDS]
        records[:, ENDS] = np.where(ends == NOWHERE, 0, ends + first)
        place = self._memory[middle:end][: records.nbytes]
        place.copy_(upload(records.reshape(-1).view(np.uint8)))
        firsts = adapter.counts.cumsum() - adapter.counts
        addresses = place.data_ptr() + firsts * records[:1].nbytes
        entries = np.stack([adapter.counts, addresses], axis=1)
        self._entries[:, slot].copy_(upload(entries))

    def _drop(self, slot: int) -> None:
        """Free the memory of a slot. Work that is queued later must not use it."""
        if self._places.pop(slot, None) is None:
            return
        if slot not in self._rested:
            self.rest(slot)
        rested = self._rested.pop(slot)
        if self._free_after[0] < rested[0]:
            self._free_after = rested

    def _gap(self, num_bytes: int) -> int | None:
        """The first byte of enough free memory; ``None`` if there is not enough in one piece."""
        for begin, end in self._gaps():
            if end - begin >= num_bytes:
                return begin
        return None

    def _gaps(self) -> Iterator[tuple[int, int]]:
        begin = 0
        for slot, place in sorted(self._places.items(), key=lambda item: item[1]):
            yield begin, place
            begin = place + self._adapters[slot].num_bytes
        yield begin, self.num_bytes

    def _num_free(self) -> int:
        return sum(end - begin for begin, end in self._gaps())

    def _shortage(self, adapter: Packed) -> str:
        return (
            f"its adapter takes {adapter.num_bytes} bytes of the GPU's memory, of which "
            f"{self._num_free()} of {self.num_bytes} bytes for adapters are free, without those of "
            "running requests: raise max_loras, or use adapters of a smaller rank"
        )


def most_products(spec: DecoderSpec) -> dict[str, int]:
    """The most products of an adapter in each linear layer, by the name of its target: one for each
    group of adjacent rows that come from one tensor of the checkpoint."""
    nums = {
        target.name: max(len(list(groupby(way, key=lambda part: part.name))) for way in target.ways)
        for target in targets(spec)
    }
    return {HEAD: nums[EMBED], **nums}


def most_bytes(shapes: Sequence[tuple[int, int, int]], rank: int, itemsize: int) -> int:
    """The most bytes of an adapter of a rank. shapes: inputs, outputs and most products of each
    layer."""
    total = aligned(sum(num for _, _, num in shapes) * RECORD_WORDS * 8)
    for num_in, num_out, num in shapes:
        inputs = num * aligned(rank * num_in * itemsize)
        outputs = (num_out + num * PANEL) * rank * itemsize
        ends = 2 * (num_out * 4 + num * ALIGNMENT)
        total += inputs + aligned(outputs) + num * ALIGNMENT + ends
    return aligned(total)


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def check(placed: PlacedAdapter, layers: Mapping[str, AdaptedLinear]) -> None:
    """Raise ``AdapterError`` if an adapter changes what cannot be changed on a GPU."""
    changes = {
        "the embedding": placed.embedding is not None or EMBED in placed.replaced,
        "the whole output layer": HEAD in placed.replaced,
        "experts": not placed.linears.keys() <= layers.keys(),
    }
    for what, is_changed in changes.items():
        if is_changed:
            raise AdapterError(
                f"adapter {placed.name!r} changes {what}, which is supported on a CPU only: use "
                "device='cpu', or an adapter of linear layers"
            )

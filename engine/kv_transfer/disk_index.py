"""DiskIndex: where on disk the blocks with given keys are."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.kv_transfer.disk_files import SegmentName


@dataclass(eq=False)
class Known:
    """What is known of a segment.

    ``num_seen``: slots whose entries have been read or written. ``is_finished``: nothing will be
    appended. ``marked``: slots whose blocks are marked as read."""

    name: SegmentName
    num_slots: int
    num_seen: int = 0
    is_finished: bool = False
    keys: dict[int, bytes] = field(default_factory=dict)
    marked: set[int] = field(default_factory=set)


Wanted = dict[Known, list[tuple[int, int]]]
"""What to read of each segment: slots in order, and for each the position of its key."""


class DiskIndex:
    """Segments and the keys in them. Of copies of a block, the one in the youngest segment counts,
    which is removed last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: dict[SegmentName, Known] = {}
        self._places: dict[bytes, tuple[Known, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        places = self._places
        return [key in places for key in keys]

    def segment(self, name: SegmentName) -> Known | None:
        return self._segments.get(name)

    def segments(self) -> list[Known]:
        with self._lock:
            return list(self._segments.values())

    def is_elsewhere(self, key: bytes, name: SegmentName) -> bool:
        """Whether the block with this key is known in another segment than this one."""
        place = self._places.get(key)
        return place is not None and place[0].name != name

    def find(self, keys: Sequence[bytes]) -> Wanted:
        wanted: defaultdict[Known, list[tuple[int, int]]] = defaultdict(list)
        with self._lock:
            for position, key in enumerate(keys):
                place = self._places.get(key)
                if place is not None:
                    wanted[place[0]].append((place[1], position))
        for slots in wanted.values():
            slots.sort()
        return wanted

    def find_all(self, keys: Iterable[bytes]) -> list[tuple[Known, list[int]]]:
        """All slots with one of these keys, copies included, by segment."""
        wanted = set(keys)
        with self._lock:
            found = [
                (known, [slot for slot, key in known.keys.items() if key in wanted])
                for known in self._segments.values()
            ]
        return [(known, slots) for known, slots in found if slots]

    def enter(self, known: Known, keys: Mapping[int, bytes], num_seen: int) -> None:
        """Add keys, by slot, and the segment itself if it is new."""
        number, places = known.name.number, self._places
        with self._lock:
            self._segments[known.name] = known
            known.num_seen = num_seen
            known.keys.update(keys)
            for slot, key in keys.items():
                place = places.get(key)
                if place is None or place[0].name.number <= number:
                    places[key] = (known, slot)

    def lose(self, known: Known, slots: Iterable[int]) -> int:
        """Remove blocks. Returns how many keys are no longer in the index."""
        with self._lock:
            return sum(self._lose(known, slot) for slot in slots)

    def drop(self, known: Known) -> int:
        """Remove a segment. Returns how many keys are no longer in the index."""
        with self._lock:
            if self._segments.get(known.name) is known:
                del self._segments[known.name]
            return sum(self._lose(known, slot) for slot in list(known.keys))

    def _lose(self, known: Known, slot: int) -> bool:
        key = known.keys.pop(slot, None)
        if key is None or self._places.get(key) != (known, slot):
            return False
        del self._places[key]
        return True

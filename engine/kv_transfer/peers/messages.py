"""Messages between a server of KV blocks and the engines that read them.

    consumer                                 server
    ["join", 1, token, identity, ...] ──────>
                                      <────── ["joined", num_slots, shares_memory]
    ["pull", number, keys, ...]       ──────>
                                      <────── ["sent", number, first, found, sums], bytes of blocks
    ["free", n]                       ──────>     when the consumer has copied n blocks
    ["leave"]                         ──────>

The server answers the keys of a pull in their order, in one or more messages ``sent``. Each key
takes a slot from then until the consumer frees it: the key with index i takes slot i modulo
``num_slots``. So no side holds more than ``num_slots`` blocks of the other. The slots are one of

* a sealed file of the consumer, into which the server writes;
* memory of the server, which the consumer reads with a ``Transport`` that both have;
* messages: the blocks that were found are the second frame of ``sent``.

The slots of one message follow each other, so none goes beyond the last slot. A consumer sends
``pull`` when the previous one is complete and all slots are free.

The server answers what it cannot serve with ``refused``, and knows the consumer no longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from engine.ipc.sealed_files import SealedFile
from engine.kv_transfer.stores import StoreIdentity

PROTOCOL_VERSION = 1
MAX_KEYS = 4096  # in one pull
MAX_KEY_BYTES = 128
MAX_BLOCK_BYTES = 32 << 20
MAX_SLOTS = 4096
MAX_SHARED_BYTES = 64 << 20  # of a consumer's shared memory
MAX_REQUEST_BYTES = 1 << 20  # of a message of a consumer
MAX_HEADER_BYTES = 1 << 20  # of a message of a server, without the bytes of blocks
MAX_WAIT_SECONDS = 600.0
CHUNK_BYTES = 2 << 20  # of the blocks that are read and sent together, if one is not larger
SEGMENT = "metronome-blocks"  # name of the consumer's shared memory

Key = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOTS)]


class Join(msgspec.Struct, array_like=True, frozen=True, tag="join"):
    """The first message of a consumer. ``identity``: of the blocks that it wants. ``num_slots``:
    how many blocks it can take before it frees any. ``memory``: its slots, if it has shared
    memory. ``transport``: name of its transport, "" for none."""

    version: int
    token: bytes
    identity: StoreIdentity
    num_slots: Count
    memory: SealedFile | None = None
    transport: str = ""


class Pull(msgspec.Struct, array_like=True, frozen=True, tag="pull"):
    """Send the blocks with these keys. ``wait_seconds``: how long the server may wait for blocks
    that it does not have yet."""

    number: int
    keys: Annotated[list[Key], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]
    wait_seconds: float = 0.0


class Free(msgspec.Struct, array_like=True, frozen=True, tag="free"):
    """The ``count`` slots that are taken for longest are free again."""

    count: Count


class Leave(msgspec.Struct, array_like=True, frozen=True, tag="leave"):
    """The consumer will send nothing more."""


class LentSlots(NamedTuple):
    """Slots in memory of the server. ``session``: the process, as its transport names it."""

    session: str
    address: int


class Joined(msgspec.Struct, array_like=True, frozen=True, tag="joined"):
    """``num_slots``: how many slots are used, at most those that were offered. ``shares_memory``:
    whether the server writes into the consumer's shared memory. ``lent``: slots that the consumer
    reads with its transport."""

    num_slots: Count
    shares_memory: bool
    lent: LentSlots | None = None


class Sent(msgspec.Struct, array_like=True, frozen=True, tag="sent"):
    """Blocks of pull ``number``, from its key ``first`` on. ``found``: which of them follow, or
    are in their slots. ``sums``: the checksums of these."""

    number: int
    first: int
    found: Annotated[list[bool], msgspec.Meta(min_length=1, max_length=MAX_SLOTS)]
    sums: Annotated[list[int], msgspec.Meta(max_length=MAX_SLOTS)]


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """The last message of a server to this consumer, which was not served."""

    reason: str


FromConsumer = Join | Pull | Free | Leave
FromServer = Joined | Sent | Refused


class Pace(NamedTuple):
    """How long a transfer may take: ``grace_seconds``, and a second for each
    ``min_bytes_per_second``."""

    grace_seconds: float = 2.0
    min_bytes_per_second: float = 20e6

    def seconds(self, num_bytes: int) -> float:
        return self.grace_seconds + num_bytes / self.min_bytes_per_second


def num_slots_of(block_bytes: int, window_bytes: int) -> int:
    """Number of slots in a window of this size; at least two, so that one block can be written
    while the other is read."""
    return min(max(min(window_bytes, MAX_SHARED_BYTES) // block_bytes, 2), MAX_SLOTS)


def chunk_blocks(block_bytes: int) -> int:
    """Number of blocks that are sent together."""
    return min(max(CHUNK_BYTES // block_bytes, 1), MAX_SLOTS)


def checksums(rows: NDArray[np.uint8], which: Sequence[bool]) -> list[int]:
    """Checksums of the chosen rows."""
    return [xxhash.xxh3_64_intdigest(row.data) for row, one in zip(rows, which, strict=True) if one]

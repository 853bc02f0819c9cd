"""The blocks of one request and the state of their content."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.messages.requests import MediaItem


class Holder(Protocol):
    """What the manager reads of a request. ``row`` is its index in the scheduler's table, which
    later ones have too; ``arrival`` is a number that no other request has."""

    row: int
    arrival: int
    tokens: array[int]  # known ones
    reads_cache: bool
    cache_salt: str | None

    @property
    def request_id(self) -> str: ...

    @property
    def adapter(self) -> str | None: ...

    @property
    def media(self) -> Sequence[MediaItem]: ...

    @property
    def num_computed(self) -> int: ...


@dataclass(slots=True)
class PrefixHit:
    """The longest cached beginning of a sequence: ``num_tokens`` of it in ``tables``, one a group.

    ``num_remote`` tokens behind it can be had from elsewhere; if ``asynchronous``, by waiting.
    """

    num_tokens: int
    tables: list[list[int]]
    num_remote: int = 0
    asynchronous: bool = False

    @property
    def blocks(self) -> list[int]:
        """The blocks in the first group."""
        return self.tables[0]


@dataclass(slots=True)
class RequestBlocks:
    """The blocks of one request and what is known of their content.

    There is one table for each group, and all have as many entries.
    """

    tables: list[list[int]]
    arrival: int  # its request: the row may have been reused since
    chain: list[bytes] = field(default_factory=list)  # hash of each full block of known tokens
    num_adopted: int = 0  # leading entries that came from the cache
    num_ready: int = 0  # leading tokens whose KV was there when the blocks were got
    num_remote: int = 0  # tokens behind the adopted ones that a transfer fills, or has filled
    num_told: int = 0  # leading entries that the worker knows
    loading: bool = False  # a transfer writes into the blocks, or waits to begin
    load_error: str = ""  # error of the source, which did not start the load; it is kept
    hit: PrefixHit | None = None  # remembered answer of lookup
    hit_known: int = -1  # tokens known when it was found
    hit_version: int = -1  # of the cache at that time
    hit_losses: int = -1

    @property
    def blocks(self) -> list[int]:
        """The table of the first group."""
        return self.tables[0]

    def clear(self) -> None:
        """The blocks were given back; hashes of known tokens stay valid."""
        self.tables = [[] for _ in self.tables]
        self.num_adopted = self.num_ready = self.num_remote = self.num_told = 0
        self.loading = False
        self.hit = None

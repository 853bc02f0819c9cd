"""The texts of a model's tokens, as a checker reads them."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from engine.messages.step import Column

Flags = np.ndarray[Any, np.dtype[np.bool_]]  # one for each token
SPACES = b" \t\r\n"
SPECIAL = b"\xff"
"""What the bytes of a token that no text spells begin with: no text has this byte."""


class Stops:
    """Bytes at which a checker looks closely; it passes over all others where it stands."""

    def __init__(self, stops: Iterable[int]) -> None:
        self.bytes = frozenset(stops)
        self._pattern = re.compile(
            b"[" + b"".join(re.escape(bytes([byte])) for byte in self.bytes) + b"]"
        )

    def next(self, text: bytes, at: int) -> int:
        """Where the next of them stands; the length if none does."""
        found = self._pattern.search(text, at)
        return len(text) if found is None else found.start()


class Vocabulary:
    """All tokens by number."""

    def __init__(self, texts: list[bytes]) -> None:
        """texts: the bytes that each token spells."""
        self._texts = texts
        tokens = sorted(range(len(texts)), key=texts.__getitem__)
        self.tokens: Column = np.array(tokens, dtype=np.int32)
        """All of them in the order of their bytes; a token's place there is its rank."""
        self.in_order = [texts[token] for token in tokens]
        self.ranks = np.empty_like(self.tokens)
        self.ranks[self.tokens] = np.arange(len(texts), dtype=np.int32)
        self._having: dict[frozenset[int], Flags] = {}
        self._not_spaces: Flags | None = None
        self.space_tails = np.array([len(text.rstrip(SPACES)) for text in self.in_order])
        """By rank, from where on there are only spaces."""
        self._last_stops: dict[frozenset[int], Column] = {}

    def text(self, token: int) -> bytes:
        return self._texts[token]

    def spelling(self, text: bytes) -> int | None:
        """A token that is this text."""
        at = bisect_left(self.in_order, text)
        is_there = at < len(self.in_order) and self.in_order[at] == text
        return int(self.tokens[at]) if is_there else None

    def having(self, stops: Stops) -> Flags:
        """By token, whether it has one of these bytes."""
        if stops.bytes not in self._having:
            found = self.last_stops(stops) >= 0
            self._having[stops.bytes] = found[self.ranks]
        return self._having[stops.bytes]

    @property
    def not_spaces(self) -> Flags:
        """By token, whether it has anything but spaces."""
        if self._not_spaces is None:
            self._not_spaces = (self.space_tails > 0)[self.ranks]
        return self._not_spaces

    def last_stops(self, stops: Stops) -> Column:
        """By rank, where the last of these bytes stands; -1 where none does."""
        if stops.bytes not in self._last_stops:
            flat = np.frombuffer(b"".join(text + b"\0" for text in self.in_order), np.uint8)
            ends = np.cumsum([len(text) + 1 for text in self.in_order])
            starts = np.concatenate([[0], ends[:-1]])
            is_stop = np.zeros(256, bool)
            is_stop[[*stops.bytes]] = True
            places = np.arange(len(flat)) - np.repeat(starts, ends - starts)
            places[~is_stop[flat]] = -1
            places[ends - 1] = -1  # of the zeros between
            self._last_stops[stops.bytes] = np.maximum.reduceat(places, starts)
        return self._last_stops[stops.bytes]


def vocabulary_of(
    spelled: Callable[[int], bytes], is_special: Callable[[int], bool], size: int
) -> Vocabulary:
    """spelled: the bytes of a token; is_special: whether no text spells it."""
    return Vocabulary(
        [(SPECIAL if is_special(token) else b"") + spelled(token) for token in range(size)]
    )

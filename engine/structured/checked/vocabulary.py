"""The bytes of a model's tokens, indexed for finding the tokens that a checker forbids."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from engine.messages.step import Column
from engine.structured.checked.exact import HUGE

SPACES = b" \t\r\n"
MOST_KEPT = 256  # cached lists of candidates
MOST_CANDIDATES = 16_384  # in a cached list
_ODD = re.compile(HUGE.pattern + rb"|\\u")  # or an escape that may be half a surrogate pair
SPECIAL = b"\xff"
"""Prefix of the bytes of special tokens: no text has this byte."""


class Stops:
    """A set of bytes that a checker must look at, while it skips all other bytes."""

    def __init__(self, stops: Iterable[int]) -> None:
        self.bytes = frozenset(stops)
        self._pattern = re.compile(
            b"[" + b"".join(re.escape(bytes([byte])) for byte in self.bytes) + b"]"
        )

    def next(self, text: bytes, at: int) -> int:
        """Return the index of the first byte of this set from ``at`` on; ``len(text)`` if none."""
        found = self._pattern.search(text, at)
        return len(text) if found is None else found.start()


class Skipped(NamedTuple):
    """Conditions under which a checker skips a token without checking it."""

    stops: Stops | None
    """Tokens without any of these bytes are skipped."""
    only: bytes
    """Tokens of only these bytes are skipped."""
    least_quotes: int
    """Tokens with fewer quotation marks are skipped, unless they may be invalid in any JSON."""


class Vocabulary:
    """The bytes of all tokens of a model."""

    def __init__(self, texts: list[bytes]) -> None:
        """texts: the bytes of each token."""
        self._texts = texts
        tokens = sorted(range(len(texts)), key=texts.__getitem__)
        self.tokens: Column = np.array(tokens, dtype=np.int32)
        """All token ids, sorted by their bytes; the rank of a token is its index here."""
        self.in_order = [texts[token] for token in tokens]
        self.ranks = np.empty_like(self.tokens)
        self.ranks[self.tokens] = np.arange(len(texts), dtype=np.int32)
        self.num_quotes: Column = np.array([text.count(b'"') for text in self.in_order])
        """The number of quotation marks, by rank."""
        self.is_odd = np.array([_ODD.search(text) is not None for text in self.in_order], np.bool_)
        """Whether a token may be invalid in any JSON, by rank."""
        self._candidates: dict[tuple[bytes, tuple[int, ...], Skipped], Column] = {}
        self._tails: dict[bytes, Column] = {}
        self._last_stops: dict[frozenset[int], Column] = {}

    def text(self, token: int) -> bytes:
        return self._texts[token]

    def spelling(self, text: bytes) -> int | None:
        """Return the id of the token with exactly these bytes; ``None`` if there is none."""
        at = bisect_left(self.in_order, text)
        is_there = at < len(self.in_order) and self.in_order[at] == text
        return int(self.tokens[at]) if is_there else None

    def candidates(self, words: Column, without: Sequence[int], skipped: Skipped) -> list[int]:
        """Return the tokens in a mask that a checker cannot skip, as indices in the sorted
        vocabulary.

        words: the mask, one bit per token; without: token ids to leave out."""
        key = (words.tobytes(), tuple(without), skipped)
        found = self._candidates.get(key)
        if found is None:
            found = self._sought(words, without, skipped)
            if len(found) <= MOST_CANDIDATES:
                if len(self._candidates) >= MOST_KEPT:
                    del self._candidates[next(iter(self._candidates))]
                self._candidates[key] = found
        ranks: list[int] = found.tolist()
        return ranks

    def _sought(self, words: Column, without: Sequence[int], skipped: Skipped) -> Column:
        # As booleans, because numpy finds the set ones in a tenth of the time.
        is_allowed = np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_)
        is_allowed[[*without]] = False
        ranks: Column = np.sort(self.ranks[is_allowed[: len(self.ranks)].nonzero()[0]])
        if skipped.least_quotes:
            has_quotes = self.num_quotes[ranks] >= skipped.least_quotes
            ranks = ranks[has_quotes | self.is_odd[ranks]]
        if skipped.stops is not None:
            return ranks[self.last_stops(skipped.stops)[ranks] >= 0]
        return ranks[self.tails(skipped.only)[ranks] > 0] if skipped.only else ranks

    def tails(self, skipped: bytes) -> Column:
        """Return the number of bytes of each token before the ``skipped`` bytes at its end, for all
        tokens in sorted order."""
        if skipped not in self._tails:
            self._tails[skipped] = np.array([len(text.rstrip(skipped)) for text in self.in_order])
        return self._tails[skipped]

    def last_stops(self, stops: Stops) -> Column:
        """Return for each token, in sorted order, the index of its last stop byte; -1: none."""
        if stops.bytes not in self._last_stops:
            flat = np.frombuffer(b"".join(text + b"\0" for text in self.in_order), np.uint8)
            ends = np.cumsum([len(text) + 1 for text in self.in_order])
            starts = np.concatenate([[0], ends[:-1]])
            is_stop = np.zeros(256, bool)
            is_stop[[*stops.bytes]] = True
            places = np.arange(len(flat)) - np.repeat(starts, ends - starts)
            places[~is_stop[flat]] = -1
            places[ends - 1] = -1  # the separating zeros
            self._last_stops[stops.bytes] = np.maximum.reduceat(places, starts)
        return self._last_stops[stops.bytes]


def vocabulary_of(
    spelled: Callable[[int], bytes], is_special: Callable[[int], bool], size: int
) -> Vocabulary:
    """Make the vocabulary of ``size`` tokens. spelled: returns the bytes of a token; is_special:
    returns whether a token is special, so that no text contains it."""
    return Vocabulary(
        [(SPECIAL if is_special(token) else b"") + spelled(token) for token in range(size)]
    )

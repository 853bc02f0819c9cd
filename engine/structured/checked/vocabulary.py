"""The texts of a model's tokens, as a checker reads them."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from engine.messages.step import Column
from engine.structured.checked.exact import HUGE

SPACES = b" \t\r\n"
MOST_KEPT = 256  # lists of candidates
MOST_CANDIDATES = 16_384  # in a list that is kept
_ODD = re.compile(HUGE.pattern + rb"|\\u")  # or an escape that may be half a character
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


class Skipped(NamedTuple):
    """The tokens that a checker passes over where it stands."""

    stops: Stops | None
    """Tokens without any of these bytes."""
    only: bytes
    """Tokens of such bytes alone."""
    least_quotes: int
    """Tokens with fewer quotation marks than this, unless a checker may refuse them in any JSON."""


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
        self.num_quotes: Column = np.array([text.count(b'"') for text in self.in_order])
        """By rank, the quotation marks in it."""
        self.is_odd = np.array([_ODD.search(text) is not None for text in self.in_order], np.bool_)
        """By rank, whether it may be wrong in any JSON."""
        self._candidates: dict[tuple[bytes, tuple[int, ...], Skipped], Column] = {}
        self._tails: dict[bytes, Column] = {}
        self._last_stops: dict[frozenset[int], Column] = {}

    def text(self, token: int) -> bytes:
        return self._texts[token]

    def spelling(self, text: bytes) -> int | None:
        """A token that is this text."""
        at = bisect_left(self.in_order, text)
        is_there = at < len(self.in_order) and self.in_order[at] == text
        return int(self.tokens[at]) if is_there else None

    def candidates(self, words: Column, without: Sequence[int], skipped: Skipped) -> list[int]:
        """The ranks of the tokens of a mask that a checker has to look at, in order.

        words: the mask, a bit for each token; without: tokens to leave out, with those that are
        skipped. The same masks come again and again, so lists that are not long are kept.
        """
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
        # As booleans, of which the library finds those that are set in a tenth of the time.
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
        """By rank, from where on there are only these bytes."""
        if skipped not in self._tails:
            self._tails[skipped] = np.array([len(text.rstrip(skipped)) for text in self.in_order])
        return self._tails[skipped]

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

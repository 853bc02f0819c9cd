"""Finds the tokens that a checker forbids, without a look at each of many."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from engine.messages.step import Column
from engine.structured.checked.vocabulary import Skipped, Stops, Vocabulary


class Following(Protocol):
    """How far a checker has followed a text."""

    why: str

    @property
    def stops(self) -> Stops | None:
        """The bytes without which any text may follow; ``None`` if each is looked at."""

    @property
    def skips(self) -> bytes:
        """The bytes that change nothing about what may follow."""

    @property
    def least_quotes(self) -> int:
        """The quotation marks that a text has at least which may not follow."""

    @property
    def pressing(self) -> list[bytes]:
        """Texts after which a string may not end, where a grammar may not let it go on."""

    @property
    def may_end(self) -> bool:
        """Whether the text may be whole."""

    def copy(self) -> Following:
        """Another that stands there."""

    def feed(self, data: bytes) -> bool:
        """Go on by these bytes. ``False`` if no right text begins so; ``why`` then says why."""


class Narrowing:
    """The tokens that a grammar allows somewhere, as a tree of their bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._forbidden: list[int] = []
        self.why = ""

    def forbidden(self, words: Column, without: Sequence[int], state: Following) -> Column:
        """The tokens that a mask allows and the checker forbids where it stands; ``why`` is the
        reason of one. without: tokens that are not looked at."""
        skipped = Skipped(state.stops, state.skips, state.least_quotes)
        ranks = self._vocabulary.candidates(words, without, skipped)
        self._look(ranks, 0, state)
        found: Column = self._vocabulary.tokens[self._forbidden]
        return found

    def _look(self, ranks: list[int], depth: int, state: Following) -> None:
        """Look at tokens whose first bytes, which are the same, were fed. They are in order."""
        stops, texts = state.stops, self._vocabulary.in_order
        at = 0
        while at < len(ranks):
            rank = ranks[at]
            text = texts[rank]
            if len(text) == depth:
                at += 1
                continue
            end = depth if stops is None else stops.next(text, depth)
            beginning = text[: end + 1]
            after = at + 1
            if after < len(ranks) and texts[ranks[after]].startswith(beginning):
                above = bisect_left(texts, _above(beginning), rank)
                after = bisect_left(ranks, above, after)
            further = state.copy()
            # What no other token begins with is read in one go.
            if not further.feed(beginning[depth:] if after > at + 1 else text[depth:]):
                self.why = further.why
                self._forbidden += ranks[at:after]
            elif after > at + 1:
                depth_there = len(beginning)
                self._look(self._left(ranks[at:after], depth_there, further), depth_there, further)
            at = after

    def _left(self, ranks: list[int], depth: int, state: Following) -> list[int]:
        """The tokens among these that say more after their first bytes than what is passed over."""
        if state.stops is not None:
            last_stops = self._vocabulary.last_stops(state.stops).data
            return [rank for rank in ranks if last_stops[rank] >= depth]
        if state.skips:
            tails = self._vocabulary.tails(state.skips).data
            return [rank for rank in ranks if tails[rank] > depth]
        return ranks


def _above(beginning: bytes) -> bytes:
    """A text after all that begin so, and before all others that come after them."""
    byte = beginning[-1]
    return beginning[:-1] + bytes([byte + 1]) if byte < 0xFF else beginning + b"\xff" * 64

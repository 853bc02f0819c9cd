"""Finds the tokens in a mask that a checker forbids, without looking at most of the others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from engine.messages.step import Column
from engine.structured.checked.vocabulary import Skipped, Stops, Vocabulary


class Following(Protocol):
    """The state of a JSON checker after some text, with which further bytes are checked."""

    why: str

    @property
    def stops(self) -> Stops | None:
        """The only bytes that the checker may refuse at this position; ``None`` for all bytes."""

    @property
    def skips(self) -> bytes:
        """Bytes, such as spaces, that are allowed here and do not change what may follow."""

    @property
    def least_quotes(self) -> int:
        """Any text with fewer quotation marks than this may follow, if it is valid JSON."""

    @property
    def pressing(self) -> list[bytes]:
        """Texts that would make the current string equal to one that must not be repeated. Each is
        a dead end unless the grammar allows a longer string; the caller must check this."""

    @property
    def may_end(self) -> bool:
        """Whether the text may end here."""

    def copy(self) -> Following:
        """Return an independent copy."""

    def feed(self, data: bytes) -> bool:
        """Check more bytes. Returns False, and sets ``why``, if the text so far is invalid."""


class Narrowing:
    """Finds tokens in a mask that a checker forbids, by walking the tree of the tokens' bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._forbidden: list[int] = []
        self.why = ""

    def forbidden(self, words: Column, without: Sequence[int], state: Following) -> Column:
        """Return the ids of tokens that the mask ``words`` allows and the checker forbids, and set
        ``why`` to the reason for one of them. without: token ids to leave out."""
        skipped = Skipped(state.stops, state.skips, state.least_quotes)
        ranks = self._vocabulary.candidates(words, without, skipped)
        self._look(ranks, 0, state)
        found: Column = self._vocabulary.tokens[self._forbidden]
        return found

    def _look(self, ranks: list[int], depth: int, state: Following) -> None:
        """Check tokens and collect the forbidden ones. ranks: indices of the tokens, sorted by
        bytes. Their first ``depth`` bytes are equal, and ``state`` is the checker's state after
        these bytes."""
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
            # The rest of a token is fed in one call if no other token shares its start.
            if not further.feed(beginning[depth:] if after > at + 1 else text[depth:]):
                self.why = further.why
                self._forbidden += ranks[at:after]
            elif after > at + 1:
                depth_there = len(beginning)
                self._look(self._left(ranks[at:after], depth_there, further), depth_there, further)
            at = after

    def _left(self, ranks: list[int], depth: int, state: Following) -> list[int]:
        """Return the ranks of the tokens whose bytes from ``depth`` on must be checked."""
        if state.stops is not None:
            last_stops = self._vocabulary.last_stops(state.stops).data
            return [rank for rank in ranks if last_stops[rank] >= depth]
        if state.skips:
            tails = self._vocabulary.tails(state.skips).data
            return [rank for rank in ranks if tails[rank] > depth]
        return ranks


def _above(beginning: bytes) -> bytes:
    """Return a text that sorts right after all texts that begin with ``beginning``."""
    byte = beginning[-1]
    return beginning[:-1] + bytes([byte + 1]) if byte < 0xFF else beginning + b"\xff" * 64

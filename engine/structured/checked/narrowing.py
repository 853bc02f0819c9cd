"""Finds the tokens that a checker forbids, without a look at each of many."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Protocol

import numpy as np

from engine.messages.step import Column
from engine.structured.checked.vocabulary import Flags, Stops, Vocabulary

Ranks = np.ndarray[Any, np.dtype[np.integer[Any]]]  # of tokens in the order of their bytes


class Following(Protocol):
    """How far a checker has followed a text."""

    why: str

    @property
    def stops(self) -> Stops | None:
        """The bytes without which any text may follow; ``None`` if each is looked at."""

    @property
    def skips_spaces(self) -> bool:
        """Whether spaces change nothing."""

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

    def __init__(self, vocabulary: Vocabulary, is_allowed: Flags) -> None:
        """is_allowed: by token, at least as many as the vocabulary has."""
        self._vocabulary = vocabulary
        self._is_allowed = is_allowed
        self._forbidden: list[Ranks] = []
        self.why = ""

    def forbidden(self, state: Following) -> Column:
        """The tokens that the checker forbids where it stands; ``why`` is the reason of one."""
        stops, vocabulary = state.stops, self._vocabulary
        is_allowed = self._is_allowed[: len(vocabulary.in_order)]
        if stops is not None:
            is_allowed = is_allowed & vocabulary.having(stops)
        elif state.skips_spaces:
            is_allowed = is_allowed & vocabulary.not_spaces
        ranks = np.sort(vocabulary.ranks[is_allowed.nonzero()[0]])
        self._look(ranks, 0, state)
        forbidden = [*self._forbidden, np.zeros(0, np.int64)]
        found: Column = self._vocabulary.tokens[np.concatenate(forbidden)]
        return found

    def _look(self, ranks: Ranks, depth: int, state: Following) -> None:
        """Look at tokens whose first bytes, which are the same, were fed. They are in order."""
        stops, texts = state.stops, self._vocabulary.in_order
        if stops is not None:
            ranks = ranks[self._vocabulary.last_stops(stops)[ranks] >= depth]
        elif state.skips_spaces:
            ranks = ranks[self._vocabulary.space_tails[ranks] > depth]
        at, listed = 0, ranks.tolist()
        while at < len(listed):
            rank = listed[at]
            text = texts[rank]
            if len(text) == depth:
                at += 1
                continue
            end = depth if stops is None else stops.next(text, depth)
            beginning = text[: end + 1]
            after = at + 1
            if after < len(listed) and texts[listed[after]].startswith(beginning):
                above = bisect_left(texts, _above(beginning), rank)
                after = bisect_left(listed, above, after)
            further = state.copy()
            if not further.feed(beginning[depth:]):
                self.why = further.why
                self._forbidden.append(ranks[at:after])
            elif after > at + 1 or len(beginning) < len(text):
                self._look(ranks[at:after], len(beginning), further)
            at = after


def _above(beginning: bytes) -> bytes:
    """A text after all that begin so, and before all others that come after them."""
    byte = beginning[-1]
    return beginning[:-1] + bytes([byte + 1]) if byte < 0xFF else beginning + b"\xff" * 64

"""The texts of a model's tokens, as a checker reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from engine.messages.step import Column

SPECIAL = b"\xff"
"""What the bytes of a token that no text spells begin with: no text has this byte."""


class Stops:
    """Bytes at which a checker looks closely; it passes over all others where it stands."""

    def __init__(self, stops: Iterable[int]) -> None:
        self.bytes = frozenset(stops)
        self._pattern = re.compile(b"[" + b"".join(re.escape(bytes([b])) for b in stops) + b"]")

    def next(self, text: bytes, at: int) -> int:
        """Where the next of them stands; the length if none does."""
        found = self._pattern.search(text, at)
        return len(text) if found is None else found.start()


class Vocabulary:
    """All tokens by number."""

    def __init__(self, texts: list[bytes]) -> None:
        """texts: the bytes that each token spells."""
        self.texts = texts
        order = sorted(range(len(texts)), key=texts.__getitem__)
        self._rank: Column = np.empty(len(texts), dtype=np.int32)
        self._rank[order] = np.arange(len(texts), dtype=np.int32)
        self._having: dict[frozenset[int], Column] = {}

    def text(self, token: int) -> bytes:
        return self.texts[token]

    def in_order(self, tokens: Column, stops: Stops | None) -> Iterator[int]:
        """These tokens in the order of their bytes. stops: those alone that have one of them."""
        tokens = tokens[tokens < len(self.texts)]
        if stops is not None:
            tokens = tokens[self._that_have(stops)[tokens]]
        yield from tokens[np.argsort(self._rank[tokens])].tolist()

    def _that_have(self, stops: Stops) -> Column:
        if stops.bytes not in self._having:
            self._having[stops.bytes] = np.array(
                [stops.next(text, 0) < len(text) for text in self.texts]
            )
        return self._having[stops.bytes]


def vocabulary_of(
    spelled: Callable[[int], bytes], is_special: Callable[[int], bool], size: int
) -> Vocabulary:
    """spelled: the bytes of a token; is_special: whether no text spells it."""
    return Vocabulary(
        [(SPECIAL if is_special(token) else b"") + spelled(token) for token in range(size)]
    )

"""The texts of a model's tokens, as a checker reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np

from engine.messages.step import Column

_SPECIAL = re.compile(rb'["\\\x00-\x1f]')


class Vocabulary:
    """All tokens by number."""

    def __init__(self, texts: list[bytes]) -> None:
        """texts: the bytes that each token spells; none for one that no text spells."""
        self.texts = texts
        order = sorted(range(len(texts)), key=texts.__getitem__)
        self._rank: Column = np.empty(len(texts), dtype=np.int32)
        self._rank[order] = np.arange(len(texts), dtype=np.int32)
        self._is_special = np.array([_SPECIAL.search(text) is not None for text in texts])

    def text(self, token: int) -> bytes:
        return self.texts[token]

    def in_order(self, tokens: Column, *, only_special: bool) -> Iterator[int]:
        """These tokens in the order of their bytes. only_special: those alone that may end a
        string, escape a character or break one."""
        tokens = tokens[tokens < len(self.texts)]
        if only_special:
            tokens = tokens[self._is_special[tokens]]
        yield from tokens[np.argsort(self._rank[tokens])].tolist()


def vocabulary_of(spelled: Callable[[int], bytes], size: int) -> Vocabulary:
    """spelled: the bytes of a token."""
    return Vocabulary([spelled(token) for token in range(size)])


def special_at(text: bytes, at: int) -> int:
    """Where the next character stands that may end a string or escape one; the length if none."""
    found = _SPECIAL.search(text, at)
    return len(text) if found is None else found.start()

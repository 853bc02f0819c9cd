"""Lists all texts that a pattern matches, if they are few."""

from __future__ import annotations

import re
from itertools import product

MOST_TEXTS = 256
_DIGITS = "0123456789"
_COUNTS = re.compile(r"\{(\d{1,2})(?:,(\d{1,2}))?\}|\?")
_PLAIN = re.compile(r"[^\\^$.|?*+()\[\]{}]|\\[-^$.|?*+()\[\]{}/\\]")
_MEMBER = r"(?:[^\]\\]|\\[^A-Za-z0-9])"
_RANGE = re.compile(rf"({_MEMBER})-({_MEMBER})|\\d|{_MEMBER}")


class ManyError(Exception):
    """The pattern matches too many texts, or is not supported."""


def few_texts(pattern: str) -> list[str] | None:
    """List all texts that an anchored pattern matches; ``None`` if there are many."""
    if not pattern.startswith("^") or not pattern.endswith("$") or pattern.endswith("\\$"):
        return None
    try:
        reader = _FewReader(pattern[1:-1])
        found = reader.ways(is_outermost=True)
    except ManyError:
        return None
    return found if reader.is_done else None


class _FewReader:
    """Parses a pattern, and lists the texts that it matches."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    @property
    def is_done(self) -> bool:
        return self._at == len(self._text)

    def ways(self, *, is_outermost: bool = False) -> list[str]:
        """Parse alternatives and list all texts that they match. Raises ``ManyError`` if they are
        many, or for a ``|`` outside all groups, which would separate the pattern's anchors."""
        found = self._sequence()
        while self._takes("|"):
            if is_outermost:
                raise ManyError
            found = _few([*found, *self._sequence()])
        return found

    def _sequence(self) -> list[str]:
        found = [""]
        while not self.is_done and self._text[self._at] not in "|)":
            part = self._repeated(self._atom())
            if len(found) * len(part) > MOST_TEXTS:
                raise ManyError
            found = [one + other for one in found for other in part]
        return found

    def _repeated(self, part: list[str]) -> list[str]:
        match = _COUNTS.match(self._text, self._at)
        if match is None:
            if self._text[self._at : self._at + 1] in ("*", "+", "{"):
                raise ManyError
            return part
        self._at = match.end()
        low, high = (0, 1) if match[1] is None else (int(match[1]), int(match[2] or match[1]))
        if len(part) ** high > MOST_TEXTS:
            raise ManyError
        return _few(["".join(e) for n in range(low, high + 1) for e in product(part, repeat=n)])

    def _atom(self) -> list[str]:
        if self._takes("(?:") or self._takes("("):
            if self._text.startswith("?", self._at):
                raise ManyError
            found = self.ways()
            if not self._takes(")"):
                raise ManyError
            return found
        if self._takes("["):
            return self._members()
        if self._takes("\\d"):
            return [*_DIGITS]
        match = _PLAIN.match(self._text, self._at)
        if match is None:
            raise ManyError
        self._at = match.end()
        return [match[0][-1]]

    def _members(self) -> list[str]:
        found: list[str] = []
        if self._takes("^"):
            raise ManyError
        while not self._takes("]"):
            match = _RANGE.match(self._text, self._at)
            if match is None:
                raise ManyError
            self._at = match.end()
            if match[0] == "\\d":
                found += _DIGITS
            elif match[1] is None:
                found.append(match[0][-1])
            else:
                found += map(chr, range(ord(match[1][-1]), ord(match[2][-1]) + 1))
            _few(found)
        return found

    def _takes(self, sign: str) -> bool:
        if not self._text.startswith(sign, self._at):
            return False
        self._at += len(sign)
        return True


def _few(texts: list[str]) -> list[str]:
    if len(texts) > MOST_TEXTS:
        raise ManyError
    return [*dict.fromkeys(texts)]

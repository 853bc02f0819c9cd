"""Streamed text for parsers that are generators.

A parser yields events, and ``None`` where it needs more text. The parser may set ``mark`` to a
position to which it can go back later; the text from there on is kept.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

from engine.server.speech.events import Event, PartEnd

Result = TypeVar("Result")
Steps = Generator[Event | PartEnd | None, None, Result]
"""A parser that yields events, and ``None`` where it needs more text."""
Waits = Generator[None, None, Result]
"""A parser that yields no events, and ``None`` where it needs more text."""

SPACE = re.compile(r"\s*")
MAX_LOOK = 256  # characters of white space to look beyond
END = "\0end"
"""The result of ``follows`` at the end of the answer."""


class TextSource:
    """The streamed text of one answer, parsed up to the position ``at``."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.mark: int | None = None
        """The position to rewind to; ``None``: none is set."""
        self.is_ended = False
        self.is_cut = False
        """Whether the answer ended before the model finished it."""

    def feed(self, text: str) -> None:
        if self.mark is None:
            self.text, self.at = self.text[self.at :] + text, 0
        else:
            self.text += text

    def end(self, *, is_cut: bool) -> None:
        self.is_ended, self.is_cut = True, is_cut

    def hold(self) -> None:
        self.mark = self.at

    def give_back(self) -> int:
        """Go back to ``mark`` and remove it. Returns the number of characters gone back."""
        assert self.mark is not None
        num = self.at - self.mark
        self.at, self.mark = self.mark, None
        return num

    def take(self, end: int) -> str:
        """Return the text from the position up to ``end``, and set the position to ``end``."""
        text, self.at = self.text[self.at : end], end
        return text

    def peek(self) -> Waits[str]:
        """Return the next character; "" at the end of the answer."""
        while self.at >= len(self.text):
            if self.is_ended:
                return ""
            yield None
        return self.text[self.at]

    def skip_space(self) -> Waits[str]:
        """Skip white space and return the character after it; "" at the end of the answer."""
        while True:
            match = SPACE.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if self.is_ended:
                return ""
            yield None

    def accept(self, *literals: str) -> Waits[str]:
        """Skip the first of the ``literals`` that comes next and return it; "" if none does."""
        found = yield from self.standing(0, literals)
        self.at += len(found)
        return found

    def match(self, pattern: re.Pattern[str]) -> Waits[re.Match[str] | None]:
        """Match ``pattern`` at the position and move to the match's end; ``None`` if there is no
        match. The pattern must match not only complete texts but also each of their beginnings."""
        yield from self.peek()
        while True:
            match = pattern.match(self.text, self.at)
            if match is None or match.end() < len(self.text) or self.is_ended:
                break
            yield None
        if match is not None:
            self.at = match.end()
        return match

    def standing(self, offset: int, literals: Iterable[str]) -> Waits[str]:
        """Return the first of ``literals`` that the text has at the position + ``offset``; "" if it
        has none there."""
        while True:
            rest = None
            for literal in literals:
                if self.text.startswith(literal, self.at + offset):
                    return literal
                rest = self.text[self.at + offset :] if rest is None else rest
            if self.is_ended or not any(each.startswith(rest or "") for each in literals):
                return ""
            yield None

    def look(self, offset: int) -> Waits[tuple[str, int]]:
        """Return the first character that is not white space from ``offset`` on, and its offset.
        The character is "" at the end of the answer, or after ``MAX_LOOK`` characters."""
        while True:
            match = SPACE.match(self.text, self.at + offset)
            assert match is not None
            offset = match.end() - self.at
            if match.end() < len(self.text):
                return self.text[match.end()], offset
            if self.is_ended or offset > MAX_LOOK:
                return "", offset
            yield None

    def follows(self, offset: int, literals: Iterable[str]) -> Waits[str]:
        """Return the first of ``literals`` that comes after white space at ``offset``; "" if none
        does, ``END`` if the answer ends first."""
        char, offset = yield from self.look(offset)
        if not char:
            return END
        return (yield from self.standing(offset, literals))


class Literals:
    """Searches streamed text for several literals together."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted({*texts} - {""}, key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._longest = max(map(len, self.texts), default=1)

    def search(self, source: TextSource) -> re.Match[str] | None:
        """Find the next literal, the longest one if several begin at the same place. ``None`` if
        there is none, or if more text is needed to decide."""
        match = self._pattern.search(source.text, source.at)
        if match is None or source.is_ended:
            return match
        left = len(source.text) - match.start()
        if len(match[0]) <= left < self._longest:
            tail = source.text[match.start() :]
            if any(len(text) > left and text.startswith(tail) for text in self.texts):
                return None
        return match

    def safe_end(self, source: TextSource) -> int:
        """The position before which no literal can begin. Call it after ``search`` found none."""
        end = len(source.text)
        if source.is_ended:
            return end
        for begin in range(max(source.at, end - self._longest + 1), end):
            tail = source.text[begin:]
            if any(text.startswith(tail) for text in self.texts):
                return begin
        return end

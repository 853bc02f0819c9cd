"""Text that comes in pieces, for readers that are generators.

A reader yields events, and ``None`` where it cannot go on before more text has come. What it may
yet have to give back lies after ``mark``: the text from there on is kept.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

from engine.server.speech.events import Event, PartEnd

Result = TypeVar("Result")
Steps = Generator[Event | PartEnd | None, None, Result]
"""What a reader yields; ``None``: it waits for more text."""
Waits = Generator[None, None, Result]

SPACE = re.compile(r"\s*")
MAX_LOOK = 256  # characters of white space after which nothing more is expected
END = "\0end"
"""What ``follows`` returns where the answer has ended."""


class TextSource:
    """The text of one answer, and how far it was read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.mark: int | None = None
        """Where what is held begins; ``None``: nothing is."""
        self.is_ended = False
        self.is_cut = False
        """Whether the answer has ended before the model meant it to."""

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
        """What is held is to be read again; returns how many characters that are."""
        assert self.mark is not None
        num = self.at - self.mark
        self.at, self.mark = self.mark, None
        return num

    def take(self, end: int) -> str:
        """The text up to here, which is read now."""
        text, self.at = self.text[self.at : end], end
        return text

    def peek(self) -> Waits[str]:
        """The next character; none at the end."""
        while self.at >= len(self.text):
            if self.is_ended:
                return ""
            yield None
        return self.text[self.at]

    def skip_space(self) -> Waits[str]:
        """Skip white space and return the character after it; none at the end."""
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
        """Read the first of these that stands here; none of them: an empty text."""
        found = yield from self.standing(0, literals)
        self.at += len(found)
        return found

    def match(self, pattern: re.Pattern[str]) -> Waits[re.Match[str] | None]:
        """Read what matches, as far as it can go on. The pattern matches one character after the
        other: what begins with a match is a match."""
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
        """The first of these that stands so far ahead; none of them: an empty text."""
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
        """The first character from there on that is not white space, and its place; none if the
        answer ends first, or if it is too far away."""
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
        """What comes next after white space: one of these, ``END``, or an empty text."""
        char, offset = yield from self.look(offset)
        if not char:
            return END
        return (yield from self.standing(offset, literals))


class Literals:
    """Texts that are looked for together."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted({*texts} - {""}, key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._longest = max(map(len, self.texts), default=1)

    def search(self, source: TextSource) -> re.Match[str] | None:
        """The next of them, the longest that stands there; ``None`` if more of it may come."""
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
        """Before which none of them begins, if none was found."""
        end = len(source.text)
        if source.is_ended:
            return end
        for begin in range(max(source.at, end - self._longest + 1), end):
            tail = source.text[begin:]
            if any(text.startswith(tail) for text in self.texts):
                return begin
        return end

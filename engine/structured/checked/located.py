"""Finds the parts of a text that are JSON, by what is written before them, and checks them.

What stands between is free here: the grammar next to this knows what it may be, and that it is
JSON what begins in such a place. Where several parts may begin, as calls of several tools, one of
their checkers must let the text pass.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from engine.structured.checked.checker import SYNTAX, Checker
from engine.structured.checked.vocabulary import SPECIAL, Stops


class PartOpening(NamedTuple):
    """What is written before a part."""

    text: bytes  # nothing: the whole text begins with the part
    checkers: tuple[Checker, ...]
    scope: bytes = b""  # what was written last of all that are scopes
    follows: bool = False  # it stands right after another part


class Layout:
    """The places of all parts of a text."""

    def __init__(self, openings: Sequence[PartOpening]) -> None:
        self._openings = openings
        self._scopes = {each.scope for each in openings if each.scope}
        self.first = [c for each in openings if not each.text for c in each.checkers]
        self.between = {each.text for each in openings if each.text and each.follows}
        texts = {each.text for each in openings if each.text and not each.follows} | self._scopes
        self.longest = max(map(len, texts), default=0)
        in_order = sorted(texts, key=len, reverse=True)
        self.pattern = re.compile(b"|".join(map(re.escape, in_order))) if texts else None
        self.longer = {
            text: [other for other in texts if other != text and other.startswith(text)]
            for text in texts
        }
        self.stops = Stops(sorted({text[-1] for text in texts} | set(SPECIAL)))

    def begin(self) -> Located:
        return Located(self)

    def is_scope(self, text: bytes) -> bool:
        return text in self._scopes

    def at(self, text: bytes, scope: bytes) -> list[Checker]:
        """Checkers of the parts that begin after this text."""
        return [
            checker
            for each in self._openings
            if each.text == text and each.scope in (b"", scope)
            for checker in each.checkers
        ]


class Located:
    """How far a text with parts has come."""

    __slots__ = ("_after", "_layout", "_longer", "_scope", "_states", "_tail", "why")

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._states = [checker.begin() for checker in layout.first]  # of parts that may stand here
        self._tail = b""  # the end of the free text
        self._after: bytes | None = None  # what is written after a part, while that says something
        self._scope = b""
        self._longer: list[tuple[bytes, int]] = []  # openings that may still come, how far they are
        self.why = ""

    def copy(self) -> Located:
        other = Located.__new__(Located)
        for name in Located.__slots__:
            setattr(other, name, getattr(self, name))
        other._states = [state.copy() for state in self._states]
        return other

    @property
    def stops(self) -> Stops | None:
        """The bytes without which any text may follow; ``None`` if each is looked at."""
        if self._longer or self._after is not None or len(self._states) > 1:
            return None
        return self._states[0].stops if self._states else self._layout.stops

    @property
    def skips(self) -> bytes:
        """The bytes that change nothing about what may follow."""
        is_sure = len(self._states) == 1 and not self._longer
        return self._states[0].skips if is_sure and not self._states[0].is_untouched else b""

    @property
    def least_quotes(self) -> int:
        """The quotation marks that a text has at least which may not follow."""
        return 0  # other parts may follow, of which more is checked

    @property
    def pressing(self) -> list[bytes]:
        """Texts after which a string may not end, where a grammar may not let it go on."""
        return self._states[0].pressing if len(self._states) == 1 else []

    @property
    def may_end(self) -> bool:
        """Whether the text may end within the JSON, if it is in some."""
        return not self._states or any(state.may_end for state in self._states)

    def feed(self, data: bytes) -> bool:
        """Go on by these bytes. ``False`` if no right text begins so; ``why`` then names the
        keyword."""
        at = 0
        while at < len(data):
            if self._longer:
                at = self._byte(data, at)
            elif self._states:
                at = self._parts(data, at)
            else:
                at = self._text(data, at)
            if at < 0:
                return False
        return True

    def _parts(self, data: bytes, at: int) -> int:
        """In parts that are JSON."""
        alive, ends, is_text, why = [], [], True, ""
        for state in self._states:
            is_new = state.is_untouched
            end = state.feed_value(data, at)
            if end < 0:
                is_text = is_text and is_new and state.why == SYNTAX
                why = state.why
            elif state.is_whole:
                ends.append(end)
            else:
                alive.append(state)
        self._states = alive
        if alive:
            return len(data)
        if ends:
            self._tail, self._after = b"", b"" if self._layout.between else None
            return max(ends)
        if is_text:
            return self._text(data, at)
        self.why = why
        return -1

    def _byte(self, data: bytes, at: int) -> int:
        """In parts, or in a longer opening of another."""
        end = self._parts(data[: at + 1], at)
        longer = [(text, done + 1) for text, done in self._longer if text[done] == data[at]]
        self._longer = [(text, done) for text, done in longer if done < len(text)]
        for text, done in longer:
            if done == len(text):
                self._open(text)
        if end < 0 and not self._longer and not self._states:
            return -1
        self.why = ""
        return at + 1

    def _text(self, data: bytes, at: int) -> int:
        """In free text, up to a part."""
        if data[at : at + 1] == SPECIAL:
            return at + 1
        end = data.find(SPECIAL, at)
        new = data[at : end if end >= 0 else len(data)]
        if self._after is not None and (num_between := self._between(new)):
            return at + num_between
        layout, text, old = self._layout, self._tail + new, len(self._tail)
        found = None if layout.pattern is None else layout.pattern.search(text)
        while found is not None and found.end() <= old:
            found = layout.pattern.search(text, found.start() + 1) if layout.pattern else None
        if found is None:
            self._tail = text[-layout.longest :] if layout.longest else b""
            return at + len(new)
        self._open(found[0])
        return at + found.end() - old

    def _open(self, text: bytes) -> None:
        self._tail = b""
        if self._layout.is_scope(text):
            self._scope = text
        self._states += [c.begin() for c in self._layout.at(text, self._scope)]
        self._longer += [(other, len(text)) for other in self._layout.longer[text]]

    def _between(self, new: bytes) -> int:
        """How many of the new bytes belong to what separates parts."""
        assert self._after is not None, "a part has ended"
        num_before, text = len(self._after), self._after + new
        for each in self._layout.between:
            if text.startswith(each):
                self._states = [c.begin() for c in self._layout.at(each, self._scope)]
                self._after = None
                return len(each) - num_before
        is_open = any(each.startswith(text) for each in self._layout.between)
        self._after = text if is_open else None
        return len(new) if is_open else 0

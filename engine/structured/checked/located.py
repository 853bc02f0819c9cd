"""Finds the JSON parts of a text and checks each against its schema.

A part begins after an opening, a fixed text such as the beginning of a tool call. The grammar
limits the text between the parts. If several schemas may apply to a part, as for calls of several
tools, the part must satisfy one of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from engine.structured.checked.checker import SYNTAX, Checker
from engine.structured.checked.vocabulary import SPECIAL, Stops


class PartOpening(NamedTuple):
    """A text after which a JSON part begins. One of ``checkers`` must accept this part."""

    text: bytes  # empty: the whole text starts with the part
    checkers: tuple[Checker, ...]
    scope: bytes = b""  # the scope that was written last before it, empty for any
    follows: bool = False  # it stands directly after another part


class Layout:
    """All openings of a grammar, indexed for finding them in a text."""

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
        """Return the checkers for JSON after the opening ``text``, in a call begun by ``scope``."""
        return [
            checker
            for each in self._openings
            if each.text == text and each.scope in (b"", scope)
            for checker in each.checkers
        ]


class Located:
    """The state of checking a text that has JSON parts; implements ``Following``."""

    __slots__ = ("_after", "_layout", "_longer", "_scope", "_states", "_tail", "why")

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._states = [checker.begin() for checker in layout.first]  # of the possible parts here
        self._tail = b""  # the end of the free text, which may start an opening
        self._after: bytes | None = None  # text since the last part, while another may follow it
        self._scope = b""
        self._longer: list[tuple[bytes, int]] = []  # started openings, and bytes read of each
        self.why = ""

    def copy(self) -> Located:
        other = Located.__new__(Located)
        for name in Located.__slots__:
            setattr(other, name, getattr(self, name))
        other._states = [state.copy() for state in self._states]
        return other

    @property
    def stops(self) -> Stops | None:
        if self._longer or self._after is not None or len(self._states) > 1:
            return None
        return self._states[0].stops if self._states else self._layout.stops

    @property
    def skips(self) -> bytes:
        is_sure = len(self._states) == 1 and not self._longer
        return self._states[0].skips if is_sure and not self._states[0].is_untouched else b""

    @property
    def least_quotes(self) -> int:
        """Always 0, so that each text is checked: it may begin a part with a stricter checker."""
        return 0

    @property
    def pressing(self) -> list[bytes]:
        return self._states[0].pressing if len(self._states) == 1 else []

    @property
    def may_end(self) -> bool:
        return not self._states or any(state.may_end for state in self._states)

    def feed(self, data: bytes) -> bool:
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
        """Feed the bytes from ``at`` on to each checker that may apply to this JSON part. Returns
        the index of the next byte, or -1 if no checker accepts them."""
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
        """Read one byte of a JSON part or longer opening. Returns the next index, -1 if invalid."""
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
        """Read text up to the next JSON part. Returns the next index."""
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
        """Return how many of the new bytes belong to the separator between two JSON parts."""
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

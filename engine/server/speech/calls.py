"""What readers of calls share: the tools of the request, and arguments that are JSON."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal, NamedTuple

from engine.server.speech.events import CallArguments, CallBegin, CallEnd, new_call_id
from engine.server.speech.json_text import JsonText, Pieces, decoded, mended
from engine.server.speech.markers import Markers
from engine.server.speech.source import Steps, TextSource, Waits

NAME = re.compile(r"[\w.-]+")
PREFIX = "functions."  # of a name, as models of several families write it
Types = Mapping[str, list[str]]
"""The types of each argument, by its name; none of them: any."""


class CallSyntax(NamedTuple):
    """The markers around calls."""

    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    """What may stand after a call, and belongs to it."""
    inner: tuple[str, ...] = ()
    """What may stand inside a call."""
    bare: Literal["never", "start", "line"] = "never"
    """Where an object is a call without a marker: nowhere, at the start of the answer, at the start
    of a line."""


class CallReader(ABC):
    """Reads the calls of one answer."""

    fences: tuple[str, ...] = ()  # around JSON
    trailing: tuple[str, ...] = ()
    """What may be left of a call after its arguments, next to its closing markers."""

    def __init__(
        self,
        source: TextSource,
        tools: Mapping[str, Types],
        markers: Markers,
        syntax: CallSyntax,
        *,
        short_ids: bool,
    ) -> None:
        """tools: those of the request, by name."""
        self.source = source
        self.tools = tools
        self.markers = markers
        self.bare = syntax.bare
        self.openers = tuple(map(markers.read, syntax.openers))
        self.closers = tuple(map(markers.read, syntax.closers))
        self._short_ids = short_ids

    @abstractmethod
    def attempt(self) -> Steps[bool]:
        """Read the call at an opener; returns whether it is one. What was read, if it is none, is
        given back by the caller."""

    def following(self) -> Steps[bool]:
        """Read a call right after another one, without an opener of its own."""
        return False
        yield

    def name(self, text: str) -> str | None:
        """The tool of the request that a model calls so."""
        name = text.strip()
        if name not in self.tools:
            name = name.removeprefix(PREFIX)
        return name if name in self.tools else None

    def accept_openers(self, openers: tuple[str, ...]) -> Waits[bool]:
        """Whether an opener stands here. A model may write it twice."""
        found = False
        while (yield from self.source.accept(*openers)):
            found = True
            yield from self.source.skip_space()
        return found

    def read_name(self) -> Waits[str | None]:
        """The tool of the request whose name stands here, in quotes or not."""
        source = self.source
        yield from source.skip_space()
        quote = yield from source.accept('"', "'")
        match = yield from source.match(NAME)
        if quote:
            yield from source.accept(quote)
        yield from source.skip_space()
        return None if match is None else self.name(match[0])

    def json(self) -> JsonText:
        return JsonText(self.source, self.markers.plain, self.closers + self.fences)

    def begin(self, name: str) -> CallBegin:
        """From here on it is a call, whatever follows."""
        self.source.mark = None
        return CallBegin(new_call_id(is_short=self._short_ids), name)

    def whole(self, name: str, arguments: str = "{}") -> Steps[None]:
        yield self.begin(name)
        yield CallArguments(arguments)
        yield CallEnd()

    def arguments(self, name: str) -> Steps[bool]:
        """A call with the arguments that stand here: an object, the text of one, or null. Returns
        whether they are that."""
        char = yield from self.source.peek()
        if char == "{":
            yield self.begin(name)
            value = self.json()
            yield from _streamed(value.read())
            if value.end != "cut":
                yield CallEnd()
            return True
        if char and char in "\"'":
            return (yield from self._quoted(name))
        if (yield from self.source.accept("null", "None")):
            yield from self.whole(name)
            return True
        return False

    def held(self) -> Waits[str | None]:
        """The arguments, all of them at once; ``None`` if they are none, or break off."""
        value = self.json()
        parts: list[str] = []
        for piece in value.read():
            if piece is None:
                yield None
            else:
                parts.append(piece)
        text = "".join(parts)
        if value.end == "cut":
            return None
        if text.startswith('"'):
            inside = decoded(text[1:-1]).strip()
            text = (mended(inside) or inside) if inside else "{}"
        if text.startswith("{"):
            return text
        return "{}" if text == "null" else None

    def is_over(self) -> Waits[bool]:
        """Whether no more of a call can come here."""
        if not (yield from self.source.skip_space()):
            return not self.source.is_cut
        return bool((yield from self.source.standing(0, self.closers + self.openers)))

    def _quoted(self, name: str) -> Steps[bool]:
        """Arguments as a JSON string that is JSON."""
        outer, inner = self.json(), TextSource()
        reading = self._streamed_inside(name, inner)
        has_begun = False
        for piece in outer.string(is_key=False):
            if piece is None:
                yield None
                continue
            inner.feed(decoded(piece) if piece != '"' else "")
            for event in reading:
                if event is None:
                    break
                has_begun = True
                yield event
            if not has_begun and inner.text[inner.at :].lstrip()[:1] not in ("", "{"):
                return False
        if not has_begun and outer.is_open:
            return False
        inner.end(is_cut=outer.is_open)
        for event in reading:
            yield event
        return True

    def _streamed_inside(self, name: str, source: TextSource) -> Steps[None]:
        char = yield from source.skip_space()
        if char != "{":
            yield from self.whole(name)
            return
        yield self.begin(name)
        value = JsonText(source)
        yield from _streamed(value.read())
        if value.end != "cut":
            yield CallEnd()


def _streamed(pieces: Pieces) -> Steps[None]:
    for piece in pieces:
        if piece is None:
            yield None
        elif piece:
            yield CallArguments(piece)

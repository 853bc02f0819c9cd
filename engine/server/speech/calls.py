"""Base class of parsers of tool calls: parses tool names, and arguments that are JSON."""

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
PREFIX = "functions."  # models of several families write it before names of tools
Types = Mapping[str, list[str]]
"""JSON schema types of a tool's arguments, by name; an empty list: any type."""


class CallSyntax(NamedTuple):
    """The markers that a model family writes around and inside tool calls."""

    openers: tuple[str, ...] = ()
    """Markers that begin a call."""
    closers: tuple[str, ...] = ()
    """Markers that end a call."""
    inner: tuple[str, ...] = ()
    """Markers inside a call."""
    bare: Literal["never", "start", "line"] = "never"
    """Where an object without a marker is a call: nowhere, at the start of the answer, or at the
    start of any line."""


class CallReader(ABC):
    """Parses the tool calls in one answer."""

    fences: tuple[str, ...] = ()  # code fences around JSON
    trailing: tuple[str, ...] = ()
    """Texts that may follow the arguments, besides the closers, and are dropped."""

    def __init__(
        self,
        source: TextSource,
        tools: Mapping[str, Types],
        markers: Markers,
        syntax: CallSyntax,
        *,
        short_ids: bool,
    ) -> None:
        """tools: for each tool of the request, the JSON types of its arguments by name."""
        self.source = source
        self.tools = tools
        self.markers = markers
        self.bare = syntax.bare
        self.openers = tuple(map(markers.read, syntax.openers))
        self.closers = tuple(map(markers.read, syntax.closers))
        self._short_ids = short_ids

    @abstractmethod
    def attempt(self) -> Steps[bool]:
        """Try to parse a call that begins with an opening marker. Returns False if this is no call:
        the caller then rewinds the source."""

    def following(self) -> Steps[bool]:
        """Try to parse another call, without an opening marker. Returns False if there is none."""
        return False
        yield

    def name(self, text: str) -> str | None:
        """The name of the tool that the model means by ``text``; ``None`` if there is none."""
        name = text.strip()
        if name not in self.tools:
            name = name.removeprefix(PREFIX)
        return name if name in self.tools else None

    def accept_openers(self, openers: tuple[str, ...]) -> Waits[bool]:
        """Skip all opening markers of calls that come next. Returns False if there is none."""
        found = False
        while (yield from self.source.accept(*openers)):
            found = True
            yield from self.source.skip_space()
        return found

    def read_name(self) -> Waits[str | None]:
        """Parse the name of a tool, perhaps in quotes; ``None`` if there is no such tool."""
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
        """Begin a call: returns its event, and forbids rewinding the source to before it."""
        self.source.mark = None
        return CallBegin(new_call_id(is_short=self._short_ids), name)

    def whole(self, name: str, arguments: str = "{}") -> Steps[None]:
        yield self.begin(name)
        yield CallArguments(arguments)
        yield CallEnd()

    def arguments(self, name: str) -> Steps[bool]:
        """Parse a call's arguments: a JSON object, a string that contains an object, or null.
        Returns False if none of these follows."""
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
        """Parse a call's arguments. Returns JSON text, ``None`` if malformed or incomplete."""
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
            text = (mended(inside) or "") if inside else "{}"
        if text.startswith("{"):
            return text
        return "{}" if text == "null" else None

    def is_over(self) -> Waits[bool]:
        """Whether the call ends here: a marker follows, or the answer is complete and ends."""
        if not (yield from self.source.skip_space()):
            return not self.source.is_cut
        return bool((yield from self.source.standing(0, self.closers + self.openers)))

    def _quoted(self, name: str) -> Steps[bool]:
        """Parse arguments that are a JSON object within a JSON string; False if they are not."""
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

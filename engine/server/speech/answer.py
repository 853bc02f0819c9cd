"""Parse the answer of one sequence into events: thinking, text, and parts of tool calls.

    text of the engine ──> MarkedText ──> AnswerParser ──> events of a ParsedAnswer

Complete and streamed answers are made from the same events, so that both have the same content.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, Protocol

from engine.messages.requests import CompletionOutput
from engine.server.speech.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    PartEnd,
    Text,
    Thinking,
    ToolCall,
)
from engine.server.speech.harmony import HarmonyParser
from engine.server.speech.markers import MarkedText, Markers
from engine.server.speech.source import TextSource
from engine.server.speech.text_reading import TextParser


class AnswerParser(Protocol):
    """Parses the text of one answer, where each marker is one character (see ``MarkedText``)."""

    @property
    def is_thinking(self) -> bool:
        """Whether the text that comes next is thinking."""

    def read(self, text: str) -> Iterable[Event | PartEnd]:
        """Parse the next part of the answer's text and return its events."""

    def end(self, *, is_cut: bool) -> Iterable[Event | PartEnd]:
        """Return the last events. is_cut: the answer ended before the model finished it."""


class FamilyParser:
    """Parses an answer in the format of a model family."""

    def __init__(self, source: TextSource, reading: TextParser | HarmonyParser) -> None:
        self._source = source
        self._reading = reading
        self._steps = reading.run()

    @property
    def is_thinking(self) -> bool:
        return self._reading.is_thinking

    def read(self, text: str) -> Iterator[Event | PartEnd]:
        self._source.feed(text)
        return self._new()

    def end(self, *, is_cut: bool) -> Iterator[Event | PartEnd]:
        self._source.end(is_cut=is_cut)
        return self._new()

    def _new(self) -> Iterator[Event | PartEnd]:
        for event in self._steps:
            if event is None:
                return
            yield event


class ThinkingCounter:
    """Counts the tokens of thinking: those between its opening and closing markers."""

    def __init__(self, begin: int, end: int, is_thinking: bool) -> None:
        self._begin, self._end, self._is_thinking = begin, end, is_thinking

    def count(self, token_ids: list[int]) -> int:
        num = 0
        for token in token_ids:
            if token in (self._begin, self._end):
                self._is_thinking = token == self._begin
            else:
                num += self._is_thinking
        return num


class ParsedAnswer(ABC):
    """The answer of one sequence so far, parsed into text, thinking and tool calls."""

    def __init__(self) -> None:
        # Lists of pieces: appending to one long text would copy it for each token.
        self._content: list[str] = []
        self._thinking: list[str] = []
        self.calls: list[ToolCall] = []
        self._is_left_out = False  # whether the current call is over the limit
        self.num_thinking: int | None = 0
        """Tokens of thinking; ``None`` if they cannot be counted."""

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def thinking(self) -> str:
        return "".join(self._thinking)

    @property
    def is_thinking(self) -> bool:
        """Whether the text that comes next is thinking."""
        return False

    def read(self, completion: CompletionOutput, max_calls: int | None = None) -> list[Event]:
        """Parse a new output and return its events, without calls after the first ``max_calls``."""
        events: list[Event] = []
        for event in _joined(self._read(completion)):
            if isinstance(event, Text):
                self._content.append(event.text)
            elif isinstance(event, Thinking):
                self._thinking.append(event.text)
            elif not self._keep(event, max_calls):
                continue
            events.append(event)
        return events

    def _keep(self, event: CallBegin | CallArguments | CallEnd, max_calls: int | None) -> bool:
        """Record an event of a tool call. Returns False for calls after the first ``max_calls``."""
        if isinstance(event, CallBegin):
            self._is_left_out = max_calls is not None and len(self.calls) >= max_calls
            if not self._is_left_out:
                self.calls.append(ToolCall(event.id, event.name))
        elif isinstance(event, CallArguments) and not self._is_left_out:
            self.calls[-1].parts.append(event.text)
        return not self._is_left_out

    @abstractmethod
    def _read(self, completion: CompletionOutput) -> Iterator[Event]:
        """Parse an output into events."""


class PlainAnswer(ParsedAnswer):
    """An answer that is text only."""

    def _read(self, completion: CompletionOutput) -> Iterator[Event]:
        if completion.text:
            yield Text(completion.text)


class StructuredAnswer(ParsedAnswer):
    """An answer that may have thinking and tool calls. White space between its parts is dropped."""

    def __init__(
        self,
        marked: MarkedText,
        markers: Markers,
        reading: AnswerParser,
        counter: ThinkingCounter | None,
    ) -> None:
        super().__init__()
        self._marked = marked
        self._markers = markers
        self._reading = reading
        self._counter = counter
        if counter is None:
            self.num_thinking = None
        self._part: type | None = Text  # event type of the current part
        self._is_first = True  # whether the current part is the first
        self._has_begun = False  # whether the current part has more than white space
        self._spaces: list[str] = []  # white space at its end, dropped if no text follows
        self._is_closed = False  # whether the next text begins a new part
        self._kinds: set[type] = set()  # event types of all parts so far

    @property
    def is_thinking(self) -> bool:
        return self._reading.is_thinking

    def _read(self, completion: CompletionOutput) -> Iterator[Event]:
        if self._counter is not None and self.num_thinking is not None:
            self.num_thinking += self._counter.count(completion.token_ids)
        text = self._marked.read(completion.token_ids, completion.text)
        reason = completion.finish_reason
        if reason is not None:
            text += self._marked.flush()
        if text:
            yield from self._trimmed(self._reading.read(text))
        if reason is not None:
            yield from self._trimmed(self._reading.end(is_cut=reason != "stop"))
            if self._spaces and self._part is Text and (self._has_begun or self._is_first):
                yield Text("".join(self._spaces))

    def _trimmed(self, events: Iterable[Event | PartEnd]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, (Text, Thinking)):
                yield from self._piece(event)
            elif isinstance(event, PartEnd):
                self._is_closed = True
            else:
                if isinstance(event, CallBegin):
                    self._begin(CallBegin)
                yield event

    def _piece(self, event: Text | Thinking) -> Iterator[Event]:
        kind, text = type(event), self._markers.plain(event.text)
        if self._part is not kind or self._is_closed:
            self._begin(kind)
        if not self._has_begun:
            text = self._beginning(kind, text)
            if not text:
                return
        kept = text.rstrip()
        if not kept:
            self._spaces.append(text)
            return
        spaces = "".join(self._spaces)
        self._spaces = [text[len(kept) :]] if len(kept) < len(text) else []
        yield kind(spaces + kept)

    def _begin(self, kind: type) -> None:
        self._is_first = self._is_first and kind is self._part and not self._has_begun
        self._part, self._has_begun, self._spaces, self._is_closed = kind, False, [], False

    def _beginning(self, kind: type, text: str) -> str:
        """The trimmed start of a part of the answer; "" while the part is only white space."""
        if not text.strip():
            self._spaces.append(text)
            return ""
        text, self._spaces = "".join([*self._spaces, text]), []
        self._has_begun = True
        if kind is Thinking:
            text = text.lstrip()
        elif not self._is_first:
            text = text.lstrip("\n")
        if kind in self._kinds:
            text = "\n" + text
        self._kinds.add(kind)
        return text


def _joined(events: Iterable[Event]) -> Iterator[Event]:
    """Join consecutive text events, thinking events or pieces of arguments into single events."""
    for kind, group in groupby(events, type):
        if kind is CallBegin or kind is CallEnd:
            yield from group
            continue
        pieces: list[Any] = list(group)
        yield pieces[0] if len(pieces) == 1 else kind("".join(each.text for each in pieces))

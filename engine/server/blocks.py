"""Answers made of blocks (thinking, text, tool calls), for the APIs responses and messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from typing import Any, Literal, NamedTuple

import msgspec

from engine.frontend.streams import OutputReader
from engine.messages.requests import RequestOutput
from engine.server.answers import HttpAnswer, TokenCounter
from engine.server.dialogue import ChatGeneration
from engine.server.speech.events import CallArguments, CallBegin, CallEnd, Event, Text

Json = dict[str, Any]

Kind = Literal["thinking", "text", "call"]


class Block:
    """One block of an answer: thinking, text, or a tool call (described by ``call``)."""

    def __init__(self, kind: Kind, index: int, call: CallBegin | None = None) -> None:
        self.kind = kind
        self.index = index
        self.call = call
        self.parts: list[str] = []  # pieces of its text, or of the JSON of the call's arguments

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockChange(NamedTuple):
    """A change of one block of an answer: it begins, gets more text, or ends."""

    what: Literal["begin", "more", "end"]
    block: Block
    text: str = ""


class Blocks:
    """Collects the blocks of one answer while it is generated."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def take(self, events: Iterable[Event]) -> Iterator[BlockChange]:
        """Add events and yield the changes of blocks. A block has consecutive texts of one kind, or
        the arguments of one call."""
        for event in events:
            if isinstance(event, CallBegin):
                yield from self.end()
                yield BlockChange("begin", self._begin("call", event))
            elif isinstance(event, CallEnd):
                yield from self.end()
            elif isinstance(event, CallArguments):
                yield self._add(event.text)
            else:
                kind: Kind = "text" if isinstance(event, Text) else "thinking"
                if self._open is None or self._open.kind != kind:
                    yield from self.end()
                    yield BlockChange("begin", self._begin(kind))
                yield self._add(event.text)

    def _add(self, text: str) -> BlockChange:
        assert self._open is not None
        self._open.parts.append(text)
        return BlockChange("more", self._open, text)

    def end(self) -> Iterator[BlockChange]:
        """End the current block, if there is one, and yield its end."""
        block, self._open = self._open, None
        if block is not None:
            yield BlockChange("end", block)

    def _begin(self, kind: Kind, call: CallBegin | None = None) -> Block:
        block = self._open = Block(kind, len(self.all), call)
        self.all.append(block)
        return block


class BlockAnswer(HttpAnswer):
    """An answer made of blocks: thinking, texts and tool calls. Its events describe how these
    change."""

    def __init__(self, name: str, dialogue: ChatGeneration) -> None:
        self.name = name
        self.response: Json = {}
        """The answer with the blocks that have ended so far."""
        self._generation = dialogue
        self._blocks = Blocks()
        self._counted = TokenCounter()

    async def whole(self) -> bytes:
        async with aclosing((await self.open()).outputs()) as outputs:
            async for output in outputs:
                list(self._events(output))
        return msgspec.json.encode(self.response)

    async def open(self) -> OutputReader:
        return await self._generation.open(self.name)

    def events_of(self, output: RequestOutput) -> bytes:
        return b"".join([named_event(event) for event in self._events(output)])

    def end(self) -> bytes:
        return b""

    @abstractmethod
    def _events(self, output: RequestOutput) -> Iterator[Json]:
        """Yield the events for a new output. The caller must encode each event before it takes the
        next. Raises ``ApiError`` if the generation ended with an error."""


def named_event(event: Json) -> bytes:
    """Encode an event for a stream of server-sent events, under the name of its type."""
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))

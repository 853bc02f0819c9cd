"""An answer as blocks, one behind the other: thinking, text, tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from engine.server.speech.turns import Event, Text, ToolCall

Kind = Literal["thinking", "text", "call"]


class Block:
    """A part of an answer."""

    def __init__(self, kind: Kind, index: int, call: ToolCall | None = None) -> None:
        self.kind = kind
        self.index = index
        self.call = call
        self.text = ""


class Change(NamedTuple):
    """What happened to a block: it began, has more text, or ended."""

    what: Literal["begin", "more", "end"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one answer, as they come."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def take(self, events: Iterable[Event]) -> Iterator[Change]:
        """A call begins and ends at once; texts of one kind are one block."""
        for event in events:
            if isinstance(event, ToolCall):
                yield from self.end()
                block = self._begin("call", event)
                yield Change("begin", block)
                yield Change("more", block, event.arguments)
                yield from self.end()
                continue
            kind: Kind = "text" if isinstance(event, Text) else "thinking"
            if self._open is None or self._open.kind != kind:
                yield from self.end()
                yield Change("begin", self._begin(kind))
            assert self._open is not None
            self._open.text += event.text
            yield Change("more", self._open, event.text)

    def end(self) -> Iterator[Change]:
        """Nothing follows."""
        block, self._open = self._open, None
        if block is not None:
            yield Change("end", block)

    def _begin(self, kind: Kind, call: ToolCall | None = None) -> Block:
        block = self._open = Block(kind, len(self.all), call)
        self.all.append(block)
        return block

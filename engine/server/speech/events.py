"""The events of a parsed answer: pieces of text, thinking and tool calls, in their order.

    Text("Let me see.")
    CallBegin("call_1f", "weather")  CallArguments('{"city": "Ro')  CallArguments('me"}')  CallEnd()

The joined arguments of a call are valid JSON, unless the answer was cut off inside them.
"""

from __future__ import annotations

import secrets
import string
from typing import NamedTuple


class Text(NamedTuple):
    """A piece of the answer's text."""

    text: str


class Thinking(NamedTuple):
    """A piece of the model's thinking before its answer."""

    text: str


class CallBegin(NamedTuple):
    """The beginning of a tool call; events with its arguments follow."""

    id: str
    name: str


class CallArguments(NamedTuple):
    """A piece of the current call's arguments, which are JSON text."""

    text: str


class CallEnd(NamedTuple):
    """The end of the current call. There is no such event if the answer is cut off in the call."""


class PartEnd(NamedTuple):
    """Marks the end of one message of an answer: text after it begins on a new line. Parsers emit
    it for ``ParsedAnswer``, which does not pass it on."""


Event = Text | Thinking | CallBegin | CallArguments | CallEnd


class ToolCall:
    """A tool call that is complete, or parsed so far."""

    def __init__(self, call_id: str, name: str) -> None:
        self.id = call_id
        self.name = name
        self.parts: list[str] = []
        """Pieces of the JSON text of its arguments."""

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


def new_call_id(*, is_short: bool) -> str:
    """A random id for a call; is_short: nine letters and digits, which Mistral's templates need."""
    if is_short:
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"

"""The events of a parsed answer: pieces of thinking, text and tool calls in their order.

    Text("Let me see.")
    CallBegin("call_1f", "weather")  CallArguments('{"city": "Ro')  CallArguments('me"}')  CallEnd()

The joined arguments are valid JSON, unless the answer was cut off inside of them.
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
    """A tool call begins; its arguments follow."""

    id: str
    name: str


class CallArguments(NamedTuple):
    """A piece of the JSON text of the current call's arguments."""

    text: str


class CallEnd(NamedTuple):
    """The current call is complete. A call that is cut off with the answer has no such event."""


class PartEnd(NamedTuple):
    """A message of the answer ends, so that the next text begins on a new line. Parsers use it
    among themselves; it is no ``Event``."""


Event = Text | Thinking | CallBegin | CallArguments | CallEnd


class ToolCall:
    """A tool call as far as it was parsed."""

    def __init__(self, call_id: str, name: str) -> None:
        self.id = call_id
        self.name = name
        self.parts: list[str] = []
        """Pieces of the JSON text of its arguments."""

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


def new_call_id(*, is_short: bool) -> str:
    """A random id of a call; is_short: nine letters and digits, as Mistral's templates require."""
    if is_short:
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"

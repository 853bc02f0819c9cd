"""What a reader of an answer reports: thinking, text, and tool calls as they come.

    Text("Let me see.")
    CallBegin("call_1f", "weather")  CallArguments('{"city": "Ro')  CallArguments('me"}')  CallEnd()

Arguments are valid JSON text once they are joined, unless the answer was cut inside them.
"""

from __future__ import annotations

import secrets
import string
from typing import NamedTuple


class Text(NamedTuple):
    """A piece of the answer's text."""

    text: str


class Thinking(NamedTuple):
    """A piece of what the model thinks before it answers."""

    text: str


class CallBegin(NamedTuple):
    """The model calls a tool; its arguments follow."""

    id: str
    name: str


class CallArguments(NamedTuple):
    """A piece of the JSON text of the arguments of the call that is open."""

    text: str


class CallEnd(NamedTuple):
    """The call that is open has all its arguments; one that the answer breaks off has no end."""


class PartEnd(NamedTuple):
    """Between readers alone: a message ends, and what follows stands on a line of its own."""


Event = Text | Thinking | CallBegin | CallArguments | CallEnd


class ToolCall:
    """A call as far as it was read."""

    def __init__(self, call_id: str, name: str) -> None:
        self.id = call_id
        self.name = name
        self.parts: list[str] = []
        """Pieces of the JSON text of its arguments."""

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


def new_call_id(*, is_short: bool) -> str:
    """is_short: nine letters and digits, all that Mistral's chat templates take."""
    if is_short:
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"

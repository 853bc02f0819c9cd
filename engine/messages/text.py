"""The messages between a front end and its tokenizer and detokenizer processes.

Both sides have the same version: the front end starts the processes. Jobs travel several together,
and are answered together, in order. Texts are UTF-8, ids are 32-bit integers of the machine.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from engine.messages.wire import Failure


class StartText(msgspec.Struct, array_like=True, frozen=True):
    """The start message of a text process. ``socket``: the descriptor it inherits."""

    socket: int
    model: str  # directory
    tokenizer: str | None
    trust_remote_code: bool


class Encode(msgspec.Struct, array_like=True, frozen=True, tag="encode"):
    """Tokenise a text. Answered by ``Encoded``."""

    text: bytes
    add_special_tokens: bool


class Render(msgspec.Struct, array_like=True, frozen=True, tag="render"):
    """Fill in a chat template, given by its source. Answered by ``Rendered``."""

    template: bytes
    values: dict[str, Any]


class TextWish(msgspec.Struct, array_like=True, frozen=True):
    """How the text of a sequence is to be made: the part of its parameters that is about text."""

    skip_special_tokens: bool
    stop: list[str]
    include_stop_str_in_output: bool
    min_tokens: int


class Opening(msgspec.Struct, array_like=True, frozen=True):
    """A sequence the process does not know (any more). ``read``: its tokens whose text is known
    already, grouped as they were read, since half a character withholds the text of its group."""

    wish: TextWish
    prompt: bytes  # ids
    read: list[list[int]]


class Read(msgspec.Struct, array_like=True, frozen=True, tag="read"):
    """Turn the next tokens of a sequence into text. Answered by ``TextDelta``.

    ``is_last``: nothing follows, what is withheld comes out.
    """

    sequence: int
    token_ids: list[int]
    is_last: bool
    opening: Opening | None = None


Job = Encode | Render | Read


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """The first message of a process: its tokenizer is loaded."""


class Encoded(msgspec.Struct, array_like=True, frozen=True, tag="encoded"):
    """The ids of a text."""

    token_ids: bytes


class Rendered(msgspec.Struct, array_like=True, frozen=True, tag="rendered"):
    """A text, and its ids (the template has written special tokens itself)."""

    text: str
    token_ids: bytes


class TextDelta(msgspec.Struct, array_like=True, gc=False, tag="delta"):
    """What tokens did to a text: ``num_dropped`` characters off its end, then ``text`` after it.

    ``stop``: a stop string that ended it, with the ``num_tokens`` the sequence then has.
    ``error``: why its tokens could not be read.
    """

    text: str = ""
    num_dropped: int = 0
    stop: str | None = None
    num_tokens: int = 0
    error: str = ""


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """A job that raised."""

    failure: Failure


Reply = Ready | Encoded | Rendered | TextDelta | Failed


class Rendering(NamedTuple):
    """A chat as a prompt."""

    text: str
    token_ids: list[int]

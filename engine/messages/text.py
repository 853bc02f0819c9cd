"""The messages between a front end and its tokenizer and detokenizer processes.

Both sides have the same version: the front end starts the processes. Texts (UTF-8) and token ids
(32-bit integers of the machine) travel beside a message, as its payloads. Every job is answered
once, in order.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from engine.messages.wire import Failure

Role = Literal["tokenizer", "detokenizer"]


class StartText(msgspec.Struct, array_like=True, frozen=True):
    """The start message of a text process. Descriptors are those it inherits; -1: no arena."""

    role: Role
    address: str  # to connect to
    token: bytes  # to be shown in ``Ready``
    model: str  # directory
    tokenizer: str | None
    trust_remote_code: bool
    fd_from_parent: int = -1
    fd_to_parent: int = -1


class Encode(msgspec.Struct, array_like=True, frozen=True, tag="encode"):
    """Payload: a text. Answered by ``Encoded``."""

    number: int
    add_special_tokens: bool


class Render(msgspec.Struct, array_like=True, frozen=True, tag="render"):
    """Fill in a chat template. Payload: its source. Answered by ``Rendered``."""

    number: int
    values: dict[str, Any]


class TextWish(msgspec.Struct, array_like=True, frozen=True):
    """How the text of a sequence is to be made: the part of its parameters that is about text."""

    skip_special_tokens: bool
    stop: list[str]
    include_stop_str_in_output: bool
    min_tokens: int


class Opening(msgspec.Struct, array_like=True, frozen=True):
    """A sequence the process does not know (any more). ``prompt``: index of the payload with its
    prompt's ids; ``read``: its tokens whose text is known already, grouped as they were read, since
    half a character withholds the text of its whole group."""

    wish: TextWish
    prompt: int
    read: list[list[int]]


class TextRow(msgspec.Struct, array_like=True, frozen=True):
    """The next tokens of a sequence. ``is_last``: nothing follows, what is withheld comes out."""

    sequence: int
    token_ids: list[int]
    is_last: bool
    opening: Opening | None = None


class Read(msgspec.Struct, array_like=True, frozen=True, tag="read"):
    """Turn these rows into text, in order. Answered by ``Texts``."""

    number: int
    rows: list[TextRow]


Job = Encode | Render | Read


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """The first message of a process: its tokenizer is loaded."""

    token: bytes


class Encoded(msgspec.Struct, array_like=True, frozen=True, tag="encoded"):
    """Payload: the ids."""

    number: int


class Rendered(msgspec.Struct, array_like=True, frozen=True, tag="rendered"):
    """Payloads: the text, and its ids (the template has written special tokens itself)."""

    number: int


class TextDelta(msgspec.Struct, array_like=True, gc=False):
    """What tokens did to a text: ``num_dropped`` characters off its end, then ``text`` behind it.

    ``stop``: a stop string that ended it, with the ``num_tokens`` the sequence then has.
    ``error``: why its tokens could not be read.
    """

    text: str = ""
    num_dropped: int = 0
    stop: str | None = None
    num_tokens: int = 0
    error: str = ""


class Texts(msgspec.Struct, array_like=True, frozen=True, tag="texts"):
    """One delta per row of ``Read``."""

    number: int
    deltas: list[TextDelta]


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """A job that raised. A job that could not be read has no number: it is -1."""

    number: int
    failure: Failure


Reply = Ready | Encoded | Rendered | Texts | Failed


class Rendering(NamedTuple):
    """A chat as a prompt."""

    text: str
    token_ids: list[int]

"""The messages between a front end and its text processes, which tokenise, detokenise and decode
pictures.

Jobs are sent in batches and answered in order. Texts are UTF-8, ids are native 32-bit integers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from engine.messages.media import Pixels, SharedPixels
from engine.messages.wire import Failure


class StartText(msgspec.Struct, array_like=True, frozen=True):
    """The start message of a text process. ``socket``: the file descriptor it inherits.
    ``pictures``: settings of the model's image processor in place of its own, for a process that
    decodes pictures; ``None`` for others."""

    socket: int
    model: str  # directory
    tokenizer: str | None
    trust_remote_code: bool
    pictures: dict[str, Any] | None = None


class Encode(msgspec.Struct, array_like=True, frozen=True, tag="encode"):
    """Tokenise a text. Answered by ``Encoded``."""

    text: bytes
    add_special_tokens: bool


class Render(msgspec.Struct, array_like=True, frozen=True, tag="render"):
    """Fill in a chat template, given by its source. Answered by ``Rendered``."""

    template: bytes
    values: dict[str, Any]


class TextWish(msgspec.Struct, array_like=True, frozen=True):
    """The sampling parameters of a sequence that concern its text."""

    skip_special_tokens: bool
    stop: list[str]
    include_stop_str_in_output: bool
    min_tokens: int


class KnownText(msgspec.Struct, array_like=True, frozen=True):
    """The state of a sequence whose detokenisation another text process continues. ``read``: the
    token ids so far, in the groups in which they were detokenised (a group may end within a
    character)."""

    wish: TextWish
    prompt: bytes  # token ids
    read: list[list[int]]


class Read(msgspec.Struct, array_like=True, frozen=True, tag="read"):
    """Detokenise the next tokens of a sequence. Answered by ``TextDelta``.

    ``is_last``: the sequence ends, so text withheld for later tokens is returned, too.
    """

    sequence: int
    token_ids: list[int]
    is_last: bool
    opening: KnownText | None = None


class Decode(msgspec.Struct, array_like=True, frozen=True, tag="decode"):
    """Decode and process a picture. Answered by ``Decoded``.

    ``content``: a file or, with ``is_raw``, pixels in RGB. ``whole``: width and height that were
    read from the header; the picture is then shrunk to ``size``."""

    content: bytes
    is_raw: bool
    whole: tuple[int, int]
    size: tuple[int, int]


Job = Encode | Render | Read | Decode


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """The first message of a process: its tokenizer is loaded."""


class Encoded(msgspec.Struct, array_like=True, frozen=True, tag="encoded"):
    """The token ids of a text."""

    token_ids: bytes


class Rendered(msgspec.Struct, array_like=True, frozen=True, tag="rendered"):
    """A chat rendered by its template, as text and as token ids."""

    text: str
    token_ids: bytes


class TextDelta(msgspec.Struct, array_like=True, gc=False, tag="delta"):
    """A change of a sequence's text: remove ``num_dropped`` characters at its end, then append
    ``text``.

    ``stop``: the stop string that ended the sequence, which then has ``num_tokens`` tokens.
    ``error``: why its tokens could not be detokenised.
    """

    text: str = ""
    num_dropped: int = 0
    stop: str | None = None
    num_tokens: int = 0
    error: str = ""


class Decoded(msgspec.Struct, array_like=True, frozen=True, tag="decoded"):
    """The arrays of a picture: in shared memory, which the process holds until its next jobs, or if
    the system has none, as they are."""

    shared: SharedPixels | None
    pixels: Pixels | None = None


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """The answer to a job that failed with an exception."""

    failure: Failure


Reply = Ready | Encoded | Rendered | TextDelta | Decoded | Failed


class Rendering(NamedTuple):
    """A chat rendered as a prompt."""

    text: str
    token_ids: list[int]

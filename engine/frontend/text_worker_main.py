"""A tokenizer or detokenizer process: jobs in, answers out, in order. Blocks while there are none.

Started by ``text_workers.TextProcess`` as a program; imports neither torch nor transformers, unless
the tokenizer of the model exists only there.
"""

from __future__ import annotations

import socket
import struct
from array import array
from collections.abc import Callable, Sequence

import msgspec

from engine.config.model import ModelConfig
from engine.errors import RequestError, WireError
from engine.ipc.codec import MAX_MESSAGE_BYTES, Decoder, Encoder
from engine.ipc.program import start_message
from engine.messages.text import (
    Encode,
    Encoded,
    Failed,
    Job,
    Read,
    Ready,
    Render,
    Rendered,
    Reply,
    StartText,
    TextDelta,
)
from engine.rpc.failures import failure_of
from engine.text.chat import fill_template
from engine.text.detokenizer import TextReader
from engine.text.tokenizer import Tokenizer, load_tokenizer

LENGTH = struct.Struct("<I")
MAX_BYTES = 2 * MAX_MESSAGE_BYTES  # of messages that travel together


def main(descriptor: int) -> None:
    """Serve until the parent ends this process."""
    start = msgspec.msgpack.decode(start_message(descriptor), type=StartText)
    model = ModelConfig(
        model=start.model, tokenizer=start.tokenizer, trust_remote_code=start.trust_remote_code
    )
    server = TextServer(load_tokenizer(model))
    decoder, encoder = Decoder[Job](Job), Encoder()
    with socket.socket(fileno=start.socket) as parent:
        parent.sendall(pack_frames([encoder.encode(Ready())]))
        while True:
            frames = read_frames(parent.recv)
            parent.sendall(pack_frames([answer(server, decoder, encoder, each) for each in frames]))


def answer(server: TextServer, decoder: Decoder[Job], encoder: Encoder, frame: bytes) -> bytes:
    """The answer to a job. One that cannot travel, being too long, is an error too."""
    try:
        return encoder.encode(server.do(decoder.decode([frame])))
    except WireError as error:
        return encoder.encode(Failed(failure_of(error)))
    except (KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:
        return encoder.encode(Failed(failure_of(error, RequestError)))
    except BaseException as error:  # the tokenizer library raises this when its own code panics
        wrapped = RequestError(f"{type(error).__name__}: {error}")
        return encoder.encode(Failed(failure_of(wrapped)))


class TextServer:
    """Carries out the jobs; remembers the sequences whose text it makes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._readers: dict[int, TextReader] = {}

    def do(self, job: Job) -> Reply:
        """The answer to a job."""
        match job:
            case Encode(text, add_special_tokens):
                ids = self._tokenizer.encode(str(text, "utf-8"), add_special_tokens)
                return Encoded(pack_ids(ids))
            case Render(template, values):
                rendered = fill_template(str(template, "utf-8"), values)
                ids = self._tokenizer.encode(rendered, add_special_tokens=False)
                return Rendered(rendered, pack_ids(ids))
            case Read():
                return self._read(job)

    def _read(self, job: Read) -> TextDelta:
        if job.opening is not None:
            opening = job.opening
            reader = TextReader(self._tokenizer.backend, unpack_ids(opening.prompt), opening.wish)
            for token_ids in opening.read:
                reader.read(token_ids, is_last=False)
            self._readers[job.sequence] = reader
        if job.sequence not in self._readers:
            return TextDelta()  # tokens behind a stop string
        delta = self._readers[job.sequence].read(job.token_ids, job.is_last)
        if job.is_last or delta.stop is not None or delta.error:
            del self._readers[job.sequence]
        return delta


def pack_frames(frames: Sequence[bytes]) -> bytes:
    """Messages that travel together."""
    body = msgspec.msgpack.encode(frames)
    return LENGTH.pack(len(body)) + body


def read_frames(receive: Callable[[int], bytes]) -> list[bytes]:
    """The next messages. ``receive`` gives at most so many bytes, and none at the end.

    Raises ``EOFError`` at the end, ``WireError`` for invalid data.
    """
    (size,) = LENGTH.unpack(_read_exactly(receive, LENGTH.size))
    if size > MAX_BYTES:
        raise WireError(f"messages of {size} bytes, the limit is {MAX_BYTES}")
    try:
        return msgspec.msgpack.decode(_read_exactly(receive, size), type=list[bytes])
    except msgspec.MsgspecError as error:
        raise WireError(f"not a list of messages: {error}") from error


def pack_ids(token_ids: list[int]) -> bytes:
    """Ids as 32-bit integers of this machine."""
    return array("i", token_ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Raises ``WireError`` if these are no ids."""
    if len(data) % array("i").itemsize:
        raise WireError(f"{len(data)} bytes are no token ids")
    return array("i", data).tolist()


def _read_exactly(receive: Callable[[int], bytes], size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        part = receive(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        data += part
    return data

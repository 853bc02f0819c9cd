"""A tokenizer or detokenizer process: jobs in, answers out, in order. Blocks while there are none.

Started by ``pool_child.TextProcess`` as a program; imports neither torch nor transformers, unless
the tokenizer of the model exists only there.
"""

from __future__ import annotations

from array import array

import msgspec
import zmq

from engine.config.model import ModelConfig
from engine.errors import RequestError, WireError
from engine.ipc.channel import Channel, Delivery
from engine.ipc.program import start_message
from engine.ipc.shm import Arena, ArenaReader
from engine.ipc.sockets import connect
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
    TextRow,
    Texts,
)
from engine.rpc.failures import failure_of
from engine.text.chat import fill_template
from engine.text.detokenizer import TextReader
from engine.text.tokenizer import Tokenizer, load_tokenizer

Answer = tuple[Reply, list[bytes]]


def main(descriptor: int) -> None:
    """Serve until the parent ends this process."""
    start = msgspec.msgpack.decode(start_message(descriptor), type=StartText)
    server = TextServer(load_tokenizer(_model(start)))
    channel = Channel[Job](Job, *_arenas(start))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer, _ = connect(context, start.address, None)
    dealer.send_multipart(channel.pack(Ready(start.token)))
    while True:
        dealer.send_multipart(_answer(server, channel, dealer.recv_multipart()))


def _answer(server: TextServer, channel: Channel[Job], frames: list[bytes]) -> list[bytes]:
    """Frames of the answer. An answer that cannot travel, being too long, is an error too."""
    try:
        delivery = channel.unpack(frames)
    except WireError as error:
        return channel.pack(Failed(-1, failure_of(error)))
    try:
        return channel.pack(*server.do(delivery))
    except (KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:
        return channel.pack(Failed(delivery.message.number, failure_of(error, RequestError)))
    except BaseException as error:  # the tokenizer library raises this when its own code panics
        wrapped = RequestError(f"{type(error).__name__}: {error}")
        return channel.pack(Failed(delivery.message.number, failure_of(wrapped)))


class TextServer:
    """Carries out the jobs; remembers the sequences whose text it makes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._readers: dict[int, TextReader] = {}

    def do(self, delivery: Delivery[Job]) -> Answer:
        """The answer to a job, with its payloads."""
        match delivery.message:
            case Encode(number, add_special_tokens):
                text = str(delivery.payloads[0], "utf-8")
                ids = self._tokenizer.encode(text, add_special_tokens)
                return Encoded(number), [pack_ids(ids)]
            case Render(number, values):
                text = fill_template(str(delivery.payloads[0], "utf-8"), values)
                ids = self._tokenizer.encode(text, add_special_tokens=False)
                return Rendered(number), [text.encode(), pack_ids(ids)]
            case Read(number, rows):
                return Texts(number, [self._read(row, delivery.payloads) for row in rows]), []

    def _read(self, row: TextRow, payloads: list[bytes]) -> TextDelta:
        if row.opening is not None:
            prompt = unpack_ids(payloads[row.opening.prompt])
            reader = TextReader(self._tokenizer.backend, prompt, row.opening.wish)
            for token_ids in row.opening.read:
                reader.read(token_ids, is_last=False)
            self._readers[row.sequence] = reader
        if row.sequence not in self._readers:
            return TextDelta()  # tokens behind a stop string
        delta = self._readers[row.sequence].read(row.token_ids, row.is_last)
        if row.is_last or delta.stop is not None or delta.error:
            del self._readers[row.sequence]
        return delta


def pack_ids(token_ids: list[int]) -> bytes:
    """Ids as 32-bit integers of this machine."""
    return array("i", token_ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Raises ``WireError`` if these are no ids."""
    if len(data) % array("i").itemsize:
        raise WireError(f"{len(data)} bytes are no token ids")
    return array("i", data).tolist()


def _model(start: StartText) -> ModelConfig:
    return ModelConfig(
        model=start.model, tokenizer=start.tokenizer, trust_remote_code=start.trust_remote_code
    )


def _arenas(start: StartText) -> tuple[Arena | None, ArenaReader | None]:
    if start.fd_to_parent < 0:
        return None, None
    own = Arena(start.fd_to_parent, f"shared memory of a {start.role} process")
    return own, ArenaReader(start.fd_from_parent)

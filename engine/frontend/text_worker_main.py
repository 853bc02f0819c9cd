"""Main program of a text process, which tokenises, detokenises or decodes pictures: answers jobs
in order.

Started by ``text_workers.TextProcess``. Imports torch or transformers only for pictures, or a model
whose tokenizer needs it.
"""

from __future__ import annotations

import socket
import sys
from typing import Protocol

import msgspec

from engine.config.env import expect_no_torch
from engine.config.model import ModelConfig
from engine.errors import RequestError, WireError
from engine.ipc.codec import MessageDecoder, MessageEncoder
from engine.ipc.frames import pack_frames, pack_ids, read_frames, unpack_ids
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


def main(descriptor: int) -> None:
    """Read the start message from ``descriptor``, then answer jobs until the parent process
    ends."""
    start = msgspec.msgpack.decode(start_message(descriptor), type=StartText)
    server = server_of(start)
    decoder, encoder = MessageDecoder[Job](Job), MessageEncoder()
    with socket.socket(fileno=start.socket) as parent:
        parent.sendall(pack_frames([encoder.encode(Ready())]))
        while True:
            frames = read_frames(parent.recv)
            server.begin()
            parent.sendall(pack_frames([answer(server, decoder, encoder, each) for each in frames]))


class Server(Protocol):
    """Executes the jobs of a process."""

    def begin(self) -> None:
        """Called before each batch of jobs, when the results of the last one have been read."""

    def do(self, job: Job) -> Reply:
        """Execute a job."""
        ...


def server_of(start: StartText) -> Server:
    """What a process does."""
    if start.pictures is not None:
        hide_torch()
        from engine.frontend.picture_server import PictureServer

        return PictureServer(start.model, start.pictures)
    model = ModelConfig(
        model=start.model, tokenizer=start.tokenizer, trust_remote_code=start.trust_remote_code
    )
    return TextServer(load_tokenizer(model))


def hide_torch() -> None:
    """Let transformers find no torch, which its image processors for PIL do not need: the process
    is ready four times as fast, and has a sixth of the memory."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    expect_no_torch()


def answer(
    server: Server, decoder: MessageDecoder[Job], encoder: MessageEncoder, frame: bytes
) -> bytes:
    """Execute an encoded job and return the encoded answer: ``Failed`` if the job fails."""
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
    """Executes jobs, and holds the detokenizer state of its sequences."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._readers: dict[int, TextReader] = {}

    def begin(self) -> None:
        pass

    def do(self, job: Job) -> Reply:
        """Execute a job."""
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
            case _:
                raise WireError(f"{job!r:.80} is no job of a process that tokenises")

    def _read(self, job: Read) -> TextDelta:
        if job.opening is not None:
            opening = job.opening
            reader = TextReader(self._tokenizer.backend, unpack_ids(opening.prompt), opening.wish)
            for token_ids in opening.read:
                reader.read(token_ids, is_last=False)
            self._readers[job.sequence] = reader
        if job.sequence not in self._readers:
            return TextDelta()  # tokens after a stop string
        delta = self._readers[job.sequence].read(job.token_ids, job.is_last)
        if job.is_last or delta.stop is not None or delta.error:
            del self._readers[job.sequence]
        return delta

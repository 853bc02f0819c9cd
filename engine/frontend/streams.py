"""Passes the outputs of a request from the engine's thread to the asyncio task that reads them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from engine.messages.params import OutputKind
from engine.messages.requests import CompletionOutput, RequestOutput

logger = logging.getLogger(__name__)

TOKEN_BYTES = 40  # an int and its list entry
LOGPROB_BYTES = 200  # a log-probability, its text and its dict entry
Sink = Callable[[RequestOutput], bool]


class OutputReader(NamedTuple):
    """Reads the outputs of one request. Use it in one event loop only."""

    stream: Stream
    close_stream: Callable[[Stream], None]

    async def next(self, sink: Sink | None = None) -> RequestOutput:
        """Wait for output; return all output since the last call as one. ``sink``: called with each
        new output; if it returns True, the wait goes on."""
        return await self.stream.next(sink)

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Yield all outputs up to the last. Leaving the loop early aborts the request."""
        try:
            while True:
                output = await self.next()
                yield output
                if output.finished:
                    return
        finally:
            self.close()

    def close(self) -> None:
        """Abort the request if it has not finished. Call it once."""
        self.close_stream(self.stream)


class Stream:
    """Holds the unread outputs of one request, merged into a single output.

    Belongs to one event loop; only ``post`` is thread-safe."""

    def __init__(self, loop: asyncio.AbstractEventLoop, request_id: str, kind: OutputKind) -> None:
        self.loop = loop
        self.context = contextvars.copy_context()
        """Context variables of the task that reads it."""
        self.request_id = request_id
        self.is_finished = False
        """True if the last output or an error has arrived."""
        self._kind = kind
        self._waiting: RequestOutput | None = None
        self._error: Exception | None = None
        self._arrived = asyncio.Event()
        self._sink: Sink | None = None

    def post(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` in the stream's event loop. Ignored if the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback)

    def put(self, output: RequestOutput) -> None:
        """Merge an output into those that the reader has not taken yet."""
        if self._error is not None:  # the request was dropped
            return
        waiting = self._waiting
        if waiting is None:
            if self._sink is not None and self._sink(output):
                return
        elif self._kind == "delta":
            output = merge_deltas(waiting, output)
        self._waiting = output
        self.is_finished = output.finished
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Raise ``error`` in the reader once it has read all outputs before the error."""
        if not self.is_finished:
            self.is_finished = True
            self._error = error
            self._arrived.set()

    def drop(self, error: Exception) -> None:
        """Discard unread outputs and raise ``error`` in the reader."""
        self._waiting = None
        self.fail(error)

    @property
    def num_unread_bytes(self) -> int:
        """Approximate memory of unread outputs, in bytes."""
        return 0 if self._waiting is None else sum(map(size_of, self._waiting.outputs))

    async def next(self, sink: Sink | None = None) -> RequestOutput:
        """Wait for output, and return everything since the last call merged into one output.

        While it waits, each new output is passed to ``sink``. If ``sink`` returns True, it has
        handled the output and the reader is not woken."""
        self._sink = sink
        try:
            await self._arrived.wait()
        finally:
            self._sink = None
        output, self._waiting = self._waiting, None
        if output is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._arrived.clear()
        return output


def size_of(completion: CompletionOutput) -> int:
    """Approximate memory of a completion, in bytes."""
    size = len(completion.text) + TOKEN_BYTES * len(completion.token_ids)
    for position in completion.logprobs or ():
        size += LOGPROB_BYTES * (1 + len(position))
    return size


def merge_deltas(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Merge two deltas into one; sequences are matched by index."""
    merged = {completion.index: completion for completion in first.outputs}
    for later in second.outputs:
        earlier = merged.get(later.index)
        merged[later.index] = later if earlier is None else _join(earlier, later)
    second.outputs = [merged[index] for index in sorted(merged)]
    if second.prompt_logprobs is None:
        second.prompt_logprobs = first.prompt_logprobs
    return second


def _join(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    second.text = first.text + second.text
    second.token_ids = first.token_ids + second.token_ids
    if first.logprobs is not None and second.logprobs is not None:
        second.logprobs = first.logprobs + second.logprobs
    return second


Deliveries = dict[asyncio.AbstractEventLoop, list[tuple[Stream, RequestOutput]]]


class Delivery:
    """A callable that delivers one step's outputs to the readers in one event loop. Its ``repr``
    hides the outputs, so that asyncio never logs users' texts."""

    def __init__(self, batch: list[tuple[Stream, RequestOutput]]) -> None:
        self._batch = batch

    def __call__(self) -> None:
        """Deliver the outputs. A stream that fails does not affect others."""
        for stream, output in self._batch:
            try:
                stream.put(output)
            except Exception as error:
                logger.exception("the reader of a request failed")
                stream.fail(error)

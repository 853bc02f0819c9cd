"""Outputs of one request on their way to the task that reads them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from engine.messages.outputs import CompletionOutput, RequestOutput
from engine.messages.params import OutputKind


class Stream:
    """A queue of one: what the reader has not taken yet is merged with what comes next.

    Belongs to one event loop; only ``post`` may be called from another thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, kind: OutputKind) -> None:
        self.loop = loop
        self.is_finished = False
        """The last output, or an error, has arrived."""
        self._kind = kind
        self._waiting: RequestOutput | None = None
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def post(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` in the stream's loop. If that is closed, the reader is gone."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback)

    def put(self, output: RequestOutput) -> None:
        """Add an output behind those that wait."""
        waiting = self._waiting
        if waiting is not None and self._kind == "delta":
            output = merge_deltas(waiting, output)
        self._waiting = output
        self.is_finished = output.finished
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Raise ``error`` in the reader, once it has taken what waits."""
        if not self.is_finished:
            self.is_finished = True
            self._error = error
            self._arrived.set()

    async def next(self) -> RequestOutput:
        """All that has come since the last call; waits until there is something."""
        await self._arrived.wait()
        output, self._waiting = self._waiting, None
        if output is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._arrived.clear()
        return output


def merge_deltas(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """One output with the news of both; nothing is lost, sequences are matched by index."""
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

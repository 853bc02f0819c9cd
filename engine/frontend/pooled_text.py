"""Texts that detokenizer processes make, as they come.

A sequence stays with one detokenizer, which knows its state. What was read is kept here too, so
that nothing is lost with a process: its replacement is told. Texts come in order for each sequence;
one that is slow holds up those of its own process only.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar

from engine.errors import EngineDeadError, RequestError, WireError
from engine.frontend.text_workers import MAX_DEATHS, Task, TextPool
from engine.ipc.frames import pack_ids
from engine.messages.text import Job, Opening, Read, Reply, TextDelta, TextWish

R = TypeVar("R")


class PooledText(Generic[R]):
    """The sequences whose text is made elsewhere, by their ids in the core. Of one thread.

    ``wake`` is called in another thread when texts have come. ``R`` is what comes back with them.
    """

    def __init__(self, pool: TextPool, wake: Callable[[], None]) -> None:
        self._queues = pool.detokenizers
        self._streams: dict[str, TextStream] = {}
        self._num_streams = [0] * len(self._queues)
        self._waiting: list[list[Task]] = [[] for _ in self._queues]
        self._numbers = count()
        self._come: deque[tuple[R, TextDelta | EngineDeadError]] = deque()
        self._has_come = threading.Event()
        notify = partial(_notify, self._come, self._has_come, wake)  # which keeps no pool alive
        for queue in self._queues:
            queue.notify = notify

    def __contains__(self, core_id: str) -> bool:
        return core_id in self._streams

    def open(self, core_id: str, prompt_token_ids: list[int], wish: TextWish) -> None:
        """A sequence to come: at the detokenizer with the least work, one that is down last."""
        loads = [
            (queue.is_down, num + queue.num_waiting)
            for queue, num in zip(self._queues, self._num_streams, strict=True)
        ]
        index = loads.index(min(loads))
        self._num_streams[index] += 1
        self._streams[core_id] = TextStream(next(self._numbers), index, prompt_token_ids, wish)

    def add(self, core_id: str, token_ids: list[int], is_last: bool, reading: R) -> None:
        """The next tokens of a sequence; they leave with the next ``send``."""
        stream = self._streams[core_id]
        deliver = partial(_deliver, self._come, reading)
        self._waiting[stream.queue_index].append(ReadTask(stream, token_ids, is_last, deliver))

    def send(self) -> None:
        """Send what was added. Raises ``EngineDeadError`` if there are no processes any more."""
        for index, tasks in enumerate(self._waiting):
            if tasks:
                self._waiting[index] = []
                self._queues[index].put(tasks)

    def take(self) -> list[tuple[R, TextDelta]]:
        """Texts that have come, in order for each sequence. Raises ``EngineDeadError``."""
        self._has_come.clear()
        texts: list[tuple[R, TextDelta]] = []
        while self._come:
            reading, text = self._come[0]
            if isinstance(text, EngineDeadError):
                if not texts:
                    raise EngineDeadError(str(text)) from text.__cause__
                break  # the next call raises it
            self._come.popleft()
            texts.append((reading, text))
        return texts

    def wait(self, seconds: float) -> bool:
        """Until texts have come, or ``wake`` was called; whether there are any."""
        self._has_come.wait(seconds)
        return bool(self._come)

    def wake(self) -> None:
        """End a ``wait``; may be called from any thread."""
        self._has_come.set()

    def forget(self, core_id: str) -> None:
        """It has ended: what is still to come of it does not matter."""
        stream = self._streams.pop(core_id, None)
        if stream is None:
            return
        self._num_streams[stream.queue_index] -= 1
        if not stream.is_over:  # its process is told
            self._waiting[stream.queue_index].append(ReadTask(stream, [], True, _ignore))


class TextStream:
    """What a detokenizer has read of a sequence. Of the thread that feeds the detokenizer."""

    def __init__(
        self, number: int, queue_index: int, prompt_token_ids: list[int], wish: TextWish
    ) -> None:
        self.number = number
        self.queue_index = queue_index
        self.is_over = False
        self._prompt_token_ids = prompt_token_ids
        self._wish = wish
        self._process_number = 0  # of the process that knows it
        self._read = array("i")  # ids whose text is known
        self._counts = array("i")  # how many of them were read at a time

    def opening(self, process_number: int) -> Opening | None:
        """What this process must be told first, if anything."""
        if process_number == self._process_number:
            return None
        self._process_number = process_number
        read, start = [], 0
        for num in self._counts:
            read.append(self._read[start : start + num].tolist())
            start += num
        return Opening(self._wish, pack_ids(self._prompt_token_ids), read)

    def note(self, token_ids: list[int]) -> None:
        """These were read."""
        self._read.extend(token_ids)
        self._counts.append(len(token_ids))


class ReadTask(Task):
    """The next tokens of a sequence, to be turned into text."""

    def __init__(
        self,
        stream: TextStream,
        token_ids: list[int],
        is_last: bool,
        deliver: Callable[[TextDelta | EngineDeadError], None],
    ) -> None:
        super().__init__(16 + 4 * len(token_ids), stream)
        self._stream = stream
        self._token_ids = token_ids
        self._is_last = is_last
        self._deliver = deliver

    def is_wanted(self) -> bool:  # nothing is read behind a stop string
        return not self._stream.is_over

    def job(self, process_number: int) -> Job:
        opening = self._stream.opening(process_number)
        return Read(self._stream.number, self._token_ids, self._is_last, opening)

    def result_of(self, reply: Reply) -> TextDelta:
        if not isinstance(reply, TextDelta):
            raise WireError(f"{reply!r:.80} is no text")
        return reply

    def finish(self, result: TextDelta | Exception) -> None:
        if isinstance(result, Exception) and not isinstance(result, EngineDeadError):
            result = TextDelta(error=str(result))
        if isinstance(result, TextDelta):
            self._stream.note(self._token_ids)
            if self._is_last or result.stop is not None or result.error:
                self._stream.is_over = True
        self._deliver(result)

    def death(self, how: str) -> RequestError:
        return RequestError(f"the detokenizer process died over its tokens, {MAX_DEATHS} times")


def _deliver(come: deque[Any], reading: object, text: TextDelta | EngineDeadError) -> None:
    come.append((reading, text))


def _ignore(text: TextDelta | EngineDeadError) -> None: ...


def _notify(come: deque[Any], has_come: threading.Event, wake: Callable[[], None]) -> None:
    if come and not has_come.is_set():
        has_come.set()
        wake()

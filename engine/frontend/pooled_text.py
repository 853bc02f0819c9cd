"""Outputs whose text is made by detokenizer processes.

PooledOutputs   output processor that waits for texts
PooledText      sends tokens of sequences to the processes and collects their texts

All tokens of a sequence go to the same detokenizer process. They are stored here too, so that a new
process can continue if the old one dies. The texts of a sequence arrive in order; a slow sequence
delays only others in the same process.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from operator import attrgetter

from engine.errors import EngineDeadError, RequestError, WireError
from engine.frontend.output import (
    Moved,
    OutputProcessor,
    Row,
    SequenceUpdate,
    outputs_of,
    reading_of,
    tokens_of,
)
from engine.frontend.text_workers import MAX_DEATHS, Task, TextPool
from engine.ipc.frames import pack_ids
from engine.messages.requests import CoreOutputs, RequestOutput
from engine.messages.text import Job, KnownText, Read, Reply, TextDelta, TextWish
from engine.text.detokenizer import wish_of
from engine.text.tokenizer import Tokenizer

Come = deque[tuple[SequenceUpdate, TextDelta | EngineDeadError]]


class PooledOutputs(OutputProcessor):
    """Output processor whose outputs wait for their texts. ``wake``: called when texts arrive."""

    _reads_here = False

    def __init__(self, tokenizer: Tokenizer, pool: TextPool, wake: Callable[[], None]) -> None:
        super().__init__(tokenizer)
        self._texts = PooledText(pool, wake)
        self._only_text: set[str] = set()  # core ids that ended in the core and lack only text

    @property
    def is_only_text_missing(self) -> bool:  # type: ignore[override]
        return 0 < len(self._only_text) == len(self._rows)

    def process(self, batch: CoreOutputs) -> list[RequestOutput]:
        outputs = super().process(batch)
        self._texts.send()
        return outputs

    def _process_rows(self, batch: CoreOutputs, moved: Moved) -> None:
        ends = {end.index: end for end in batch.finished}
        columns = zip(batch.request_ids, tokens_of(batch), strict=True)
        for index, (core_id, token_ids) in enumerate(columns):
            if (row := self._rows.get(core_id)) is not None:
                self._process_row(reading_of(batch, index, row, token_ids, ends.get(index)), moved)

    def _process_row(self, reading: SequenceUpdate, moved: Moved) -> None:
        if not reading.row.sequence.params.detokenize:
            super()._process_row(reading, moved)
        elif reading.token_ids or reading.end is not None:
            self._send(reading)

    def _send(self, reading: SequenceUpdate) -> None:
        """Send new tokens to the detokenizer, unless the request needs its text only at the end."""
        core_id, row, token_ids, logprobs, end, time = reading
        request, sequence = row
        if end is not None:
            self._only_text.add(core_id)
        if sequence.is_lazy:
            self._take(row, token_ids, logprobs, end, time)
            if end is None:
                return
            token_ids = sequence.token_ids
            reading = reading._replace(token_ids=[], logprobs=None)
        if core_id not in self._texts:
            self._texts.open(core_id, request.prompt_token_ids, wish_of(sequence.params))
        self._texts.add(core_id, sequence.readable(token_ids, end), end is not None, reading)

    def take_texts(self) -> list[RequestOutput]:
        moved: Moved = {}
        for reading, delta in self._texts.take():
            if reading.core_id in self._rows:  # no earlier text has ended it
                core_id, row, token_ids, logprobs, end, time = reading
                self._take(row, token_ids, logprobs, end, time)
                row.sequence.settle(delta, end)
                self._moved(core_id, row, end, time, moved)
        for sequences in moved.values():  # may be out of order: from several processes
            if len(sequences) > 1:
                sequences.sort(key=attrgetter("index"))
        return outputs_of(moved)

    def wait_for_texts(self, seconds: float) -> bool:
        return self._texts.wait(seconds)

    def wake(self) -> None:
        self._texts.wake()

    def abort(self, request_ids: Iterable[str], time: float) -> list[RequestOutput]:
        """Abort requests. A request whose text is still being made gets its last output later."""
        outputs = super().abort(request_ids, time)
        self._texts.send()
        return outputs + self.take_texts()

    def _abort(self, reading: SequenceUpdate, moved: Moved) -> None:
        if not reading.row.sequence.params.detokenize:
            super()._abort(reading, moved)
        elif reading.core_id not in self._only_text:
            self._send(reading)

    def drop(self, request_ids: Iterable[str], time: float) -> None:
        super().drop(request_ids, time)
        self._texts.send()

    def _stop_in_core(self, core_id: str) -> None:
        if core_id not in self._only_text:
            super()._stop_in_core(core_id)

    def _ended(self, core_id: str, row: Row, time: float) -> None:
        self._texts.forget(core_id)
        self._only_text.discard(core_id)
        super()._ended(core_id, row, time)


class PooledText:
    """Sequences whose texts detokenizer processes make, keyed by core id. Not thread-safe."""

    def __init__(self, pool: TextPool, wake: Callable[[], None]) -> None:
        self._queues = pool.detokenizers
        self._streams: dict[str, TextStream] = {}
        self._num_streams = [0] * len(self._queues)
        self._waiting: list[list[Task]] = [[] for _ in self._queues]
        self._numbers = count()
        self._come: Come = deque()
        self._has_come = threading.Event()
        notify = partial(_notify, self._come, self._has_come, wake)  # no reference to the pool
        for queue in self._queues:
            queue.notify = notify

    def __contains__(self, core_id: str) -> bool:
        return core_id in self._streams

    def open(self, core_id: str, prompt_token_ids: list[int], wish: TextWish) -> None:
        """Assign a new sequence to the detokenizer with the least work among those that run.
        ``wish``: how to make the text (stop strings, special tokens)."""
        loads = [
            (queue.is_down, num + queue.num_waiting)
            for queue, num in zip(self._queues, self._num_streams, strict=True)
        ]
        index = loads.index(min(loads))
        self._num_streams[index] += 1
        self._streams[core_id] = TextStream(next(self._numbers), index, prompt_token_ids, wish)

    def add(
        self, core_id: str, token_ids: list[int], is_last: bool, reading: SequenceUpdate
    ) -> None:
        """Queue tokens of a sequence until ``send`` sends them to its detokenizer process.
        ``reading``: the update that waits for their text."""
        stream = self._streams[core_id]
        deliver = partial(_deliver, self._come, reading)
        self._waiting[stream.queue_index].append(ReadTask(stream, token_ids, is_last, deliver))

    def send(self) -> None:
        """Send queued tokens. Raises ``EngineDeadError`` if the processes have been given up."""
        for index, tasks in enumerate(self._waiting):
            if tasks:
                self._waiting[index] = []
                self._queues[index].put(tasks)

    def take(self) -> list[tuple[SequenceUpdate, TextDelta]]:
        """Return the updates whose texts have arrived. Raises ``EngineDeadError`` if the
        detokenizer processes were given up."""
        self._has_come.clear()
        texts: list[tuple[SequenceUpdate, TextDelta]] = []
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
        """Wait up to ``seconds`` for texts, or until ``wake``. Returns True if there are texts."""
        self._has_come.wait(seconds)
        return bool(self._come)

    def wake(self) -> None:
        """End a ``wait``. Thread-safe."""
        self._has_come.set()

    def forget(self, core_id: str) -> None:
        """Drop a sequence that ended; its later texts are ignored."""
        stream = self._streams.pop(core_id, None)
        if stream is None:
            return
        self._num_streams[stream.queue_index] -= 1
        if not stream.is_over:  # the process must drop it, too
            self._waiting[stream.queue_index].append(ReadTask(stream, [], True, _ignore))


class TextStream:
    """The tokens of a sequence that its detokenizer process has read."""

    def __init__(
        self, number: int, queue_index: int, prompt_token_ids: list[int], wish: TextWish
    ) -> None:
        self.number = number
        self.queue_index = queue_index
        self.is_over = False
        self._prompt_token_ids = prompt_token_ids
        self._wish = wish
        self._process_number = 0  # of the process that holds its state
        self._read = array("i")  # token ids whose text was received
        self._counts = array("i")  # number of ids in each call

    def opening(self, process_number: int) -> KnownText | None:
        """Return what the detokenizer process must load before it can continue this sequence;
        ``None`` if it has done so already. Processes are numbered in the order of their starts."""
        if process_number == self._process_number:
            return None
        self._process_number = process_number
        read, start = [], 0
        for num in self._counts:
            read.append(self._read[start : start + num].tolist())
            start += num
        return KnownText(self._wish, pack_ids(self._prompt_token_ids), read)

    def note(self, token_ids: list[int]) -> None:
        """Record tokens that a detokenizer has read."""
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

    def is_wanted(self) -> bool:  # nothing is read after a stop string
        return not self._stream.is_over

    def job(self, process_number: int) -> Job:
        opening = self._stream.opening(process_number)
        return Read(self._stream.number, self._token_ids, self._is_last, opening)

    def result_of(self, reply: Reply) -> TextDelta:
        if not isinstance(reply, TextDelta):
            raise WireError(f"expected a text from the detokenizer, got {reply!r:.80}")
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


def _deliver(come: Come, reading: SequenceUpdate, text: TextDelta | EngineDeadError) -> None:
    come.append((reading, text))


def _ignore(text: TextDelta | EngineDeadError) -> None: ...


def _notify(come: Come, has_come: threading.Event, wake: Callable[[], None]) -> None:
    if come and not has_come.is_set():
        has_come.set()
        wake()

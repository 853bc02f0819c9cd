"""Columns from the core to objects for the user, a few microseconds a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter

from engine.errors import RequestError
from engine.frontend.logprobs import prompt_positions
from engine.frontend.pool_texts import PooledTexts, Reading
from engine.frontend.prompt import Submission
from engine.frontend.request_state import RequestState, Row
from engine.frontend.sequence import Sequence
from engine.messages.outputs import CoreOutputs, Finished, RequestOutput, Started
from engine.observe.stats_log import TokenCounts
from engine.text.tokenizer import Tokenizer

Moved = dict[RequestState, list[Sequence]]


class OutputProcessor:
    """Owns text, stop strings and log-probabilities of all unfinished requests.

    What the core still sends for requests that ended here is ignored: no other sequence ever has
    the core id of one that ended. With ``texts`` other processes turn tokens into text.
    """

    def __init__(self, tokenizer: Tokenizer | None, texts: PooledTexts | None = None) -> None:
        self.counts = TokenCounts()
        self._tokenizer = tokenizer
        self._texts = texts
        self._requests: dict[str, RequestState] = {}
        self._rows: dict[str, Row] = {}  # by the core's request id
        self._ended_here: list[str] = []  # core ids of sequences that the core must still abort
        self._only_text: set[str] = set()  # of rows: ended in the core, their text is missing

    @property
    def num_unfinished(self) -> int:
        """Requests whose last output is still to come."""
        return len(self._requests)

    @property
    def is_only_text_missing(self) -> bool:
        """Whether the core has ended all requests, and only texts are still to come."""
        return 0 < len(self._only_text) == len(self._rows)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def register(self, submission: Submission) -> None:
        """Expect outputs of these sequences. Raises ``RequestError`` for a user's id in use."""
        if submission.request_id in self._requests:
            raise RequestError(
                f"request id {submission.request_id!r} is in use by an unfinished request; choose "
                "another, or abort that one first"
            )
        live = RequestState(submission, self._tokenizer, self._texts is None)
        self._requests[submission.request_id] = live
        for core_id, sequence in zip(live.core_ids, live.sequences, strict=True):
            self._rows[core_id] = Row(live, sequence)

    def process(self, batch: CoreOutputs) -> list[RequestOutput]:
        """The outputs for users of one step."""
        for started in batch.started:
            self._start(batch.request_ids[started.index], started)
        ends = {end.index: end for end in batch.finished}
        moved: Moved = {}
        for index, (core_id, token_ids) in enumerate(_rows(batch)):
            row = self._rows.get(core_id)
            if row is None:
                continue
            if index in batch.prompt_logprobs:
                self._take_prompt_logprobs(row.request, batch, index)
            end = ends.get(index)
            if token_ids or end is not None:
                self._take(row, token_ids, batch, index, end)
                if self._texts is not None and self._is_read_elsewhere(row):
                    self._send(core_id, row, end, batch.time)
                else:
                    row.sequence.read(end)
                    if row.sequence.end is not None:
                        self._ended(core_id, row, end, batch.time)
                    moved.setdefault(row.request, []).append(row.sequence)
        return _outputs(moved) + self.take_texts(wait_for_all=False)

    def take_texts(self, wait_for_all: bool) -> list[RequestOutput]:
        """The outputs for users of texts that other processes have made."""
        if self._texts is None:
            return []
        moved: Moved = {}
        for reading, delta in self._texts.exchange(wait_for_all):
            core_id, row, _, end, time = reading
            if core_id in self._rows:  # no earlier text has ended it
                row.sequence.settle(delta, end)
                if row.sequence.end is not None:
                    self._ended(core_id, row, end, time)
                moved.setdefault(row.request, []).append(row.sequence)
        for sequences in moved.values():  # which may come from several processes
            sequences.sort(key=attrgetter("index"))
        return _outputs(moved)

    def abort(self, request_ids: Iterable[str], time: float) -> list[RequestOutput]:
        """End these requests now; unknown ids do nothing. Their last outputs say ``"abort"``."""
        outputs = self.take_texts(wait_for_all=True)  # what only waits for text has ended already
        aborted = Finished(0, "abort")
        moved: Moved = {}
        for request_id in dict.fromkeys(request_ids):
            request = self._requests.get(request_id)
            for core_id in request.core_ids if request else ():
                row = self._rows.get(core_id)
                if row is None:
                    continue
                self._ended_here.append(core_id)
                if self._is_read_elsewhere(row):
                    self._send(core_id, row, aborted, time)
                else:
                    row.sequence.read(aborted)
                    self._ended(core_id, row, aborted, time)
                    moved.setdefault(row.request, []).append(row.sequence)
        return outputs + _outputs(moved) + self.take_texts(wait_for_all=True)

    def withdraw(self, submission: Submission) -> list[str]:
        """Forget a request that was not taken. Returns its ids in the core."""
        request = self._requests.pop(submission.request_id)
        for core_id in request.core_ids:
            del self._rows[core_id]
        return request.core_ids

    def ended_here(self) -> list[str]:
        """Sequences that ended here and that the core must stop, by its ids."""
        return list(self._ended_here)

    def forget_ended_here(self) -> None:
        """The core was told of them."""
        self._ended_here.clear()

    def _start(self, core_id: str, started: Started) -> None:
        row = self._rows.get(core_id)
        if row is None:
            return
        request, sequence = row
        request.note(sequence.index, started)
        if request.metrics.scheduled_time is None:
            request.metrics.scheduled_time = started.scheduled_time
            request.num_cached_tokens = started.num_cached_tokens

    def _take_prompt_logprobs(self, request: RequestState, batch: CoreOutputs, index: int) -> None:
        request.prompt_logprobs = prompt_positions(
            batch.prompt_logprobs[index], len(request.prompt_token_ids), self._tokenizer
        )

    def _take(
        self,
        row: Row,
        token_ids: list[int],
        batch: CoreOutputs,
        index: int,
        end: Finished | None,
    ) -> None:
        """Append what a step brought, less its text."""
        request, sequence = row
        metrics = request.metrics
        if token_ids:
            if metrics.first_token_time is None:
                metrics.first_token_time = batch.time
                self.counts.prompt_tokens += len(request.prompt_token_ids)
            metrics.last_token_time = batch.time
            self.counts.generation_tokens += len(token_ids)
        sequence.take(token_ids, batch.logprobs.get(index))
        if end is not None:
            request.note(sequence.index, end)
            request.kv_transfer_params = end.kv_transfer_params or request.kv_transfer_params

    def _is_read_elsewhere(self, row: Row) -> bool:
        return self._texts is not None and row.sequence.params.detokenize

    def _send(self, core_id: str, row: Row, end: Finished | None, time: float) -> None:
        """Turn those tokens of a row into text that are needed now."""
        assert self._texts is not None
        if end is not None:
            self._only_text.add(core_id)
        if row.sequence.is_read_now(end):
            self._texts.add(Reading(core_id, row, row.sequence.unread(end), end, time))

    def _ended(self, core_id: str, row: Row, end: Finished | None, time: float) -> None:
        """The sequence has ended: by ``end``, or by its text (a stop string or an error)."""
        if end is None:
            self._ended_here.append(core_id)
        if self._texts is not None:
            self._texts.forget(row.sequence)
            self._only_text.discard(core_id)
        self._finish(core_id, row, time)

    def _finish(self, core_id: str, row: Row, time: float) -> None:
        request, sequence = row
        del self._rows[core_id]
        request.finish_one()
        if request.is_finished:
            assert sequence.end is not None
            request.metrics.finished_time = time
            self.counts.finished[sequence.end.reason] += 1
            del self._requests[request.request_id]


def _outputs(moved: Moved) -> list[RequestOutput]:
    outputs = (request.output(sequences) for request, sequences in moved.items())
    return [output for output in outputs if output is not None]


def _rows(batch: CoreOutputs) -> Iterator[tuple[str, list[int]]]:
    """Each request id with its new tokens."""
    if batch.counts is None:
        for core_id, token_id in zip(batch.request_ids, batch.token_ids, strict=True):
            yield core_id, [token_id]
        return
    start = 0
    for core_id, count in zip(batch.request_ids, batch.counts, strict=True):
        yield core_id, batch.token_ids[start : start + count]
        start += count

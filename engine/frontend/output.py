"""Columns from the core to objects for the user, a few microseconds a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from engine.errors import RequestError
from engine.frontend.logprobs import prompt_positions
from engine.frontend.parent import LiveRequest
from engine.frontend.prompt import Submission
from engine.frontend.sequence import Sequence
from engine.frontend.tokenizer import Tokenizer
from engine.messages.outputs import CoreOutputs, Finished, RequestOutput, Started
from engine.observe.stats_log import TokenCounts


class Row(NamedTuple):
    """Whom a row of the core's columns belongs to."""

    request: LiveRequest
    sequence: Sequence


class OutputProcessor:
    """Owns text, stop strings and log-probabilities of all unfinished requests.

    What the core still sends for requests that ended here is ignored.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.counts = TokenCounts()
        self._tokenizer = tokenizer
        self._requests: dict[str, LiveRequest] = {}
        self._rows: dict[str, Row] = {}  # by the core's request id
        self._ended_here: dict[str, LiveRequest] = {}  # likewise; the core does not know yet

    @property
    def num_unfinished(self) -> int:
        """Requests whose last output is still to come."""
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def register(self, submission: Submission) -> None:
        """Expect outputs for these sequences. Raises ``RequestError`` if an id is in use."""
        live = LiveRequest(submission, self._tokenizer)
        taken = [core_id for core_id in live.core_ids if core_id in self._rows]
        if submission.request_id in self._requests or taken:
            raise RequestError(
                f"request id {(taken or [submission.request_id])[0]!r} is in use by an unfinished "
                "request; choose another, or abort that one first"
            )
        self._requests[submission.request_id] = live
        for core_id, sequence in zip(live.core_ids, live.sequences, strict=True):
            self._rows[core_id] = Row(live, sequence)

    def process(self, batch: CoreOutputs) -> list[RequestOutput]:
        """What users get of one step."""
        for started in batch.started:
            self._start(batch.request_ids[started.index], started)
        ends = {end.index: end for end in batch.finished}
        moved: dict[LiveRequest, list[Sequence]] = {}
        for index, (core_id, token_ids) in enumerate(_rows(batch)):
            row = self._rows.get(core_id)
            if row is None:
                continue
            if index in batch.prompt_logprobs:
                self._take_prompt_logprobs(row.request, batch, index)
            end = ends.get(index)
            if token_ids or end is not None:
                self._advance(core_id, row, token_ids, batch, index, end)
                moved.setdefault(row.request, []).append(row.sequence)
        outputs = (request.output(sequences) for request, sequences in moved.items())
        return [output for output in outputs if output is not None]

    def abort(self, request_ids: Iterable[str], time: float) -> list[RequestOutput]:
        """End these requests now; unknown ids do nothing. Their last outputs say ``"abort"``."""
        outputs = []
        for request_id in dict.fromkeys(request_ids):
            request = self._requests.get(request_id)
            if request is None:
                continue
            core_ids = [core_id for core_id in request.core_ids if core_id in self._rows]
            output = request.output([self._end_by_abort(core_id, time) for core_id in core_ids])
            assert output is not None  # the last one always comes
            outputs.append(output)
        return outputs

    def withdraw(self, request_id: str) -> list[str]:
        """Forget a request that was not taken. Returns its ids in the core."""
        request = self._requests.pop(request_id)
        for core_id in request.core_ids:
            del self._rows[core_id]
        return request.core_ids

    def take_ended_here(self) -> dict[str, LiveRequest]:
        """Sequences that ended here since the last call, by the core's ids: it must stop them."""
        ended, self._ended_here = self._ended_here, {}
        return ended

    def _end_by_abort(self, core_id: str, time: float) -> Sequence:
        row = self._rows[core_id]
        row.sequence.advance([], None, Finished(0, "abort"))
        self._ended_here[core_id] = row.request
        self._finish(core_id, row, time)
        return row.sequence

    def _start(self, core_id: str, started: Started) -> None:
        row = self._rows.get(core_id)
        if row is None:
            return
        metrics = row.request.metrics
        if metrics.scheduled_time is None:
            metrics.scheduled_time = started.scheduled_time
            row.request.num_cached_tokens = started.num_cached_tokens

    def _take_prompt_logprobs(self, request: LiveRequest, batch: CoreOutputs, index: int) -> None:
        request.prompt_logprobs = prompt_positions(
            batch.prompt_logprobs[index], len(request.prompt_token_ids), self._tokenizer
        )

    def _advance(
        self,
        core_id: str,
        row: Row,
        token_ids: list[int],
        batch: CoreOutputs,
        index: int,
        end: Finished | None,
    ) -> None:
        request, sequence = row
        metrics = request.metrics
        if token_ids:
            if metrics.first_token_time is None:
                metrics.first_token_time = batch.time
                self.counts.prompt_tokens += len(request.prompt_token_ids)
            metrics.last_token_time = batch.time
            self.counts.generation_tokens += len(token_ids)
        sequence.advance(token_ids, batch.logprobs.get(index), end)
        if end is not None:
            request.note(end)
        if sequence.end is not None:
            if end is None:
                self._ended_here[core_id] = request
            self._finish(core_id, row, batch.time)

    def _finish(self, core_id: str, row: Row, time: float) -> None:
        request, sequence = row
        del self._rows[core_id]
        request.finish_one()
        if request.is_finished:
            assert sequence.end is not None
            request.metrics.finished_time = time
            self.counts.finished[sequence.end.reason] += 1
            del self._requests[request.request_id]


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

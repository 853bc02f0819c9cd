"""Turns the core's outputs into ``RequestOutput`` for users.

OutputProcessor   all unfinished requests
RequestState      one request: its n sequences, metrics and outputs
OutputSequence    one sequence: its tokens, its text up to a stop string, and why it ended
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

from engine.errors import RequestError
from engine.frontend.logprobs import Position, position_logprobs, prompt_positions
from engine.frontend.pace import QueuePace
from engine.frontend.prompt import Submission
from engine.messages.params import SamplingParams
from engine.messages.pooling import PooledColumns
from engine.messages.requests import (
    CompletionOutput,
    CoreOutputs,
    Finished,
    FinishedRequest,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    Started,
    TokenLogprobs,
    code_of,
)
from engine.messages.text import TextDelta
from engine.messages.vectors import Vectors, as_vectors
from engine.observe.histograms import Latencies
from engine.observe.stats_log import TokenCounts
from engine.text.detokenizer import StopStrings, TextReader, wish_of
from engine.text.tokenizer import Tokenizer


class OutputProcessor:
    """Makes the outputs of all unfinished requests: text, stop strings and log-probabilities.

    Ignores core outputs of a request that has already ended in this process; core ids are never
    used twice. The subclass ``PooledOutputs`` turns tokens into text in other processes."""

    is_only_text_missing = False
    """True if the core has finished all requests but other processes still make their texts."""
    _reads_here = True

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.counts = TokenCounts()
        self._latencies: Latencies | None = None
        self._between_tokens: list[float] | None = None  # the column of ``_latencies``
        self.on_finished: Callable[[FinishedRequest], None] | None = None
        """Called with each finished request, in the thread that calls ``process``."""
        self.on_ended: Callable[[str], object] | None = None
        """Called with the core's id of each sequence that has ended, likewise."""
        self.pace: QueuePace | None = None
        """Estimates waiting times; set if queues are limited. Other threads may read it."""
        self._tokenizer = tokenizer
        self._requests: dict[str, RequestState] = {}
        self._rows: dict[str, Row] = {}  # by the core's request id
        self._ended_here: list[str] = []  # core ids that the core must still abort

    @property
    def num_unfinished(self) -> int:
        """Number of requests whose last output has not been made yet."""
        return len(self._requests)

    def measure(self) -> Latencies:
        """Return the latency histograms, always the same object. The first call starts
        measuring."""
        if self._latencies is None:
            latencies = self._latencies = Latencies()
            self._between_tokens = latencies.between_tokens.column
        return self._latencies

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def core_ids(self, request_id: str) -> list[str]:
        """The core's ids of an unfinished request's sequences; [] for an unknown request."""
        return self._requests[request_id].core_ids if request_id in self._requests else []

    def register(self, submission: Submission) -> None:
        """Register a request before it goes to the core. Raises ``RequestError`` if its id is in
        use."""
        if submission.request_id in self._requests:
            raise RequestError(
                f"request_id {submission.request_id!r} is in use by an unfinished request; choose "
                "another id, or abort that request first",
                param="request_id",
                code="request_id_in_use",
            )
        live = RequestState(submission, self._tokenizer, self._reads_here)
        self._requests[submission.request_id] = live
        if self.pace is not None:
            self.pace.arrive()
        for core_id, sequence in zip(live.core_ids, live.sequences, strict=True):
            self._rows[core_id] = Row(live, sequence)

    def process(self, batch: CoreOutputs) -> list[RequestOutput]:
        """Process the core's outputs of one step. Returns outputs for users."""
        num_tokens = len(batch.token_ids)
        for started in batch.started:
            num_tokens += self._start(batch.request_ids[started.index], started)
        for index in batch.prompt_logprobs:
            self._take_prompt_logprobs(batch, index)
        if batch.pooled is not None:
            self._take_pooled(batch, batch.pooled)
        moved: Moved = {}
        self._process_rows(batch, moved)
        if self._latencies is not None:
            self._latencies.between_tokens.fold()
            if num_tokens:
                self._latencies.step_tokens.add(num_tokens)
        return outputs_of(moved)

    def _process_rows(self, batch: CoreOutputs, moved: Moved) -> None:
        """Process a step's outputs of all sequences, and add the changed requests to ``moved``.

        Sequences that only got tokens are processed in this loop, since calls would double the
        time."""
        rows, time, counts = self._rows, batch.time, self.counts
        ends = {end.index: end for end in batch.finished}
        has_more = {*ends, *batch.logprobs}  # rows with more than tokens
        seconds = self._between_tokens
        columns = zip(batch.request_ids, tokens_of(batch), strict=True)
        for index, (core_id, token_ids) in enumerate(columns):
            row = rows.get(core_id)
            if row is None:
                continue
            request, sequence = row
            metrics = request.metrics
            if index in has_more or metrics.first_token_time is None:
                self._process_row(reading_of(batch, index, row, token_ids, ends.get(index)), moved)
            elif token_ids:
                last, metrics.last_token_time = metrics.last_token_time, time
                if seconds is not None and last is not None and last != time:
                    seconds.append(time - last)
                counts.generation_tokens += len(token_ids)
                sequence.token_ids += token_ids
                if sequence.reader is not None and not sequence.is_lazy:
                    new_text = sequence.reader.next_text(token_ids)
                    if isinstance(new_text, str):
                        sequence.text += new_text
                    else:
                        sequence.settle(new_text, None)
                if not request.is_single or sequence.end is not None:
                    self._moved(core_id, row, None, time, moved)
                elif sequence.is_shown:
                    moved[request] = request.sequences

    def _process_row(self, reading: SequenceUpdate, moved: Moved) -> None:
        core_id, row, token_ids, logprobs, end, time = reading
        if not token_ids and end is None:
            return
        self._take(row, token_ids, logprobs, end, time)
        row.sequence.read(token_ids, end)
        self._moved(core_id, row, end, time, moved)

    def take_texts(self) -> list[RequestOutput]:
        """Return the outputs whose text other processes have detokenised since the last call."""
        return []

    def wait_for_texts(self, seconds: float) -> bool:
        """Wait until other processes have detokenised text, ``wake`` is called, or ``seconds`` have
        passed. Returns True if there is text."""
        return False

    def wake(self) -> None:
        """Let a blocked ``wait_for_texts`` return. Thread-safe."""

    def abort(self, request_ids: Iterable[str], time: float) -> list[RequestOutput]:
        """End these requests with finish reason "abort". Unknown ids are ignored. Returns their
        last outputs."""
        moved: Moved = {}
        for reading in self._endings(request_ids, time):
            self._stop_in_core(reading.core_id)
            self._abort(reading, moved)
        return outputs_of(moved)

    def _abort(self, reading: SequenceUpdate, moved: Moved) -> None:
        reading.row.sequence.read([], reading.end)
        self._moved(reading.core_id, reading.row, reading.end, reading.time, moved)

    def drop(self, request_ids: Iterable[str], time: float) -> None:
        """End these requests without further output. Unknown ids are ignored."""
        for reading in self._endings(request_ids, time):
            self._stop_in_core(reading.core_id)
            reading.row.sequence.end = reading.end
            self._ended(reading.core_id, reading.row, time)

    def _endings(self, request_ids: Iterable[str], time: float) -> Iterator[SequenceUpdate]:
        """Yield an update with finish reason "abort" for each unfinished sequence."""
        for request_id in dict.fromkeys(request_ids):
            request = self._requests.get(request_id)
            for core_id in request.core_ids if request else ():
                if core_id in self._rows:
                    end = Finished(0, "abort")
                    yield SequenceUpdate(core_id, self._rows[core_id], [], None, end, time)

    def withdraw(self, submission: Submission) -> list[str]:
        """Remove a request that the core refused. Returns the core's ids of its sequences."""
        request = self._requests.pop(submission.request_id)
        if self.pace is not None:
            self.pace.leave(has_started=False)
        for core_id in request.core_ids:
            del self._rows[core_id]
        return request.core_ids

    def ended_here(self) -> list[str]:
        """Core ids of sequences that have ended in this process, for instance at a stop string, but
        not yet in the core."""
        return list(self._ended_here)

    def forget_ended_here(self) -> None:
        """Clear the list that ``ended_here`` returns, once the core has stopped these sequences."""
        self._ended_here.clear()

    def _start(self, core_id: str, started: Started) -> int:
        """Record that the core has started a sequence. Returns the request's prompt length if no
        other sequence of the request started before, otherwise 0."""
        row = self._rows.get(core_id)
        if row is None:
            return 0
        request, sequence = row
        request.note(sequence.index, started)
        if request.metrics.scheduled_time is None:
            request.metrics.scheduled_time = started.scheduled_time
            request.num_cached_tokens = started.num_cached_tokens
            request.metrics.prefix_end = started.prefix_end
            request.metrics.prefix_evicted = started.prefix_evicted
            return len(request.prompt_token_ids)
        return 0

    def _take_pooled(self, batch: CoreOutputs, pooled: PooledColumns) -> None:
        """Store the results of pooled requests, which end in this batch."""
        for index, width, values in pooled.entries():
            row = self._rows.get(batch.request_ids[index])
            if row is None or (params := row.request.pooling) is None:
                continue
            row.request.pooled = as_vectors(values, width, by_token=params.is_by_token)
            self._note_first(row.request, batch.time)

    def _take_prompt_logprobs(self, batch: CoreOutputs, index: int) -> None:
        row = self._rows.get(batch.request_ids[index])
        if row is not None:
            row.request.prompt_logprobs = prompt_positions(
                batch.prompt_logprobs[index], len(row.request.prompt_token_ids), self._tokenizer
            )

    def _take(
        self,
        row: Row,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        end: Finished | None,
        time: float,
    ) -> None:
        """Append a step's tokens and log-probabilities to a sequence, without text; update
        metrics."""
        request, sequence = row
        if token_ids:
            metrics, last = request.metrics, request.metrics.last_token_time
            if metrics.first_token_time is None:
                self._note_first(request, time)
            elif self._latencies is not None and last is not None and last != time:
                self._latencies.between_tokens.add(time - last)
            metrics.last_token_time = time
            self.counts.generation_tokens += len(token_ids)
            sequence.token_ids += token_ids
        if logprobs is not None:
            sequence.take_logprobs(logprobs)
        if end is not None:
            request.note(sequence.index, end)
            request.kv_transfer_params = end.kv_transfer_params or request.kv_transfer_params

    def _note_first(self, request: RequestState, time: float) -> None:
        """Count a request's first token, or its pooled result."""
        request.metrics.first_token_time = time
        if self.pace is not None:
            self.pace.start(time)
        self.counts.prompt_tokens += len(request.prompt_token_ids)
        if self._latencies is not None:
            self._latencies.first_token.add(time - request.metrics.arrival_time)

    def _moved(
        self, core_id: str, row: Row, end: Finished | None, time: float, moved: Moved
    ) -> None:
        """Add a sequence with new output for the user to ``moved``; finish it if it has ended."""
        request, sequence = row
        if sequence.end is None and not sequence.is_shown:
            return
        if request.is_single:
            moved[request] = request.sequences
        elif sequence not in (sequences := moved.setdefault(request, [])):
            sequences.append(sequence)
        if sequence.end is not None:
            if end is None:
                self._stop_in_core(core_id)
            self._ended(core_id, row, time)

    def _stop_in_core(self, core_id: str) -> None:
        self._ended_here.append(core_id)

    def _ended(self, core_id: str, row: Row, time: float) -> None:
        request, sequence = row
        del self._rows[core_id]
        if self.on_ended is not None:
            self.on_ended(core_id)
        request.finish_one()
        if request.is_finished:
            assert sequence.end is not None
            request.metrics.finished_time = time
            if self.pace is not None:
                self.pace.leave(has_started=request.metrics.first_token_time is not None)
            self.counts.finished[sequence.end.reason] += 1
            del self._requests[request.request_id]
            if self.on_finished is not None:
                self.on_finished(request.finished(sequence.end.reason))


class SequenceUpdate(NamedTuple):
    """What one step added to one sequence."""

    core_id: str
    row: Row
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    end: Finished | None
    time: float  # end of the step, on the core's clock


class Row(NamedTuple):
    """The request and sequence that an entry of the core's outputs belongs to."""

    request: RequestState
    sequence: OutputSequence


def reading_of(
    batch: CoreOutputs, index: int, row: Row, token_ids: list[int], end: Finished | None
) -> SequenceUpdate:
    """Extract the update of one sequence from a step's outputs. ``index``: place in ``batch``."""
    logprobs = batch.logprobs.get(index)
    return SequenceUpdate(batch.request_ids[index], row, token_ids, logprobs, end, batch.time)


def outputs_of(moved: Moved) -> list[RequestOutput]:
    """The outputs that are due for these requests. ``moved`` maps each request to its sequences
    that have changed."""
    outputs = [request.output(sequences) for request, sequences in moved.items()]
    return [output for output in outputs if output is not None]


def tokens_of(batch: CoreOutputs) -> list[list[int]]:
    """The new token ids of each row."""
    if batch.counts is None:
        return [[token_id] for token_id in batch.token_ids]
    ends = accumulate(batch.counts)
    return [batch.token_ids[end - num : end] for num, end in zip(batch.counts, ends, strict=True)]


class RequestState:
    """Combines the n sequences of a request into outputs of the requested kind.

    cumulative: all sequences, whole. delta: the new parts of changed sequences. final: all
    sequences, once the last has finished. ``reads_here``: text is made in this process."""

    __slots__ = (
        "_num_running", "_reports", "adapter", "core_ids", "is_single", "kind",
        "kv_transfer_params", "metrics", "num_cached_tokens", "pooled", "pooling", "prompt",
        "prompt_logprobs", "prompt_token_ids", "request_id", "sequences",
    )  # fmt: skip

    def __init__(
        self, submission: Submission, tokenizer: Tokenizer | None, reads_here: bool
    ) -> None:
        self.request_id = submission.request_id
        self.core_ids = [request.request_id for request in submission.requests]
        self.prompt = submission.prompt
        self.adapter = submission.requests[0].adapter
        self.prompt_token_ids = submission.prompt_token_ids
        self.kind = submission.params.output_kind
        self.sequences = [
            OutputSequence(
                index,
                submission.params,
                tokenizer,
                _reader(submission, tokenizer) if reads_here else None,
            )
            for index in range(submission.params.n)
        ]
        self.is_single = len(self.sequences) == 1  # cached: read in each step
        self._num_running = len(self.sequences)
        self._reports: dict[int, Started | Finished] = {}  # latest, by index of the sequence
        self.metrics = RequestMetrics(submission.arrival_time)
        """Metrics so far; outputs get copies."""
        self.num_cached_tokens = 0
        self.kv_transfer_params: dict[str, Any] | None = None
        self.prompt_logprobs: list[Position | None] | None = None
        self.pooling = submission.requests[0].pooling
        self.pooled: Vectors | None = None

    @property
    def is_finished(self) -> bool:
        return self._num_running == 0

    def finish_one(self) -> None:
        """Count one more finished sequence of the request."""
        self._num_running -= 1

    def note(self, index: int, report: Started | Finished) -> None:
        """Store the latest report on the sequence ``index``, and update the request's metrics,
        which are sums over its sequences."""
        self._reports[index] = report
        metrics, every = self.metrics, self._reports.values()
        metrics.num_preemptions = sum(each.num_preemptions for each in every)
        waits: dict[str, float] = {}
        for each in every:
            for cause, seconds in each.waits.items():
                waits[cause] = waits.get(cause, 0.0) + seconds
        metrics.waits = waits
        counters: dict[str, int] = {}
        for end in every:
            if not isinstance(end, Finished):
                continue
            for name, num in end.counters.items():
                counters[name] = counters.get(name, 0) + num
        metrics.counters = counters
        metrics.events = sorted((e for each in every for e in each.events), key=itemgetter(1))

    def finished(self, reason: FinishReason) -> FinishedRequest:
        """Summary of the finished request."""
        return FinishedRequest(
            self.request_id,
            self.sequences[0].params,
            reason,
            len(self.prompt_token_ids),
            self.num_cached_tokens,
            sum(len(sequence.token_ids) for sequence in self.sequences),
            self.metrics.__copy__(),  # type: ignore[attr-defined]
            self.adapter,
            self.pooling,
        )

    def output(self, moved: Sequence[OutputSequence]) -> RequestOutput | None:
        """Make the request's output for the user, after the sequences in ``moved`` have changed.
        ``None`` for a "final" request that has not finished."""
        finished = self._num_running == 0
        if self.kind == "delta":
            completions = (
                [moved[0].delta()] if len(moved) == 1 else [each.delta() for each in moved]
            )
        elif self.kind == "final" and not finished:
            return None
        else:
            completions = [sequence.output() for sequence in self.sequences]
        output = RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            completions,
            finished,
            self.prompt_logprobs,
            self.num_cached_tokens,
            self.metrics.__copy__(),  # type: ignore[attr-defined] # copy() searches for it
            self.kv_transfer_params,
            self.pooled,
        )
        if self.kind == "delta":
            self.prompt_logprobs = None  # sent once
        return output


class OutputSequence:
    """The tokens and text of one sequence. It grows until ``end`` is set by the core, or by a stop
    string in the text.

    Tokens are appended in each step, and ``read`` turns them into text. If other processes make the
    text, tokens and text are appended when the text arrives."""

    __slots__ = (
        "_num_held_back", "_num_sent_tokens", "_tokenizer", "cumulative_logprob", "end", "index",
        "is_lazy", "is_shown", "logprobs", "params", "reader", "text", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        reader: TextReader | None,
    ) -> None:
        self.index = index
        self.params = params
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[Position] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.end: Finished | None = None
        self._tokenizer = tokenizer
        self.reader = reader
        # Characters at the end that may be the beginning of a stop string are not output yet.
        self._num_held_back = 0
        if params.stop:
            stops = StopStrings(params.stop, params.include_stop_str_in_output)
            self._num_held_back = stops.num_held_back
        self.is_lazy = not params.stop and params.output_kind == "final"
        """True if text is made once at the end, since none is output earlier."""
        self.is_shown = params.output_kind != "final"
        """True if the sequence is output before its end."""
        self._num_sent_tokens = 0

    def take_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        """Append log-probabilities if they were requested."""
        if self.logprobs is not None:
            self.logprobs += [position_logprobs(entry, self._tokenizer) for entry in logprobs]
            self.cumulative_logprob += sum(entry.logprobs[0] for entry in logprobs)

    def readable(self, token_ids: list[int], end: Finished | None) -> list[int]:
        """The tokens to turn into text: ``token_ids``, without a final stop token unless the
        request wants it in the text."""
        is_stopped = end is not None and end.reason == "stop"
        if is_stopped and not self.params.include_stop_str_in_output:
            return token_ids[:-1]
        return token_ids

    def read(self, token_ids: list[int], end: Finished | None) -> None:
        """Turn appended tokens into text. ``end``: the core's reason to end the sequence, if
        any."""
        if self.reader is None:
            self.end = end
        elif end is not None or not self.is_lazy:
            token_ids = self.readable(self.token_ids if self.is_lazy else token_ids, end)
            self.settle(self.reader.read(token_ids, end is not None), end)

    def settle(self, delta: TextDelta, end: Finished | None) -> None:
        """Append text that a detokenizer made, and end the sequence if the text has a stop string.
        ``end``: why the core ended the sequence, ``None`` if it runs."""
        self.end = end
        if delta.stop is not None:
            self._stop_at(delta.stop, delta)
        elif delta.error:
            self.end = Finished(0, "error", message=delta.error)
        self.text += delta.text

    def output(self) -> CompletionOutput:
        """The sequence so far."""
        held = self._num_held_back if self.end is None else 0
        return self._completion(self.text[:-held] if held else self.text, 0)

    def delta(self) -> CompletionOutput:
        """The tokens and text since the last call. Text that was returned is not stored."""
        text, held = self.text, self._num_held_back if self.end is None else 0
        self.text = text[-held:] if held else ""
        completion = self._completion(text[:-held] if held else text, self._num_sent_tokens)
        self._num_sent_tokens = len(self.token_ids)
        return completion

    def _completion(self, text: str, first_token: int) -> CompletionOutput:
        end, logged, token_ids = self.end, self.logprobs, self.token_ids[first_token:]
        if end is None and logged is None:
            return CompletionOutput(self.index, text, token_ids)
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            None if logged is None else self.cumulative_logprob,
            None if logged is None else logged[first_token:],
            None if end is None else end.reason,
            None if end is None else end.stop_reason,
            None if end is None else end.message or None,
            None if end is None else code_of(end.reason, end.code),
        )

    def _stop_at(self, string: str, delta: TextDelta) -> None:
        self.text = self.text[: len(self.text) - delta.num_dropped]
        del self.token_ids[delta.num_tokens :]
        if self.logprobs is not None:
            cut = self.logprobs[delta.num_tokens :]
            self.cumulative_logprob -= sum(next(iter(p.values())).logprob for p in cut)
            del self.logprobs[delta.num_tokens :]
        self.end = Finished(0, "stop", string)


Moved = dict[RequestState, list[OutputSequence]]


def _reader(submission: Submission, tokenizer: Tokenizer | None) -> TextReader | None:
    if tokenizer is None or not submission.params.detokenize:
        return None
    return TextReader(tokenizer.backend, submission.prompt_token_ids, wish_of(submission.params))

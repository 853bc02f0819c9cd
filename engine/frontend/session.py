"""The front end around one core: checked requests in, outputs for users out.

Synchronous and asynchronous engines are this, driven by the caller or by a thread. Not thread-safe:
``submit``, ``step`` and ``abort`` belong to one thread, ``inputs`` may be used by another.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from types import FrameType, TracebackType
from typing import Literal, NamedTuple

from engine.config.decide import Decided
from engine.config.engine import EngineConfig
from engine.core.client import CoreClient
from engine.errors import EngineDeadError, RequestError
from engine.frontend.output import OutputSequence, RequestState, Row, prompt_positions
from engine.frontend.pooled_text import PooledText
from engine.frontend.prompt import InputProcessor, Limits, Submission
from engine.frontend.text_workers import TextPool
from engine.hub.fetch import fetched
from engine.messages.requests import (
    CoreOutputs,
    Finished,
    RequestOutput,
    Started,
    TokenLogprobs,
)
from engine.messages.wire import Welcome
from engine.observe.logs import set_up_logging
from engine.observe.stats_log import StatsLog, TokenCounts
from engine.rpc.launch import open_core
from engine.text.detokenizer import wish_of
from engine.text.tokenizer import Tokenizer, load_tokenizer

PauseScope = Literal["all", "new"]
Moved = dict[RequestState, list[OutputSequence]]

TEXT_SECONDS = 0.1  # that ``step`` waits for texts


class Session:
    """Tokenizer, request checks, outputs and log line of one core."""

    def __init__(
        self,
        config: EngineConfig,
        client: CoreClient,
        tokenizer: Tokenizer | None,
        clock: Callable[[], float],
        pool: TextPool | None = None,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.inputs = InputProcessor(
            tokenizer, _limits(config, client.decided, tokenizer), clock, client.id_prefix, pool
        )
        self._texts = None if pool is None else PooledText[Reading](pool, client.wake)
        self.outputs = OutputProcessor(tokenizer, self._texts)
        self._pool = pool
        self.clock = clock
        self._stats_log: StatsLog | None = None
        if not config.disable_log_stats:
            self._stats_log = StatsLog(self.outputs.counts, client.latest_stats, clock)

    @classmethod
    def open(cls, config: EngineConfig) -> Session:
        """Load what ``config`` asks for; the tokenizer first, since it fails sooner than the core.

        A model given by name is fetched before; with a core elsewhere only what is needed here.
        Raises ``ConfigError`` for what cannot work.
        """
        set_up_logging(config.log_level)
        is_here, has_text = not config.core.core_addresses, not config.model.skip_tokenizer_init
        model = fetched(config.model, for_core=is_here, for_text=has_text)
        config = replace(config, model=model)
        tokenizer = None if config.model.skip_tokenizer_init else load_tokenizer(config.model)
        pool = None
        if tokenizer is not None and config.tokenizer_pool_size:
            pool = TextPool(config.model, config.tokenizer_pool_size)
        try:
            client = open_core(config)
            if pool is not None:
                pool.wait_until_ready()
        except BaseException:
            if pool is not None:
                pool.close()
            raise
        return cls(config, client, tokenizer, time.monotonic, pool)

    @property
    def has_unfinished(self) -> bool:
        return self.outputs.num_unfinished > 0

    def submit(self, submission: Submission) -> None:
        """Give a checked request to the core: all its sequences, or none and it raises."""
        for error in self.submit_all([submission]).values():
            raise error

    def submit_all(self, submissions: Sequence[Submission]) -> dict[int, Exception]:
        """Give checked requests to the core, in one go. Returns by index why some were not taken.

        A request is taken whole or, with an error, not at all.
        """
        errors: dict[int, Exception] = {}
        asked: dict[int, Submission] = {}
        for place, submission in enumerate(submissions):
            try:
                self.outputs.register(submission)
            except RequestError as error:
                errors[place] = error
            else:
                asked[place] = submission
        return errors | self._add(asked)

    def _add(self, asked: dict[int, Submission]) -> dict[int, Exception]:
        """Add what is registered."""
        owners = [place for place, each in asked.items() for _ in each.requests]
        requests = [request for each in asked.values() for request in each.requests]
        try:
            refused = self.client.add_all(requests)
        except BaseException:  # an interrupt: some may have been taken
            core_ids = [i for each in asked.values() for i in self.outputs.withdraw(each)]
            with suppress(EngineDeadError):
                self.client.abort(core_ids)
            raise
        errors: dict[int, Exception] = {}
        for index in sorted(refused):
            errors.setdefault(owners[index], refused[index])
        core_ids = [i for place in errors for i in self.outputs.withdraw(asked[place])]
        not_taken = {requests[index].request_id for index in refused}
        if taken := [core_id for core_id in core_ids if core_id not in not_taken]:
            self.client.abort(taken)
        return errors

    def step(self) -> list[RequestOutput]:
        """Run one step of the core and return what it means for users.

        With text processes: and what earlier steps mean, whose texts have come. If only texts are
        still to come, waits a moment for some.
        """
        outputs: list[RequestOutput] = []
        if self._texts is not None and self.outputs.is_only_text_missing:
            self._texts.wait(TEXT_SECONDS)
        else:
            for batch in self._step_core():
                outputs += self.outputs.process(batch)
        outputs += self.outputs.take_texts()
        with suppress(EngineDeadError):  # a later call raises it; these outputs are not lost
            self._stop_in_core()
            if self._stats_log is not None:
                self._stats_log.after_step(is_idle=not self.has_unfinished)
        return outputs

    def wake(self) -> None:
        """Let a ``step`` that waits return soon; may be called from any thread."""
        if self._texts is not None:
            self._texts.wake()
        self.client.wake()

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Stop these requests; unknown ids do nothing. Returns their last outputs, but for those
        whose text is still to come: theirs come from ``step``."""
        outputs = self.outputs.abort(request_ids, self.clock())
        self._stop_in_core()
        return outputs

    def drop(self, request_ids: Iterable[str]) -> None:
        """Stop these requests, without any further output; unknown ids do nothing."""
        self.outputs.drop(request_ids, self.clock())
        self._stop_in_core()

    def shutdown(self) -> None:
        """End the core and the text processes; harmless when repeated."""
        self.inputs.texts.close()
        self.client.shutdown()
        if self._pool is not None:
            self._pool.close()

    def _step_core(self) -> list[CoreOutputs]:
        """If the core has died, texts of what it did before are not lost: a later call raises."""
        try:
            return self.client.step()
        except EngineDeadError:
            if self._texts is None or not self._texts.wait(TEXT_SECONDS):
                raise
            return []

    def _stop_in_core(self) -> None:
        """Abort in the core what ended here. After an interrupt the next call does it (again)."""
        if ended := self.outputs.ended_here():
            self.client.abort(ended)
            self.outputs.forget_ended_here()


class Reading(NamedTuple):
    """What a step brought to a sequence. With ``texts`` it waits there for its text."""

    core_id: str
    row: Row
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    end: Finished | None
    time: float  # of the step, on the core's clock


class OutputProcessor:
    """Owns text, stop strings and log-probabilities of all unfinished requests.

    What the core still sends for requests that ended here is ignored: no other sequence ever has
    the core id of one that ended. With ``texts`` other processes turn tokens into text; a sequence
    then moves when its text comes, by one step of the core or by several.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, texts: PooledText[Reading] | None = None
    ) -> None:
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
                logprobs = batch.logprobs.get(index)
                reading = Reading(core_id, row, token_ids, logprobs, end, batch.time)
                if self._texts is not None and row.sequence.params.detokenize:
                    self._send(self._texts, reading)
                else:
                    self._take(reading)
                    row.sequence.read(end)
                    self._moved(reading, moved)
        if self._texts is not None:
            self._texts.send()
        return _outputs(moved)

    def take_texts(self) -> list[RequestOutput]:
        """The outputs for users of texts that other processes have made."""
        moved: Moved = {}
        for reading, delta in () if self._texts is None else self._texts.take():
            if reading.core_id in self._rows:  # no earlier text has ended it
                self._take(reading)
                reading.row.sequence.settle(delta, reading.end)
                self._moved(reading, moved)
        for sequences in moved.values():  # which may come from several processes
            sequences.sort(key=attrgetter("index"))
        return _outputs(moved)

    def abort(self, request_ids: Iterable[str], time: float) -> list[RequestOutput]:
        """End these requests now; unknown ids do nothing. Their last outputs say ``"abort"``.

        Those whose text is made elsewhere get them when it has come.
        """
        moved: Moved = {}
        for reading in self._endings(request_ids, time):
            self._ended_here.append(reading.core_id)
            if self._texts is not None and reading.row.sequence.params.detokenize:
                self._send(self._texts, reading)
            else:
                reading.row.sequence.read(reading.end)
                self._moved(reading, moved)
        if self._texts is not None:
            self._texts.send()
        return _outputs(moved) + self.take_texts()

    def drop(self, request_ids: Iterable[str], time: float) -> None:
        """End these requests now, without any further output; unknown ids do nothing."""
        for reading in self._endings(request_ids, time, with_unread=True):
            if reading.core_id not in self._only_text:
                self._ended_here.append(reading.core_id)
            reading.row.sequence.end = reading.end
            self._ended(reading)
        if self._texts is not None:
            self._texts.send()

    def _endings(
        self, request_ids: Iterable[str], time: float, with_unread: bool = False
    ) -> Iterator[Reading]:
        """The end of each sequence of these requests; ``with_unread``: of those too that have
        ended but for their text."""
        for request_id in dict.fromkeys(request_ids):
            request = self._requests.get(request_id)
            for core_id in request.core_ids if request else ():
                if core_id in self._rows and (with_unread or core_id not in self._only_text):
                    end = Finished(0, "abort")
                    yield Reading(core_id, self._rows[core_id], [], None, end, time)

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

    def _take(self, reading: Reading) -> None:
        """Append what a step brought, less its text."""
        _, (request, sequence), token_ids, logprobs, end, time = reading
        metrics = request.metrics
        if token_ids:
            if metrics.first_token_time is None:
                metrics.first_token_time = time
                self.counts.prompt_tokens += len(request.prompt_token_ids)
            metrics.last_token_time = time
            self.counts.generation_tokens += len(token_ids)
        sequence.take(token_ids, logprobs)
        if end is not None:
            request.note(sequence.index, end)
            request.kv_transfer_params = end.kv_transfer_params or request.kv_transfer_params

    def _send(self, texts: PooledText[Reading], reading: Reading) -> None:
        """Have the text made that is needed now; the rest follows when it has come."""
        core_id, (request, sequence), token_ids, _, end, _ = reading
        if end is not None:
            self._only_text.add(core_id)
        if sequence.is_lazy:
            self._take(reading)
            if end is None:
                return
            token_ids = sequence.token_ids
            reading = reading._replace(token_ids=[], logprobs=None)
        if core_id not in texts:
            texts.open(core_id, request.prompt_token_ids, wish_of(sequence.params))
        texts.add(core_id, sequence.readable(token_ids, end), end is not None, reading)

    def _moved(self, reading: Reading, moved: Moved) -> None:
        """A sequence has new text, or has ended: by the core, a stop string or an error."""
        sequences = moved.setdefault(reading.row.request, [])
        if reading.row.sequence not in sequences:
            sequences.append(reading.row.sequence)
        if reading.row.sequence.end is not None:
            if reading.end is None and reading.core_id not in self._only_text:
                self._ended_here.append(reading.core_id)
            self._ended(reading)

    def _ended(self, reading: Reading) -> None:
        core_id, (request, sequence), _, _, _, time = reading
        if self._texts is not None:
            self._texts.forget(core_id)
            self._only_text.discard(core_id)
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


def _limits(
    config: EngineConfig, decided: Decided | Welcome, tokenizer: Tokenizer | None
) -> Limits:
    eos = list(decided.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos.append(tokenizer.eos_token_id)
    return Limits(
        max_model_len=decided.max_model_len,
        vocab_size=decided.vocab_size,
        eos_token_ids=tuple(i for i in dict.fromkeys(eos) if 0 <= i < decided.vocab_size),
        scheduling_policy=config.scheduler.scheduling_policy,
        seed=config.model.seed,
    )


class HeldInterrupt:
    """Inside, an interrupt is only noted; ``KeyboardInterrupt`` is raised on leaving.

    Does nothing outside the main thread and where the program handles interrupts itself.
    """

    def __init__(self) -> None:
        self._is_holding = False
        self._is_noted = False

    def __enter__(self) -> HeldInterrupt:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            signal.signal(signal.SIGINT, self._note)
            self._is_holding = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_holding:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._is_noted and error is None:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_noted = True

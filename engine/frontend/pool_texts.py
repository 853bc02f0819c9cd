"""Sequences whose text is made in detokenizer processes.

A sequence stays with one detokenizer. The front end keeps its tokens, so that nothing is lost when
a detokenizer dies: its replacement gets the tokens already read, and the rest is sent again. A text
that is needed in this step is waited for; texts that are shown only at the end may come later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from itertools import count, islice
from operator import attrgetter
from typing import NamedTuple

from engine.errors import EngineDeadError, EngineError, RefusedError
from engine.frontend.output import OutputSequence, Row, Unread
from engine.frontend.pool import TextPool
from engine.frontend.pool_slot import MAX_DEATHS, RETRY_SECONDS
from engine.frontend.pool_tasks import TextsLost
from engine.messages.requests import Finished
from engine.messages.text import Opening, TextDelta, TextRow, TextWish
from engine.text.detokenizer import wish_of


class Reading(NamedTuple):
    """Tokens whose text is still to come, and what came with them."""

    core_id: str
    row: Row
    unread: Unread
    end: Finished | None
    time: float  # of the step, on the core's clock

    @property
    def is_awaited(self) -> bool:
        """The text is shown as soon as it is there, or may end its sequence by a stop string."""
        params = self.row.sequence.params
        return params.output_kind != "final" or bool(params.stop)


class ReadText(NamedTuple):
    """Tokens with their text."""

    reading: Reading
    delta: TextDelta


class Remote:
    """The state of a sequence: what its detokenizer must know, and what it knows."""

    def __init__(self, number: int, prompt_token_ids: list[int], wish: TextWish) -> None:
        self.number = number
        self.prompt_token_ids = prompt_token_ids
        self.wish = wish
        self.epoch = 0  # of the process that knows it
        self.counts: list[int] = []  # of tokens whose text is known here, as they were read
        self.num_deaths = 0  # of processes that read nothing but its tokens, in a row


class Sent(NamedTuple):
    """Readings that a detokenizer has."""

    readings: list[Reading]
    future: Future[list[TextDelta]]

    @property
    def is_awaited(self) -> bool:
        return any(reading.is_awaited for reading in self.readings)


class Shard:
    """The sequences of one detokenizer."""

    def __init__(self, pool: TextPool, index: int) -> None:
        self._pool = pool
        self._index = index
        self._epoch = 1
        self._waiting: list[Reading] = []
        self._sent: deque[Sent] = deque()
        self._remotes: dict[OutputSequence, Remote] = {}
        self._down_until = 0.0

    @property
    def load(self) -> tuple[bool, int]:
        """Sort key: the detokenizer with the least work first, one that does not start last."""
        return time.monotonic() < self._down_until, len(self._remotes)

    def open(self, sequence: OutputSequence, remote: Remote) -> None:
        self._remotes[sequence] = remote

    def add(self, reading: Reading) -> None:
        """Keep for the next ``send``."""
        self._waiting.append(reading)

    def send(self) -> None:
        """Send what was added, as one job."""
        readings, self._waiting = self._waiting, []
        self._send(readings)

    def take(self, wait_for_all: bool) -> Iterator[ReadText]:
        """Texts that are there, in order; waits for those that are needed now."""
        while self._sent:
            is_due = wait_for_all or any(sent.is_awaited for sent in self._sent)
            if not is_due and not self._sent[0].future.done():
                return
            try:
                deltas = self._sent[0].future.result()
            except TextsLost as lost:
                self._epoch = lost.epoch
                yield from self._resend()
                continue
            except EngineDeadError:
                raise
            except RefusedError as error:  # it cannot be started
                self._down_until = time.monotonic() + RETRY_SECONDS
                deltas = [TextDelta(error=str(error))] * len(self._sent[0].readings)
            except EngineError as error:  # of these rows
                deltas = [TextDelta(error=str(error))] * len(self._sent[0].readings)
            for reading, delta in zip(self._sent.popleft().readings, deltas, strict=True):
                self._note(reading, delta)
                yield ReadText(reading, delta)

    def forget(self, sequence: OutputSequence) -> None:
        """It has ended."""
        self._remotes.pop(sequence, None)

    def _note(self, reading: Reading, delta: TextDelta) -> None:
        remote = self._remotes.get(reading.row.sequence)
        if remote is not None:
            remote.counts.append(len(reading.unread.token_ids))
            remote.num_deaths = 0

    def _send(self, readings: list[Reading]) -> None:
        readings = [each for each in readings if each.row.sequence in self._remotes]
        if not readings:
            return
        rows: list[TextRow] = []
        prompts: list[list[int]] = []
        for reading in readings:
            remote = self._remotes[reading.row.sequence]
            opening = None
            if remote.epoch != self._epoch:
                remote.epoch = self._epoch
                tokens = iter(reading.row.sequence.token_ids)
                read = [list(islice(tokens, number)) for number in remote.counts]
                opening = Opening(remote.wish, len(prompts), read)
                prompts.append(remote.prompt_token_ids)
            rows.append(TextRow(remote.number, *reading.unread, opening))
        future = self._pool.read(self._index, self._epoch, rows, prompts)
        self._sent.append(Sent(readings, future))

    def _resend(self) -> Iterator[ReadText]:
        """Send again what a dead process had, one at a time if it may have caused the crash."""
        sent, self._sent = self._sent, deque()
        for readings, future in sent:
            lost = future.exception()
            if not isinstance(lost, TextsLost):  # no process starts any more; sent again, they fail
                self._send(readings)
                continue
            if lost.is_culprit and len(readings) == 1:
                yield from self._blame(readings[0])
            for group in [[each] for each in readings] if lost.is_suspect else [readings]:
                self._send(group)

    def _blame(self, reading: Reading) -> Iterator[ReadText]:
        remote = self._remotes.get(reading.row.sequence)
        if remote is None:
            return
        remote.num_deaths += 1
        if remote.num_deaths == MAX_DEATHS:
            self.forget(reading.row.sequence)
            error = f"the detokenizer process died over its tokens, {MAX_DEATHS} times"
            yield ReadText(reading, TextDelta(error=error))


class PooledTexts:
    """All sequences that get their text from a pool. Belongs to the session's thread."""

    def __init__(self, pool: TextPool) -> None:
        self._shards = [Shard(pool, index) for index in range(pool.size)]
        self._shard_of: dict[OutputSequence, Shard] = {}
        self._numbers = count()

    @property
    def num_sequences(self) -> int:
        """Sequences a detokenizer may know."""
        return len(self._shard_of)

    def add(self, reading: Reading) -> None:
        """Tokens of a sequence; they leave with the next ``exchange``."""
        sequence = reading.row.sequence
        shard = self._shard_of.get(sequence)
        if shard is None:
            shard = self._shard_of[sequence] = min(self._shards, key=attrgetter("load"))
            prompt, wish = reading.row.request.prompt_token_ids, wish_of(sequence.params)
            shard.open(sequence, Remote(next(self._numbers), prompt, wish))
        shard.add(reading)

    def exchange(self, wait_for_all: bool = False) -> Iterable[ReadText]:
        """Send what was added; texts that are there or waited for, in order for each sequence."""
        for shard in self._shards:
            shard.send()
        for shard in self._shards:
            yield from shard.take(wait_for_all)

    def forget(self, sequence: OutputSequence) -> None:
        """It has ended: nothing more is read for it."""
        shard = self._shard_of.pop(sequence, None)
        if shard is not None:
            shard.forget(sequence)

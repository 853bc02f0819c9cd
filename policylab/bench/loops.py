"""Plays requests on a server: each when it is due, or as others end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from policylab.bench.client import Load, Row
from policylab.bench.datasets import Requests, Text
from policylab.bench.words import Words
from policylab.sim.job import FIRST_TOKEN, Job

AHEAD_SECONDS = 0.5  # before it is due, a request is prepared
PREPARED = 4096  # requests made before the clock starts, so that making them delays none
REFILL = 256  # requests that wait for a connection, below which more are made
SLICE_SECONDS = 0.05
LOWEST_TOKEN = 10  # below lie the special tokens of most models
VOCABULARY = 1000  # ids that every model has


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a request is written: fields of its body."""

    model: str
    is_chat: bool = False
    words: Words | None = None
    """Prompts are text of these words; ``None``: token ids, which only completions take."""
    vocabulary: int = VOCABULARY
    """Token ids are below this number."""
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the body; ``None`` removes one."""

    def body(self, job: Job, text: Text | None = None) -> bytes:
        """The body of the request for a job; ``text``: its prompt, if it is real."""
        fields: dict[str, Any] = {
            "model": job.adapter or self.model,
            **self._prompt(job, text),
            "max_tokens": job.num_output,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if job.priority:
            fields["priority"] = job.priority
        if job.user:
            fields["user"] = job.user
        fields.update(self.extra)
        given = {name: value for name, value in fields.items() if value is not None}
        return json.dumps(given, separators=(",", ":")).encode()

    def _prompt(self, job: Job, text: Text | None) -> dict[str, Any]:
        prompt = text or self._made_up(job)
        if not self.is_chat:
            return {"prompt": prompt}
        is_text = isinstance(prompt, str)
        return {"messages": [{"role": "user", "content": prompt}] if is_text else prompt}

    def _made_up(self, job: Job) -> Text:
        if self.words is not None:
            return self.words.text(job.tokens())
        room = self.vocabulary - LOWEST_TOKEN
        return [LOWEST_TOKEN + (token - FIRST_TOKEN) % room for token in job.tokens()]


@dataclass
class Played:
    """The requests of a run, in the order in which they were due."""

    rows: list[Row]
    start: float
    """All times are seconds of ``time.perf_counter``."""
    end: float
    cpu_seconds: float
    """Processor time of this process, its preparations before the start left out."""
    num_unsent: int = 0
    """Requests that were due, and for which there was no connection before the end."""
    is_interrupted: bool = False


class Feeder:
    """Makes requests shortly before they are due, and hands them to a load."""

    def __init__(
        self, load: Load, requests: Requests, form: Form, seconds: float, *, keeps: bool
    ) -> None:
        """seconds: after the start, until when requests are sent; keeps: keep texts of answers."""
        self.rows: list[Row] = []
        self.start = 0.0
        self._load = load
        self._requests = requests
        self._form = form
        self._seconds = seconds
        self._keeps = keeps

    def begin(self) -> None:
        """Make the first requests, then start the clock."""
        most = PREPARED if self._seconds == inf else REFILL
        while self._next_time < min(self._seconds, AHEAD_SECONDS) and len(self.rows) < most:
            self._prepare()
        self.start = time.perf_counter()
        for row in self.rows:
            row.due += self.start
            self._load.add(row)
        self._load.on_end = self._ended

    @property
    def is_open(self) -> bool:
        """Whether a further request may arrive without the end of another."""
        return max(time.perf_counter() - self.start, self._next_time) < self._seconds

    def wants_more(self) -> bool:
        """Whether a further request is to be made: it is due soon, and few wait to be sent."""
        soon = time.perf_counter() - self.start + AHEAD_SECONDS
        return self.is_open and self._next_time < soon and self._load.num_unsent < REFILL

    def feed(self) -> None:
        """Make the requests that are due soon; after the end, forget those that were not sent."""
        while self.wants_more():
            self._prepare()
            self._load.add(self.rows[-1])
        if time.perf_counter() - self.start >= self._seconds:
            self._load.drop_unsent()

    @property
    def _next_time(self) -> float:
        return self._requests.source.next_time

    def _prepare(self) -> None:
        job = self._requests.source.take()
        body = self._form.body(job, self._requests.take_text(job))
        self.rows.append(Row(self.start + job.arrival, body, keeps=self._keeps, about=job))

    def _ended(self, row: Row) -> None:
        row.body = b""  # those of a long run would take much memory
        # A client that was refused waits as the server says before its next request.
        now = time.perf_counter() - self.start
        self._requests.source.ended(row.about, now + row.retry_after)


def play(
    load: Load,
    requests: Requests,
    form: Form,
    *,
    seconds: float = inf,
    keeps: bool = False,
    drains: bool = True,
    watch: Callable[[list[Row], float], object] = lambda rows, start: None,
) -> Played:
    """Send the requests that arrive within ``seconds``, and read them to their end. As many run at
    a time as the load has connections, which is closed. ``keeps``: keep the text of answers;
    ``drains``: if false, leave the requests that still run after ``seconds``; ``watch``: called
    with the requests so far, and with the time of the start, about twenty times a second.

    An interrupt (``KeyboardInterrupt``) ends the run: the result has what is known.
    """
    feeder = Feeder(load, requests, form, seconds, keeps=keeps)
    is_interrupted = False
    cpu = time.process_time()
    try:
        feeder.begin()
        cpu = time.process_time()
        while (drains and load.num_pending) or feeder.is_open:
            watch(feeder.rows, feeder.start)
            feeder.feed()
            if load.num_pending:
                load.run(time.perf_counter() + SLICE_SECONDS, feeder.wants_more)
            else:
                time.sleep(SLICE_SECONDS)
    except KeyboardInterrupt:
        is_interrupted = True
    load.on_end = lambda row: None
    load.close()
    cpu_seconds = time.process_time() - cpu
    sent = [row for row in feeder.rows if row.sent]
    end = max((row.ended for row in sent), default=feeder.start)
    # At an infinite rate more are made than are sent; all of them are due at the start.
    num_unsent = sum(row.about.arrival > 0 for row in feeder.rows if not row.sent)
    return Played(sent, feeder.start, end, cpu_seconds, num_unsent, is_interrupted)

"""Many streams at once, each checked token by token: nothing lost, doubled or out of order.

A request's prompt follows from its id, and each token from all before it, so what a stream must say
is known without asking anybody.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

from engine.errors import RefusedError
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest, CoreOutputs, Finished
from policylab.verify.fake import digest_of, mix
from support.live_core import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


@dataclass(frozen=True)
class Lengths:
    """Least and most tokens of a request."""

    prompt: tuple[int, int] = (1, 48)
    output: tuple[int, int] = (1, 64)


LENGTHS = Lengths()


@dataclass
class Stream:
    """One request, as far as it was read."""

    request: AddRequest
    digest: int  # of prompt and tokens so far: the next token follows from it
    cancel_at: int | None
    """Tokens after which it is given up."""
    num_tokens: int = 0
    is_cancelled: bool = False

    def read(self, token: int) -> None:
        wanted = self.digest % VOCAB_SIZE
        assert token == wanted, (
            f"{self.request.request_id}: token {self.num_tokens} is {token}, not {wanted}"
        )
        self.digest = mix(self.digest, token)
        self.num_tokens += 1
        assert self.num_tokens <= self.request.max_tokens, f"{self.request.request_id}: too many"


@dataclass
class Counts:
    """What was seen, of all streams together."""

    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    tokens: int = 0


class Streams:
    """Keeps ``num`` requests of a client running; ``cancel_share`` of them are given up on the way.

    ``client`` is any that adds, aborts and steps, around a worker that computes digests.
    """

    def __init__(
        self,
        client: Any,
        num: int,
        rng: random.Random,
        *,
        cancel_share: float = 0.0,
        lengths: Lengths = LENGTHS,
    ) -> None:
        self.counts = Counts()
        self.reasons = {"length"}
        """How requests may end without having been given up."""
        self.live: dict[str, Stream] = {}
        self._client = client
        self._num = num
        self._rng = rng
        self._cancel_share = cancel_share
        self._lengths = lengths
        self._ids = (f"{client.id_prefix}{number}" for number in itertools.count())

    def turn(self) -> None:
        """Add those that are missing, read what there is, give up whose time has come."""
        self.fill()
        self.read()

    def finish(self) -> None:
        """Read until the last one has ended."""
        while self.live:
            self.read()
        assert not self._client.has_unfinished()

    def fill(self) -> None:
        """Add those that are missing."""
        made = [self._make(next(self._ids)) for _ in range(self._num - len(self.live))]
        errors = self._client.add_all([stream.request for stream in made])
        for place, stream in enumerate(made):
            if place not in errors:
                self.live[stream.request.request_id] = stream
            elif isinstance(errors[place], RefusedError):
                self.counts.refused += 1
            else:
                raise errors[place]

    def _make(self, request_id: str) -> Stream:
        rng = self._rng
        max_tokens = rng.randint(*self._lengths.output)
        is_cancelled = rng.random() < self._cancel_share
        request = request_of(request_id, max_tokens, self._lengths.prompt)
        digest = digest_of(request.prompt_token_ids)
        return Stream(request, digest, rng.randrange(max_tokens) if is_cancelled else None)

    def read(self) -> None:
        """Read what there is, or comes within a moment; give up those whose time has come."""
        for batch in self._client.step():
            self._take(batch)
        self._cancel()

    def _take(self, batch: CoreOutputs) -> None:
        tokens = iter(batch.token_ids)
        counts = itertools.repeat(1) if batch.counts is None else batch.counts
        for name, count in zip(batch.request_ids, counts, strict=False):
            stream = self.live.get(name)
            assert stream is not None, f"{name}: output after its end"
            for token in itertools.islice(tokens, count):
                stream.read(token)
            self.counts.tokens += count
        assert next(tokens, None) is None, "tokens of nobody"
        for end in batch.finished:
            self._end(batch.request_ids[end.index], end)

    def _end(self, name: str, end: Finished) -> None:
        stream = self.live.pop(name, None)
        assert stream is not None, f"{name}: a second end, {end}"
        if stream.is_cancelled and end.reason == "abort":
            self.counts.cancelled += 1
            return
        assert end.reason in self.reasons, f"{name}: {end}"
        wanted = stream.request.max_tokens
        if end.reason == "length":
            assert stream.num_tokens == wanted, f"{name}: {stream.num_tokens} tokens of {wanted}"
        self.counts.finished += 1

    def _cancel(self) -> None:
        names = [
            name
            for name, stream in self.live.items()
            if stream.cancel_at is not None and stream.num_tokens >= stream.cancel_at
        ]
        if names:
            self._client.abort(names)
        for name in names:
            self.live[name].cancel_at, self.live[name].is_cancelled = None, True


def request_of(request_id: str, max_tokens: int, prompt_tokens: tuple[int, int]) -> AddRequest:
    """A request whose prompt follows from its id alone."""
    rng = random.Random(request_id)
    prompt = rng.choices(range(VOCAB_SIZE), k=rng.randint(*prompt_tokens))
    return AddRequest(request_id, prompt, GREEDY, 0, 0.0, max_tokens)

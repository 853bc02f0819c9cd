"""A client's side of the conversation alone, with messages that are late: no rows go astray."""

from __future__ import annotations

import random
from collections import deque

import pytest
from wire_samples import frames_of

from engine.errors import RequestError
from engine.ipc.codec import Decoder
from engine.messages.outputs import CoreOutputs, Finished
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from engine.messages.stats import SchedulerStats
from engine.messages.wire import (
    Abort,
    Answer,
    Call,
    Failure,
    FromClient,
    Outputs,
    Refusal,
    Submit,
    Submitted,
    ToClient,
)
from engine.rpc.link import Link, Submission, refused

IDS = tuple("abcdefgh")


class Core:
    """Answers in order; a request's tokens are its ``seed``, as many as ``max_tokens``."""

    def __init__(self) -> None:
        self.said: deque[ToClient] = deque()
        self.live: dict[str, tuple[int, int]] = {}
        self._aborted: list[str] = []
        self._decoder: Decoder[FromClient] = Decoder(FromClient)

    @property
    def is_quiet(self) -> bool:
        return not (self.said or self.live or self._aborted)

    def hear(self, frame: bytes) -> None:
        message = self._decoder.decode([frame])
        if isinstance(message, Submit):
            refusals = list(self._refusals(message.requests))
            self.said.append(Submitted(message.number, 0.0, refusals))
        elif isinstance(message, Abort):
            self._aborted += [name for name in message.request_ids if self.live.pop(name, None)]
        elif isinstance(message, Call):
            self.said.append(Answer(message.number))

    def _refusals(self, requests: list[AddRequest]) -> list[Refusal]:
        refusals = []
        for place, request in enumerate(requests):
            if request.seed % 5 == 0:
                refusals.append(Refusal(place, Failure("RefusedError", "full")))
            else:
                assert request.request_id not in self.live
                assert request.request_id not in self._aborted
                self.live[request.request_id] = (request.seed, request.max_tokens)
        return refusals

    def step(self, dice: random.Random) -> None:
        moved = [name for name in self.live if dice.random() < 0.7]
        ends, tokens, counts = [], [], []
        for row, name in enumerate(moved):
            seed, left = self.live.pop(name)
            tokens.append(seed)
            counts.append(1)
            if left == 1:
                ends.append(Finished(row, "length"))
            else:
                self.live[name] = (seed, left - 1)
        for name in self._aborted:
            ends.append(Finished(len(moved), "abort"))
            moved.append(name)
            counts.append(0)
        self._aborted = []
        if moved:
            self.said.append(Outputs(CoreOutputs(moved, tokens, counts, 0.0, finished=ends)))


class Client:
    """What a front end knows: whose each id is at the moment, and who was told of an end."""

    def __init__(self, dice: random.Random) -> None:
        self.link = Link()
        self.core = Core()
        self.owner: dict[str, int] = {}
        """Requests by id, until their end was read or they were refused."""
        self.ended: list[int] = []
        self.sent: deque[bytes] = deque()
        self._dice = dice
        self._submissions: deque[tuple[Submission, list[int]]] = deque()
        self._seeds = 0

    def act(self) -> None:
        acts = [self.add, self.abort, self.withdraw, self.carry, self.step, self.feed, self.take]
        self._dice.choices(acts, [3, 1, 1, 4, 4, 8, 2])[0]()

    def add(self) -> None:
        submission, requests = Submission(), []
        for name in self._dice.sample(IDS, self._dice.randint(1, 3)):
            self._seeds += 1
            length = self._dice.randint(1, 4)
            requests.append(AddRequest(name, [1], SamplingParams(), self._seeds, 0.0, length))
        self.link.submit(requests, submission)
        for place, request in enumerate(requests):
            assert (place in submission.errors) == (request.request_id in self.owner)
            self.owner.setdefault(request.request_id, request.seed)
        assert all(isinstance(error, RequestError) for error in submission.errors.values())
        if submission.parts:
            self._submissions.append((submission, [request.seed for request in requests]))
            if self._dice.random() < 0.8:
                self.sent.extend(part.frame for part in submission.parts)
            else:  # interrupted before it was sent, so it is withdrawn
                self.withdraw()

    def abort(self) -> None:
        self.sent.append(self.link.abort(self._dice.sample(IDS, self._dice.randint(1, 3))))

    def withdraw(self) -> None:
        if self._submissions:
            submission, _ = self._submissions[-1]
            self.sent.extend(self.link.withdraw(submission))

    def carry(self) -> None:
        if self.sent:
            self.core.hear(self.sent.popleft())

    def step(self) -> None:
        self.core.step(self._dice)

    def feed(self) -> None:
        if not self.core.said:
            return
        reply = self.link.feed(frames_of([self.core.said.popleft()]))
        if isinstance(reply, Submitted | Answer):
            self._never_sent(reply.number)
        if isinstance(reply, Submitted):
            self._submitted(reply)

    def _submitted(self, reply: Submitted) -> None:
        submission, seeds = self._submissions.popleft()
        (part,) = submission.parts
        assert part.number == reply.number
        for place in refused(part, reply):
            assert self.owner.pop(part.request_ids[part.places.index(place)]) == seeds[place]

    def _never_sent(self, number: int) -> None:
        """Answers come in order: what was asked before was not sent, and is nobody's."""
        while self._submissions and self._submissions[0][0].parts[0].number < number:
            submission, seeds = self._submissions.popleft()
            for name, seed in list(self.owner.items()):
                if seed in seeds and name in submission.parts[0].request_ids:
                    del self.owner[name]

    def take(self) -> None:
        for batch in self.link.take_batches(lambda frame: None):
            tokens = iter(batch.token_ids)
            assert batch.counts is not None
            for name, count in zip(batch.request_ids, batch.counts, strict=True):
                assert all(self.owner[name] == next(tokens) for _ in range(count)), name
            for end in batch.finished:
                self.ended.append(self.owner.pop(batch.request_ids[end.index]))


@pytest.mark.parametrize("turn", range(20))
def test_rows_and_ends_reach_whose_they_are_once_whatever_is_on_its_way(
    turn: int, seed: int
) -> None:
    dice = random.Random(seed + turn)
    client = Client(dice)
    for _ in range(2000):
        client.act()
        assert set(client.link.live) == set(client.owner)
    while client.sent or not client.core.is_quiet or client.link.unread:
        for act in (client.carry, client.step, client.feed, client.take):
            act()
    client.take()
    assert len(client.ended) == len(set(client.ended)) > 50
    assert not client.owner and not client.link.live and not client.link.unread


def test_statistics_are_asked_for_once_at_a_time_and_kept() -> None:
    link = Link()
    stats = SchedulerStats(*range(10))
    assert link.ask_stats() is not None and link.ask_stats() is None and link.stats is None
    link.feed(frames_of([Answer(0, stats)]))
    assert link.stats == stats and link.ask_stats() is not None
    link.feed(frames_of([Answer(1, failure=Failure("EngineError", "it fell over"))]))
    assert link.stats == stats and link.ask_stats() is not None
    link.feed(frames_of([Answer(2, ["rubbish"])]))
    assert link.stats == stats and link.ask_stats() is not None


def test_a_question_for_statistics_that_was_never_sent_is_asked_again() -> None:
    """An interrupt came before; the answer to what was asked later tells."""
    link = Link()
    assert link.ask_stats() is not None
    number, _ = link.call("echo", (None,))
    link.feed(frames_of([Answer(number)]))
    assert link.ask_stats() is not None
    submission = Submission()
    link.submit([AddRequest("a", [1], SamplingParams(), 1, 0.0, 1)], submission)
    link.feed(frames_of([Submitted(submission.parts[0].number, 0.0, [])]))
    assert link.ask_stats() is not None and link.ask_stats() is None

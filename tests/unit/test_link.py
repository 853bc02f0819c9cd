"""A client's side of the conversation alone, with messages that are late: no rows go astray."""

from __future__ import annotations

import random
from collections import deque

import pytest
from wire_samples import frames_of

from engine.core.link import Link, Submission, aborted, refused
from engine.errors import RequestError
from engine.ipc.codec import Decoder
from engine.messages.outputs import CoreOutputs, Finished
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from engine.messages.stats import SchedulerStats
from engine.messages.wire import (
    Abort,
    Aborted,
    Failure,
    FromClient,
    Outputs,
    Refusal,
    Submit,
    Submitted,
    ToClient,
)

IDS = ("a", "b", "c", "d")


class Core:
    """Answers in order; a request's tokens are its ``seed``, as many as ``max_tokens``."""

    def __init__(self) -> None:
        self.said: deque[ToClient] = deque()
        self.live: dict[str, tuple[int, int]] = {}
        self._decoder: Decoder[FromClient] = Decoder(FromClient)

    def hear(self, frame: bytes) -> None:
        message = self._decoder.decode([frame])
        if isinstance(message, Submit):
            self.said.append(Submitted(message.number, list(self._refusals(message.requests))))
        elif isinstance(message, Abort):
            ends = [
                Finished(place, "abort")
                for place, name in enumerate(message.request_ids)
                if self.live.pop(name, None)
            ]
            self.said.append(Aborted(message.number, ends))

    def _refusals(self, requests: list[AddRequest]) -> list[Refusal]:
        refusals = []
        for place, request in enumerate(requests):
            if request.seed % 5 == 0:
                refusals.append(Refusal(place, Failure("RefusedError", "full")))
            else:
                assert request.request_id not in self.live
                self.live[request.request_id] = (request.seed, request.max_tokens)
        return refusals

    def step(self, dice: random.Random) -> None:
        moved = [name for name in self.live if dice.random() < 0.7]
        ends = []
        tokens = []
        for row, name in enumerate(moved):
            seed, left = self.live.pop(name)
            tokens.append(seed)
            if left == 1:
                ends.append(Finished(row, "length"))
            else:
                self.live[name] = (seed, left - 1)
        stats = SchedulerStats(*[0] * 10) if dice.random() < 0.1 else None
        if moved or stats is not None:
            batch = CoreOutputs(moved, tokens, None, 0.0, finished=ends, stats=stats)
            self.said.append(Outputs(batch))


class Client:
    """What a front end knows: whose each id is at the moment, and who was told of an end."""

    def __init__(self, dice: random.Random) -> None:
        self.link = Link()
        self.core = Core()
        self.owner: dict[str, int] = {}
        self.ended: list[int] = []
        self.taken: set[int] = set()
        self._dice = dice
        self._sent: deque[bytes] = deque()
        self._submissions: deque[tuple[Submission, list[int]]] = deque()
        self._aborts: dict[int, dict[int, int]] = {}  # number -> place -> whose it was
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
        self._sent.extend(part.frame for part in submission.parts)
        if submission.parts:
            self._submissions.append((submission, [request.seed for request in requests]))

    def abort(self) -> None:
        names = self._dice.sample(IDS, self._dice.randint(1, 3))
        number, frame = self.link.abort(names)
        owners = {i: self.owner.pop(name) for i, name in enumerate(names) if name in self.owner}
        self._aborts[number] = owners
        self._sent.append(frame)

    def withdraw(self) -> None:
        if not self._submissions:
            return
        submission, seeds = self._submissions.pop()
        self._sent.append(self.link.withdraw(submission))
        for name, seed in list(self.owner.items()):
            if seed in seeds:
                del self.owner[name]

    def carry(self) -> None:
        if self._sent:
            self.core.hear(self._sent.popleft())

    def step(self) -> None:
        self.core.step(self._dice)

    def feed(self) -> None:
        if not self.core.said:
            return
        reply = self.link.feed(frames_of([self.core.said.popleft()]))
        if isinstance(reply, Submitted):
            self._submitted(reply)
        elif isinstance(reply, Aborted) and reply.number in self._aborts:
            owners = self._aborts.pop(reply.number)
            for end in aborted(reply):
                assert end.reason == "abort"
                self.ended.append(owners.pop(end.index))
            assert not self.taken & set(owners.values())  # all others had been refused

    def _submitted(self, reply: Submitted) -> None:
        for submission, seeds in list(self._submissions):
            (part,) = submission.parts
            if part.number == reply.number:
                self._submissions.remove((submission, seeds))
                errors = refused(part, reply)
                for place in part.places:
                    if place not in errors:
                        self.taken.add(seeds[place])
                    elif self.owner.get(part.request_ids[part.places.index(place)]) == seeds[place]:
                        del self.owner[part.request_ids[part.places.index(place)]]

    def take(self) -> None:
        for batch in self.link.take_batches(lambda frame: None):
            assert batch.request_ids or batch.stats is not None
            for name, token in zip(batch.request_ids, batch.token_ids, strict=True):
                assert self.owner.get(name) == token, name
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
    while client.owner or client.core.said or client.core.live:
        for act in (client.carry, client.step, client.feed, client.take):
            act()
    client.take()
    assert len(client.ended) == len(set(client.ended)) > 50
    assert not client.link.live and not client.link.unread

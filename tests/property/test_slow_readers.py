"""Clients that read when they like, give up what they like and use ids again: nothing is mixed up.

They speak the protocol to a live core by hand, with few credits and a small backlog.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.core_clients import HostedCore, RawClient, own_place
from support.live_core import wait_until
from support.simulate import expected, make_request
from support.spawned import FakeBuild

from engine.messages.requests import CoreOutputs
from engine.messages.wire import (
    PROTOCOL_VERSION,
    Abort,
    Credit,
    Hello,
    Outputs,
    Submit,
    Submitted,
    Welcome,
)

CREDITS = 4
BACKLOG_BYTES = 20_000
NAMES = 6
TURNS = 400


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with own_place(monkeypatch) as path:
        yield path


@dataclass
class Reading:
    """One life of a request id."""

    wanted: list[int]
    tokens: list[int] = field(default_factory=list)


class Client:
    """Checks each message against what it asked for. ``live``: what has not ended, by name."""

    def __init__(self, core: HostedCore, dice: random.Random) -> None:
        self.live: dict[str, Reading] = {}
        self.reasons = dict.fromkeys(("length", "abort"), 0)
        self._asked: set[int] = set()  # numbers of what is not answered yet
        self._unread = 0
        self._numbers = itertools.count()
        self._dice = dice
        self.raw = RawClient(core.address.data)
        self.raw.send(Hello(PROTOCOL_VERSION, core.address.token))
        welcome = self.raw.receive()
        assert isinstance(welcome, Welcome)
        self._names = [f"client-{welcome.client_index}/{i}" for i in range(NAMES)]

    def submit(self) -> None:
        free = [name for name in self._names if name not in self.live]
        if free:
            name, num = self._dice.choice(free), self._dice.randint(1, 60)
            prompt = [self._dice.randrange(1, 900) for _ in range(self._dice.randint(1, 9))]
            self.live[name] = Reading(expected(prompt, num))
            number = next(self._numbers)
            self._asked.add(number)
            self.raw.send(Submit(number, [make_request(name, prompt, num)]))

    def abort(self) -> None:
        """Also of what was given up before, or has ended: the end is still to be read."""
        names = [name for name in self._names if self._dice.random() < 0.5]
        self.raw.send(Abort(names))

    def read(self) -> None:
        message = self.raw.receive(0.001)
        match message:
            case Submitted():
                assert not message.refusals
                self._asked.remove(message.number)
            case Outputs():
                self._unread += 1
                self._take(message.batch)
            case _:
                assert message is None

    def grant(self) -> None:
        if self._unread:
            self.raw.send(Credit(self._unread))
            self._unread = 0

    def _take(self, batch: CoreOutputs) -> None:
        tokens = iter(batch.token_ids)
        counts = batch.counts or [1] * len(batch.request_ids)
        for name, count in zip(batch.request_ids, counts, strict=True):
            reading = self.live[name]
            reading.tokens += itertools.islice(tokens, count)
            assert reading.tokens == reading.wanted[: len(reading.tokens)], f"{name}: not its own"
        for end in batch.finished:
            self._end(batch.request_ids[end.index], end.reason)

    def _end(self, name: str, reason: str) -> None:
        reading = self.live.pop(name)  # once
        assert reason == "abort" or reading.tokens == reading.wanted, f"{name} lost tokens unsaid"
        self.reasons[reason] += 1


def test_each_reads_its_own_and_each_ends_once(seed: int) -> None:
    dice = random.Random(seed)
    with HostedCore(FakeBuild(), num_credits=CREDITS, max_backlog_bytes=BACKLOG_BYTES) as core:
        clients = [Client(core, dice) for _ in range(3)]
        for _ in range(TURNS):
            client = dice.choice(clients)
            acts = (client.submit, client.submit, client.read, client.read, client.abort)
            dice.choice((*acts, client.grant))()
        assert wait_until(lambda: not any(map(finish, clients)))
        assert not core.host.health().num_unfinished
        for client in clients:
            client.raw.close()
        told = [sum(client.reasons[each] for client in clients) for each in ("length", "abort")]
        assert all(told), f"too tame: {told}"


def finish(client: Client) -> bool:
    """Read and pay; is there anything left?"""
    client.read()
    client.grant()
    return bool(client.live)

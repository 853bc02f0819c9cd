"""The asyncio client with many tasks: concurrent calls, cancelled ones, death."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from core_clients import HostedCore, own_place, read
from simulate import expected, make_request
from spawned import FakeBuild

from engine.core.aio_client import AsyncEngineCoreClient
from engine.errors import EngineDeadError, RequestError
from engine.messages.outputs import Finished


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with own_place(monkeypatch):
        yield


async def drained(client: AsyncEngineCoreClient) -> dict[str, list[int]]:
    """Tokens by request, until nobody is left."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, Finished] = {}
    async with asyncio.timeout(20):
        while client.has_unfinished():
            for batch in await client.step():
                read(batch, tokens, ends)
    return tokens


async def test_many_tasks_ask_at_once() -> None:
    with HostedCore(FakeBuild(step_seconds=0.001)) as core:
        client = await AsyncEngineCoreClient.connect(core.address)
        requests = [make_request(str(i), [i + 1], 10) for i in range(50)]
        adds = [client.add(request) for request in requests]
        echoes = [client.call("echo", i) for i in range(50)]
        answers = await asyncio.gather(*echoes, *adds)
        assert answers == [*range(50), *[None] * 50]
        assert await drained(client) == {str(i): expected([i + 1], 10) for i in range(50)}
        await client.shutdown()


@pytest.mark.behaviour(107)
async def test_a_cancelled_call_leaves_the_client_usable() -> None:
    with HostedCore(FakeBuild(step_seconds=0.5)) as core:
        client = await AsyncEngineCoreClient.connect(core.address)
        await client.add(make_request("a", [1], 4))
        await asyncio.sleep(0.1)  # the core is in the middle of a step now and answers later
        calls = [asyncio.create_task(client.call("echo", i)) for i in range(6)]
        await asyncio.sleep(0.01)  # they were sent
        for call in calls[::2]:
            call.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert results[1::2] == [1, 3, 5]
        assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
        assert await client.call("echo", "still there") == "still there"
        await asyncio.sleep(0.1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await client.call("echo", 1)
        assert await drained(client) == {"a": expected([1], 4)}
        await client.shutdown()


async def test_a_cancelled_add_leaves_nothing_at_the_core() -> None:
    with HostedCore(FakeBuild(step_seconds=0.5)) as core:
        client = await AsyncEngineCoreClient.connect(core.address)
        await client.add(make_request("a", [1], 3))
        await asyncio.sleep(0.1)  # the core is in the middle of a step now and answers later
        adding = asyncio.create_task(client.add(make_request("b", [2], 400)))
        await asyncio.sleep(0.01)
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        with pytest.raises(RequestError, match="in use"):
            await client.add(make_request("a", [9], 1))  # whoever has the id goes on
        counts = await client.stats()
        assert counts is not None and counts.num_running + counts.num_waiting == 1
        tokens = await drained(client)
        assert tokens["a"] == expected([1], 3)
        await client.add(make_request("b", [3], 2))  # the id is free again
        assert await drained(client) == {"b": expected([3], 2)}
        await client.shutdown()


@pytest.mark.behaviour(110)
async def test_all_tasks_hear_of_the_death() -> None:
    with HostedCore(FakeBuild(step_seconds=0.05, raise_at=2)) as core:
        client = await AsyncEngineCoreClient.connect(core.address)
        await client.add(make_request("a", [1], 6))

        async def steps() -> None:
            while True:
                await client.step()

        tasks = [asyncio.create_task(steps())]
        tasks += [asyncio.create_task(client.call("echo", i)) for i in range(500)]
        async with asyncio.timeout(10):
            results = await asyncio.gather(*tasks, return_exceptions=True)
            while True:  # those of the first step were answered; a later call is not
                try:
                    await client.call("echo", 1)
                except EngineDeadError:
                    break
        assert isinstance(results[0], EngineDeadError) and "fell over" in str(results[0])
        await client.shutdown()


async def test_a_cancelled_add_withdraws_nothing_of_others() -> None:
    with HostedCore(FakeBuild(step_seconds=0.3)) as core:
        client = await AsyncEngineCoreClient.connect(core.address)
        await client.add(make_request("a", [1], 3))
        await asyncio.sleep(0.1)  # the core is in the middle of a step now and answers later
        own, others = make_request("b", [2], 400), make_request("a", [3], 400)
        adding = asyncio.create_task(client.add_all([others, own]))
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="'b' is in use"):
            await client.add(own)
        await client.abort(["b"])
        assert await drained(client) == {"a": expected([1], 3), "b": []}
        await client.add(make_request("b", [4], 3))
        adding.cancel()  # too late: this "b" is another's
        await asyncio.gather(adding, return_exceptions=True)
        assert await drained(client) == {"b": expected([4], 3)}
        await client.shutdown()


class Reader:
    """The task that reads. Each id is that of one request after the other."""

    def __init__(self, client: AsyncEngineCoreClient) -> None:
        self.client = client
        self.tokens: dict[str, list[int]] = {}
        self.wanted: dict[str, list[int]] = {}
        self.given_up: set[str] = set()
        self.num_ended = dict.fromkeys(("length", "abort"), 0)

    def own(self, name: str, wanted: list[int]) -> None:
        self.tokens[name], self.wanted[name] = [], wanted

    def disown(self, name: str) -> None:
        del self.tokens[name], self.wanted[name]
        self.given_up.discard(name)

    async def run(self) -> None:
        while True:
            for batch in await self.client.step():
                tokens: dict[str, list[int]] = {}
                ends: dict[str, Finished] = {}
                read(batch, tokens, ends)
                for name, new in tokens.items():
                    assert name in self.tokens, f"{name}: output of a request that is nobody's"
                    self.tokens[name] += new
                    so_far = len(self.tokens[name])
                    assert self.tokens[name] == self.wanted[name][:so_far], name
                for name, end in ends.items():
                    self._end(name, end.reason)
            await asyncio.sleep(0)  # [] comes at once while nothing is left

    def _end(self, name: str, reason: str) -> None:
        if reason == "abort":
            assert name in self.given_up, f"{name}: aborted, and nobody asked for it"
        else:
            assert self.tokens[name] == self.wanted[name], name
        self.disown(name)
        self.num_ended[reason] += 1


class Users:
    """Tasks that add, stop and give up requests. Ids are few: each is that of many, in turn."""

    NAMES = ("a", "b", "c", "d", "e")

    def __init__(self, reader: Reader, dice: random.Random, until: float) -> None:
        self.num_cancelled = 0
        self._reader = reader
        self._client = reader.client
        self._dice = dice
        self._until = until

    async def run(self) -> None:
        while time.monotonic() < self._until:
            await asyncio.sleep(self._dice.choice([0.0, 0.0005, 0.002, 0.01]))
            taken = [name for name in self.NAMES if name in self._reader.tokens]
            if taken and self._dice.random() < 0.4:
                await self._stop(taken)
            else:
                await self._add(taken)

    async def _stop(self, taken: list[str]) -> None:
        stopped = self._dice.sample(taken, self._dice.randint(1, len(taken)))
        self._reader.given_up |= set(stopped)
        await self._client.abort(stopped)

    async def _add(self, taken: list[str]) -> None:
        requests = [
            make_request(name, [self._dice.randrange(1000)], self._dice.choice([1, 2, 30]))
            for name in self.NAMES
            if name not in taken
        ]
        for request in requests:
            wanted = expected(request.prompt_token_ids, request.max_tokens)
            self._reader.own(request.request_id, wanted)
        owned = {each.request_id: self._reader.tokens[each.request_id] for each in requests}
        refused = [make_request(name, [7], 5) for name in taken]
        if await self._quickly(self._client.add_all(requests + refused)):
            return
        self.num_cancelled += 1
        for name, tokens in owned.items():  # unless it has ended: it ends as one that is aborted
            if self._reader.tokens.get(name) is tokens:
                self._reader.given_up.add(name)

    async def _quickly(self, call: Any) -> bool:
        """Carry out a call, or give it up once it was sent."""
        try:
            async with asyncio.timeout(self._dice.choice([0.0005, 0.003, 5.0])):
                await call
        except TimeoutError:
            return False
        return True


@pytest.mark.behaviour(107)
async def test_streams_get_exactly_their_own_under_adds_aborts_and_cancels(seed: int) -> None:
    with HostedCore(FakeBuild(step_seconds=0.0005)) as core:
        client = await AsyncEngineCoreClient.connect(core.address)
        reader = Reader(client)
        reading = asyncio.create_task(reader.run())
        users = Users(reader, random.Random(seed), time.monotonic() + 1.5)
        await asyncio.gather(*(users.run() for _ in range(6)))
        left = list(reader.tokens)
        reader.given_up |= set(left)
        await client.abort(left)
        async with asyncio.timeout(20):
            while client.has_unfinished() and not reading.done():
                await asyncio.sleep(0.001)
        assert not reading.done(), reading.exception()
        counts = await client.stats()
        assert counts is not None and counts.num_running + counts.num_waiting == 0
        assert not reader.tokens
        assert min(reader.num_ended.values()) > 5 and users.num_cancelled > 5
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        await client.shutdown()


async def test_a_client_that_nobody_reads_costs_nothing_when_its_core_has_died() -> None:
    with HostedCore(FakeBuild(step_seconds=0.001, raise_at=30)) as core:
        client = await AsyncEngineCoreClient.connect(core.address)
        await client.add_all([make_request(str(i), [i + 1], 400) for i in range(20)])
        await asyncio.sleep(0.3)
    await asyncio.sleep(0.1)
    start = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - start < 0.2
    with pytest.raises(EngineDeadError, match="fell over"):
        while True:
            await client.step()
    await client.shutdown()

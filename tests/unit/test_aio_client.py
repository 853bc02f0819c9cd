"""The asyncio client with many tasks: concurrent calls, cancelled ones, death."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from core_clients import HostedCore, own_place, read
from simulate import expected, make_request
from spawned import FakeBuild

from engine.core.aio_client import AsyncEngineCoreClient
from engine.errors import EngineDeadError
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


async def test_107_a_cancelled_call_leaves_the_client_usable() -> None:
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
        again = asyncio.create_task(client.add(make_request("a", [9], 1)))
        await asyncio.sleep(0.01)
        again.cancel()  # it would have been refused; who has the id goes on
        counts = await client.stats()
        assert counts is not None and counts.num_running + counts.num_waiting == 1
        await client.add(make_request("b", [3], 2))  # the id is free again
        tokens = await drained(client)
        assert tokens["a"] == expected([1], 3) and tokens["b"][-2:] == expected([3], 2)
        await client.shutdown()


async def test_110_all_tasks_hear_of_the_death() -> None:
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

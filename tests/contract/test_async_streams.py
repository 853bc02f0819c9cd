"""Many tasks over one core behind sockets: they read, leave, abort and are cancelled, at random."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest
from support.core_clients import WAIT_SECONDS, HostedCore
from support.simulate import expected
from support.spawned import FakeBuild, fake_config

from engine.async_engine import AsyncLLMEngine
from engine.frontend.session import Session
from engine.messages.params import SamplingParams
from engine.rpc.zmq_client import EngineCoreClient

pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture
async def engine() -> AsyncIterator[AsyncLLMEngine]:
    with HostedCore(FakeBuild(step_seconds=0.0005)) as core:
        client = EngineCoreClient(core.address)
        engine = AsyncLLMEngine(Session(fake_config(), client, None, time.monotonic))
        yield engine
        await asyncio.to_thread(engine.shutdown)


class Users:
    """Tasks that take an id from a few that are free, and give it back when they are done."""

    def __init__(self, engine: AsyncLLMEngine, dice: random.Random, until: float) -> None:
        self.num_ended = dict.fromkeys(("read", "left", "aborted", "cancelled"), 0)
        self._engine = engine
        self._dice = dice
        self._until = until
        self._free = list("abcde")

    async def run(self) -> None:
        while time.monotonic() < self._until:
            if not self._free:
                await asyncio.sleep(0.001)
                continue
            name = self._free.pop(self._dice.randrange(len(self._free)))
            await self._use(name, self._dice.choice(list(self.num_ended)))
            self._free.append(name)  # the next user has it at once

    async def _use(self, name: str, how: str) -> None:
        prompt, num_tokens = [self._dice.randrange(1000)], self._dice.choice([1, 2, 30, 300])
        wanted = expected(prompt, num_tokens)
        reading = asyncio.create_task(self._read(name, how, prompt, wanted))
        if how in ("aborted", "cancelled"):
            await asyncio.sleep(self._dice.choice([0.0, 0.0005, 0.003, 0.01]))
            if how == "cancelled":
                reading.cancel()
            else:
                await self._engine.abort(name)
        done = await asyncio.wait_for(asyncio.wait([reading]), WAIT_SECONDS)
        assert done and (reading.cancelled() or reading.exception() is None), reading.exception()
        self.num_ended[how] += 1

    async def _read(self, name: str, how: str, prompt: list[int], wanted: list[int]) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=len(wanted))
        reason = None
        tokens: list[int] = []
        async for output in self._engine.generate(prompt, params, name):
            assert output.request_id == name
            tokens, reason = output.outputs[0].token_ids, output.outputs[0].finish_reason
            assert tokens == wanted[: len(tokens)], f"{name}: tokens of another"
            if how == "left" and len(tokens) > 2:
                return
        assert reason == ("abort" if len(tokens) < len(wanted) else "length"), name
        assert reason == "length" or how == "aborted", name


@pytest.mark.behaviour(107)
async def test_streams_get_exactly_their_own_under_aborts_and_cancels(
    engine: AsyncLLMEngine, seed: int
) -> None:
    users = Users(engine, random.Random(seed), time.monotonic() + 1.5)
    await asyncio.gather(*(users.run() for _ in range(6)))
    assert min(users.num_ended.values()) > 5
    async with asyncio.timeout(WAIT_SECONDS):
        while (counts := await engine.stats()) and counts.num_running + counts.num_waiting:
            await asyncio.sleep(0.001)
    assert counts is not None and counts.kv_usage == 0.0


@pytest.mark.behaviour(107)
async def test_a_cancelled_call_leaves_the_engine_usable(engine: AsyncLLMEngine) -> None:
    calls = [asyncio.create_task(engine.stats()) for _ in range(6)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    assert not any(isinstance(result, BaseException) for result in results[1::2])
    assert await engine.stats() is not None

"""Streams and engines hear of a core that ends; `test_kills` has the phases and the faults."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.core_clients import own_place, spawn_client
from support.live_core import pid_of
from support.patience import SOON_SECONDS
from support.simulate import expected, make_request
from support.spawned import FakeBuild, fake_config

from engine.async_engine import AsyncLLMEngine
from engine.errors import EngineDeadError
from engine.frontend.session import Session
from engine.messages.params import SamplingParams
from engine.rpc.launch import start_core
from engine.rpc.zmq_client import EngineCoreClient

SLOW = FakeBuild(step_seconds=0.005)


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with own_place(monkeypatch) as path:
        yield path


# -- the core dies


def async_engine(build: FakeBuild, **core: Any) -> tuple[AsyncLLMEngine, EngineCoreClient]:
    client = start_core(fake_config(**core), build)
    return AsyncLLMEngine(Session(fake_config(), client, None, time.monotonic)), client


async def collect(engine: AsyncLLMEngine, name: str, prompt: list[int], count: int) -> list[int]:
    params = SamplingParams(max_tokens=count, output_kind="delta")
    return [
        token
        async for output in engine.generate(prompt, params, name)
        for token in output.outputs[0].token_ids
    ]


@pytest.mark.behaviour(110)
async def test_all_streams_hear_of_a_killed_core_within_a_second() -> None:
    engine, client = async_engine(SLOW)
    tasks = [asyncio.create_task(collect(engine, str(i), [i + 1], 400)) for i in range(64)]
    await asyncio.sleep(0.5)
    os.kill(pid_of(client), signal.SIGKILL)
    start = time.monotonic()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert time.monotonic() - start < SOON_SECONDS
    for result in results:
        assert isinstance(result, EngineDeadError) and "killed by SIGKILL" in str(result)
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        await collect(engine, "later", [1], 1)
    await asyncio.to_thread(engine.shutdown)


@pytest.mark.behaviour(110)
async def test_an_idle_engine_hears_of_its_core_s_death() -> None:
    engine, client = async_engine(FakeBuild())
    assert await collect(engine, "a", [1], 3) == expected([1], 3)
    os.kill(pid_of(client), signal.SIGKILL)
    start = time.monotonic()
    while engine.is_running:
        assert time.monotonic() - start < SOON_SECONDS
        await asyncio.sleep(0.01)
    await asyncio.to_thread(engine.shutdown)


def test_a_second_sigterm_ends_at_once() -> None:
    """`contract/test_core_process.py` has the first, which drains."""
    client = spawn_client(SLOW)
    client.add(make_request("a", [1], 500))
    for _ in range(2):
        os.kill(pid_of(client), signal.SIGTERM)
        time.sleep(0.05)
    reasons = []
    while not reasons:
        for batch in client.step():
            reasons += [(end.reason, end.message) for end in batch.finished]
    assert reasons == [("abort", "the core was shut down")]
    client.shutdown()


def test_only_socket_files_listen() -> None:
    """Nothing of a core with defaults can be reached over a network."""
    client = spawn_client(FakeBuild())
    process = psutil.Process(pid_of(client))
    assert process.net_connections("inet") == []
    client.shutdown()

"""Processes are killed, stopped and told to end in every phase: errors in time, nothing left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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


# -- the parent dies

PARENT = """
import sys, tempfile, threading, time
sys.path[:0] = ["tests"]
tempfile.tempdir = {place!r}
from support.simulate import make_request
from support.spawned import FakeBuild, fake_config
from engine.rpc.launch import start_core
from engine.ipc.process import Child

if __name__ == "__main__":
    started = Child.__init__
    def tell(self, *args, **options):
        started(self, *args, **options)
        print(self.pid, flush=True)
    Child.__init__ = tell
    client = start_core(fake_config(), {build})
    if {is_busy}:
        client.add(make_request("a", [1], 400))
    print("ready", flush=True)
    time.sleep(600)
"""
PHASES = {
    "loading": ("FakeBuild(start_seconds=600)", False),
    "idle": ("FakeBuild()", False),
    "between steps": ("FakeBuild(step_seconds=0.01)", True),
    "in a step that never ends": ("FakeBuild(hang_at=2)", True),
}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("phase", PHASES)
def test_a_core_goes_with_its_parent(phase: str, how: signal.Signals, place: Path) -> None:
    build, is_busy = PHASES[phase]
    code = PARENT.format(place=str(place), build=build, is_busy=is_busy)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        core = psutil.Process(int(parent.stdout.readline()))
        if phase == "loading":
            time.sleep(1.5)  # it is importing, or sleeping in its build
        else:
            assert parent.stdout.readline() == b"ready\n"
            time.sleep(0.1)
        parent.send_signal(how)
        parent.wait()
        start = time.monotonic()
        while core.is_running() and core.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() - start < SOON_SECONDS, f"the core outlived its parent: {core}"
            time.sleep(0.01)


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


@pytest.mark.behaviour(126)
async def test_a_hundred_streams_over_the_wire_and_cancelling_disturbs_nobody() -> None:
    engine, client = async_engine(FakeBuild(step_seconds=0.001))
    for _ in range(2):  # ids can be used again
        tasks = [
            asyncio.create_task(collect(engine, str(i), [i + 1, 5], 1 + i % 30)) for i in range(100)
        ]
        await asyncio.sleep(0.01)
        for task in tasks[::3]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for i, result in enumerate(results):
            if i % 3 == 0 and isinstance(result, asyncio.CancelledError):
                continue
            assert result == expected([i + 1, 5], 1 + i % 30)
    await engine.abort([])  # behind the aborts of those that were cancelled
    assert client.num_unfinished() == 0
    await asyncio.to_thread(engine.shutdown)


KILLS: dict[str, Callable[[int], None]] = {
    "SIGKILL": lambda pid: os.kill(pid, signal.SIGKILL),
    "SIGSEGV": lambda pid: os.kill(pid, signal.SIGSEGV),
    "SIGABRT": lambda pid: os.kill(pid, signal.SIGABRT),
}


@pytest.mark.behaviour(110)
@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("phase", ["idle", "prefill", "decode", "in a call", "draining"])
def test_a_core_killed_in_any_phase(kill: str, phase: str) -> None:
    client = spawn_client(FakeBuild(step_seconds=0.2))
    if phase != "idle":
        client.add(make_request("a", [1], 100))
    if phase == "decode":
        while not client.step():
            pass
    if phase == "draining":
        os.kill(pid_of(client), signal.SIGTERM)
        time.sleep(0.05)
    KILLS[kill](pid_of(client))
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=f"its process was killed by {kill}"):
        for _ in range(100):
            client.call("echo", 1) if phase == "in a call" else client.step()
    assert time.monotonic() - start < SOON_SECONDS
    client.shutdown()


def test_sigterm_drains_and_the_second_one_ends_at_once() -> None:
    client = spawn_client(SLOW)
    client.add(make_request("a", [1], 60))
    os.kill(pid_of(client), signal.SIGTERM)
    tokens, reasons = [], []
    while not reasons:
        for batch in client.step():
            tokens += batch.token_ids
            reasons += [end.reason for end in batch.finished]
    assert tokens == expected([1], 60) and reasons == ["length"]
    client.shutdown()
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


def test_a_core_starts_again_after_every_death() -> None:
    for turn in range(6):
        client = spawn_client(FakeBuild(raise_at=4 if turn % 3 == 2 else None))
        client.add(make_request("a", [1], 400))
        client.step()
        process = psutil.Process(pid_of(client))
        if turn % 3 == 0:
            process.kill()
        client.shutdown()
        assert not process.is_running()


def test_only_socket_files_listen() -> None:
    """Nothing of a core with defaults can be reached over a network."""
    client = spawn_client(FakeBuild())
    process = psutil.Process(pid_of(client))
    assert process.net_connections("inet") == []
    client.shutdown()


def test_an_idle_core_uses_no_time() -> None:
    client = spawn_client(FakeBuild())
    client.add(make_request("a", [1], 20))
    while client.has_unfinished():
        client.step()
    process = psutil.Process(pid_of(client))
    time.sleep(0.2)
    before = process.cpu_times()
    time.sleep(2.0)
    after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    assert used <= 0.02, f"{used} s of CPU in 2 s"  # one percent; the clock ticks in 0.01 s
    client.shutdown()

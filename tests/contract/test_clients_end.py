"""One contract for every way to a core: how it dies, hangs, fails to start and is shut down."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import pytest
from support.core_clients import spawn_client
from support.live_core import pid_of
from support.patience import SOON_SECONDS
from support.simulate import make_request
from support.spawned import FakeBuild, fake_config

from engine.errors import ConfigError, EngineDeadError
from engine.rpc.launch import start_core

pytestmark = pytest.mark.usefixtures("place")

SLOW = FakeBuild(step_seconds=0.002)


@pytest.mark.behaviour(110)
def test_death_reaches_who_waits_and_who_comes_later_with_its_cause(kind: str, opened: Any) -> None:
    client = opened(kind, FakeBuild(raise_at=3))
    client.add_all([make_request(str(i), [i + 1], 20) for i in range(3)])
    with pytest.raises(EngineDeadError, match="ArithmeticError: the worker fell over") as info:
        for _ in range(100):
            client.step()
    assert "the worker fell over" in str(info.value.__cause__)
    for call in (
        client.step,
        lambda: client.add(make_request("later", [1], 1)),
        lambda: client.abort(["0"]),
        lambda: client.call("echo", 1),
        client.stats,
    ):
        with pytest.raises(EngineDeadError, match="the worker fell over"):
            call()


@pytest.mark.behaviour(110)
def test_what_building_the_core_raised_is_reported() -> None:
    with pytest.raises(EngineDeadError, match="initialization failed: ValueError: no luck") as info:
        start_core(fake_config(), FakeBuild(fail_start="no luck"))
    assert "FakeBuild" in str(info.value.__cause__) or "spawned.py" in str(info.value.__cause__)
    assert isinstance(info.value, RuntimeError)


def test_a_mistake_in_the_options_is_the_same_error_as_in_this_process() -> None:
    build = FakeBuild(options={"max_num_seqs": -1})
    for is_here in (True, False):
        with pytest.raises(ConfigError, match="max_num_seqs is -1"):
            build(fake_config()) if is_here else spawn_client(build)


@pytest.mark.behaviour(111)
def test_the_time_to_get_ready_is_bounded_and_the_message_says_what_was_awaited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.ipc.process.LATE_SECONDS", 0.1)
    start = time.monotonic()
    with (
        caplog.at_level("INFO", logger="engine"),
        pytest.raises(EngineDeadError, match=r"core was not ready in 1 s; raise core_ready"),
    ):
        start_core(fake_config(core_ready_timeout=1.0), FakeBuild(start_seconds=60))
    assert time.monotonic() - start < SOON_SECONDS
    (late,) = (each for each in caplog.records if "is not ready after" in each.getMessage())
    assert late.levelname == "INFO"  # a first start compiles kernels
    assert "given up after 1 s (core_ready_timeout)" in late.getMessage()


def test_options_that_cannot_travel_are_a_config_error() -> None:
    class Local(FakeBuild):
        pass

    with pytest.raises(ConfigError, match="cannot be sent to the process of the engine core"):
        start_core(fake_config(), Local())


@pytest.mark.behaviour(116)
def test_shutdown_twice_leaves_nothing() -> None:
    children = set(psutil.Process().children(recursive=True))
    client = spawn_client(FakeBuild())
    client.add(make_request("a", [1], 400))
    client.step()
    for _ in range(2):
        client.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        client.add(make_request("b", [1], 1))
    left = set(psutil.Process().children(recursive=True)) - children
    assert not [p for p in left if "resource_tracker" not in " ".join(p.cmdline())]


def test_a_core_that_hangs_is_given_up() -> None:
    client = spawn_client(FakeBuild(hang_at=2), core_hang_timeout=1.0)
    client.add(make_request("a", [1], 20))
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"has been in one step for .* the limit is 1"):
        for _ in range(100):
            client.step()
    assert time.monotonic() - start < SOON_SECONDS
    client.shutdown()


def test_a_core_that_is_stopped_is_given_up() -> None:
    client = spawn_client(SLOW, core_hang_timeout=1.0)
    client.add(make_request("a", [1], 400))
    client.call("echo", 1)
    os.kill(pid_of(client), signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="has not answered for 1 s"):
        for _ in range(100):
            client.step()
    assert time.monotonic() - start < SOON_SECONDS
    client.shutdown()

"""Cores that die are started again: their requests end with an error, new ones are served."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.core_clients import drain, read
from support.live_core import is_running, wait_until
from support.simulate import expected, make_request
from support.spawned import FailsWhileMarked, FakeBuild, FirstFails, NotesLog, fake_config

from engine.errors import EngineDeadError, RestartingError
from engine.messages.requests import Finished
from engine.rpc.launch import start_cores
from engine.rpc.many_client import ManyCoresClient

WAIT_SECONDS = 120.0  # for a process to start on a busy machine
SLOW = FakeBuild(step_seconds=0.02)


@pytest.fixture(autouse=True)
def _leaves_nothing(tmp_path: Path, place: Path) -> None:
    """Sockets and directories are all gone at the end."""


@contextmanager
def cores(
    num: int, build: FakeBuild = SLOW, *, step_log: str | None = None, **core: Any
) -> Iterator[ManyCoresClient]:
    config = fake_config(multiprocess=True, data_parallel_size=num, on_core_death="restart", **core)
    client = start_cores(replace(config, step_log=step_log), build)
    pids = client.pids
    try:
        yield client
    finally:
        pids += client.pids
        client.shutdown()
        assert wait_until(lambda: not any(map(is_running, pids))) is not None


def until(client: ManyCoresClient, is_so: Callable[[], bool]) -> dict[str, Finished]:
    """Step until it is so; the ends that came meanwhile."""
    ends: dict[str, Finished] = {}
    end = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < end
        for batch in client.step():
            read(batch, {}, ends)
    return ends


def is_whole(client: ManyCoresClient) -> Callable[[], bool]:
    return lambda: client.num_cores().alive == client.num_cores().total


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_only_core_dies_and_is_back(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "engine")
    with cores(1, core_hang_timeout=1.0, drain_timeout=0.0) as client:
        (pid,) = client.pids
        client.add(make_request("a", [1], 400))
        client.step()
        os.kill(pid, number)
        ends = until(client, lambda: client.num_cores().alive == 0)
        with pytest.raises(RestartingError, match="is being started again") as info:
            client.add(make_request("b", [2], 5))
        assert info.value.retry_after is not None and info.value.retry_after >= 1.0
        with pytest.raises(RestartingError):
            client.call("echo", 1)
        assert client.latest_stats() is None
        client.check_alive()
        ends |= until(client, is_whole(client))
        assert ends["a"].reason in ("error", "abort")  # the latter by a core that ended in order
        assert client.pids != [pid] and not is_running(pid)
        assert client.call("echo", 7) == 7
        client.add(make_request("b", [2], 5))
        assert drain(client)[0] == {"b": expected([2], 5)}
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(lines) == 1 and "it is started again (1 of 5 times)" in lines[0]
    if number in (signal.SIGKILL, signal.SIGSEGV):
        assert f"its process was killed by {number.name}" in lines[0]
    if number == signal.SIGSTOP:
        assert "has not answered for 1 s (core_hang_timeout)" in lines[0]
    assert any("core 0 of 1 serves again" in record.getMessage() for record in caplog.records)


def test_one_of_two_dies_and_the_other_goes_on() -> None:
    with cores(2) as client:
        client.add_all([make_request(name, [ord(name)], 40) for name in "ab"])
        first, second = client.pids
        os.kill(first, signal.SIGKILL)
        tokens, ends = drain(client, WAIT_SECONDS)
        assert sorted(end.reason for end in ends.values()) == ["error", "length"]
        (whole,) = (name for name, end in ends.items() if end.reason == "length")
        assert tokens[whole] == expected([ord(whole)], 40)
        until(client, is_whole(client))
        assert second in client.pids and first not in client.pids
        names = [f"again {i}" for i in range(8)]
        client.add_all([make_request(name, [i + 1], 5) for i, name in enumerate(names)])
        tokens, _ = drain(client, WAIT_SECONDS)
        assert tokens == {name: expected([i + 1], 5) for i, name in enumerate(names)}


def test_a_core_is_paused_as_it_was() -> None:
    with cores(1, FakeBuild()) as client:
        client.call("pause", "all")
        os.kill(client.pids[0], signal.SIGKILL)
        until(client, lambda: client.num_cores().alive == 0)
        until(client, is_whole(client))
        client.add(make_request("a", [1], 5))
        for _ in range(5):
            assert not client.step()
        os.kill(client.pids[0], signal.SIGKILL)
        until(client, lambda: client.num_cores().alive == 0)
        client.call("resume")  # while there is none
        until(client, is_whole(client))
        client.add(make_request("b", [2], 5))
        assert drain(client)[0]["b"] == expected([2], 5)


def test_a_start_that_fails_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = tmp_path / "mark"
    with cores(1, FailsWhileMarked(mark=str(mark))) as client:
        mark.touch()
        os.kill(client.pids[0], signal.SIGKILL)
        until(client, lambda: "the weights are gone" in caplog.text)
        mark.unlink()
        until(client, is_whole(client))
        assert client.call("echo", 1) == 1
    assert "core 0 of 1 could not be started again" in caplog.text


def test_nobody_waits_for_cores_whose_fellow_cannot_start(tmp_path: Path) -> None:
    fellows = cores(3, FirstFails(mark=str(tmp_path / "mark")))
    with pytest.raises(EngineDeadError, match="the weights are gone"), fellows:
        pass


def test_the_step_log_of_a_core_that_died_stays(tmp_path: Path) -> None:
    """It says why. The core that is started again writes one of its own."""
    log = tmp_path / "steps"
    with cores(1, NotesLog(), step_log=str(log)) as client:
        pids = client.pids
        for _ in range(2):
            os.kill(client.pids[0], signal.SIGKILL)
            until(client, lambda: client.num_cores().alive == 0)
            until(client, is_whole(client))
            pids += client.pids
    names = ["steps", "steps.1", "steps.2"]
    assert [int((tmp_path / name).read_text()) for name in names] == pids


def test_a_start_that_the_end_cuts_short_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "engine")
    with cores(2, FakeBuild(start_seconds=1.0)) as client:
        os.kill(client.pids[0], signal.SIGKILL)
        until(client, lambda: client.num_cores().alive == 1)
        client.end_restarts()
        until(client, lambda: "is not started again: the engine is ending" in caplog.text)
        assert client.call("echo", 7) == 7
    errors = [each for each in caplog.records if each.levelname == "ERROR"]
    assert len(errors) == 1 and "was killed by SIGKILL" in errors[0].getMessage()


def test_all_is_over_when_no_start_succeeds(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with cores(1, FailsWhileMarked(mark=str(mark))) as client:
        mark.touch()
        os.kill(client.pids[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="the weights are gone"):
            until(client, lambda: False)
        for call in (client.check_alive, client.step, lambda: client.call("echo", 1)):
            with pytest.raises(EngineDeadError):
                call()


def test_no_core_is_started_for_an_engine_that_ends() -> None:
    with cores(1) as client:
        client.end_restarts()
        os.kill(client.pids[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="not started again: the engine is ending"):
            until(client, lambda: False)


def test_a_shutdown_ends_a_core_that_is_being_started(tmp_path: Path) -> None:
    """The fixtures hold that no process and no directory is left."""
    with cores(1, FakeBuild(start_seconds=2.0)) as client:
        os.kill(client.pids[0], signal.SIGKILL)
        until(client, lambda: client.num_cores().alive == 0)
        client.shutdown()
        with pytest.raises(EngineDeadError):
            client.check_alive()

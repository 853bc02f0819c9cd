"""Clients that are forgotten, forked, closed elsewhere, woken all the time, or asked nonsense."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.core_clients import REMOTE, HostedCore, a_client, drain, own_place, spawn_client
from support.live_core import is_running, wait_until
from support.patience import WAIT_SECONDS
from support.simulate import expected, make_request
from support.spawned import FakeBuild

from engine.core.client import NumCores
from engine.errors import EngineDeadError
from engine.ipc.address import Address
from engine.rpc.many_client import ManyCoresClient
from engine.rpc.zmq_client import EngineCoreClient


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with own_place(monkeypatch) as path:
        yield path


def forget(address: Address) -> None:
    """Make a client, and leave it to the garbage collector in a ring of references."""
    client: Any = EngineCoreClient(address)
    client.itself = client


def test_a_client_that_was_never_closed_can_be_collected() -> None:
    """Its context waited for its sockets for ever, in whatever was the thread's at that moment."""
    with HostedCore(FakeBuild()) as core:
        gc.disable()
        try:
            forget(core.address)
            collecting = threading.Thread(target=gc.collect, daemon=True)
            collecting.start()
            collecting.join(WAIT_SECONDS)
            assert not collecting.is_alive()
        finally:
            gc.enable()


def test_a_forked_copy_of_a_client_says_that_it_is_one() -> None:
    """It span for ever, and what it sent came from nobody."""
    with a_client(REMOTE) as client:
        client.add(make_request("a", [1], 5))
        pid = os.fork()
        if pid == 0:
            try:
                with pytest.raises(EngineDeadError, match="belongs to process"):
                    for _ in range(100):
                        client.step()
                with pytest.raises(EngineDeadError, match="belongs to process"):
                    client.add(make_request("b", [1], 5))
                client.shutdown()
                os._exit(0)
            finally:
                os._exit(1)
        if wait_until(lambda: not is_running(pid)) is None:
            os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0) == (pid, 0)
        assert drain(client)[0] == {"a": expected([1], 5)}


def test_a_hang_is_noticed_by_a_client_that_is_woken_all_the_time() -> None:
    """Each request that arrives wakes the thread of a server."""
    client = spawn_client(FakeBuild(hang_at=2), core_hang_timeout=1.0)
    client.add(make_request("a", [1], 20))
    is_over = threading.Event()

    def wake() -> None:
        while not is_over.wait(0.02):
            client.wake()

    waking = threading.Thread(target=wake)
    waking.start()
    try:
        until = time.monotonic() + WAIT_SECONDS
        with pytest.raises(EngineDeadError, match="has been in one step for"):
            while time.monotonic() < until:
                client.step()
    finally:
        is_over.set()
        waking.join()
        client.shutdown()


@pytest.mark.parametrize("kind", ["remote", "two cores"])
def test_an_add_that_fails_half_way_leaves_no_id_in_use(kind: str) -> None:
    good = make_request("a", [1], 5)
    bad = msgspec.structs.replace(good, request_id="b", prompt_token_ids=None)
    with a_client(kind) as client:
        with pytest.raises(TypeError):
            client.add_all([good, bad])
        client.abort(["a", "b"])
        assert not client.has_unfinished()
        client.add(good)
        assert drain(client)[0] == {"a": expected([1], 5)}


def test_what_other_cores_bring_is_read_when_one_has_died() -> None:
    """The requests of that one end with an error, and the others go on."""
    with HostedCore(FakeBuild()) as core, HostedCore(FakeBuild(raise_at=1)) as dying:
        client = ManyCoresClient([EngineCoreClient(each.address) for each in (core, dying)])
        for name in "ab":  # one at each
            client.add(make_request(name, [ord(name)], 5))
        tokens, ends = drain(client)
        assert tokens["a"] == expected([ord("a")], 5)
        assert ends["b"].reason == "error" and ends["b"].code == "core_died"
        assert "the worker fell over" in ends["b"].message
        client.add(make_request("c", [3], 5))
        assert drain(client)[0] == {"c": expected([3], 5)}
        assert client.num_cores() == NumCores(alive=1, total=2, deaths=1)
        client.shutdown()

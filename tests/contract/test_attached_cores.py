"""Several cores that run already behind one client: what it checks, names and leaves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.core_clients import HostedCore, drain
from support.patience import WAIT_SECONDS
from support.processes import open_files
from support.simulate import expected, make_request
from support.spawned import FakeBuild, fake_config

from engine.errors import ConfigError, EngineDeadError
from engine.rpc.launch import open_core
from engine.rpc.many_client import ManyCoresClient
from engine.rpc.zmq_client import EngineCoreClient

pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def attached(stack: ExitStack, *cores: HostedCore) -> Any:
    addresses = ", ".join(core.address.data for core in cores)
    client = open_core(fake_config(core_address=addresses))
    assert isinstance(client, ManyCoresClient)
    stack.callback(client.shutdown)
    return client


def hosted(stack: ExitStack, build: FakeBuild | None = None) -> HostedCore:
    return stack.enter_context(HostedCore(build or FakeBuild()))


def test_all_cores_share_the_work_and_stay_when_the_client_leaves(stack: ExitStack) -> None:
    cores = [hosted(stack) for _ in range(3)]
    client = attached(stack, *cores)
    client.add_all([make_request(str(i), [i + 1], 20) for i in range(12)])
    assert drain(client)[0] == {str(i): expected([i + 1], 20) for i in range(12)}
    client.shutdown()
    for core in cores:
        one = EngineCoreClient(core.address)
        stats = one.stats()
        assert stats is not None and stats.num_scheduled_tokens == 4 * 20
        one.shutdown()


def test_ids_of_clients_that_share_some_of_their_cores_do_not_meet(stack: ExitStack) -> None:
    first, both, last = (hosted(stack, FakeBuild(step_seconds=0.002)) for _ in range(3))
    pairs = [(first, both), (both, last), (both, first), (last, both)]
    clients = [attached(stack, *cores) for cores in pairs]
    for client in clients:
        requests = [make_request(f"{client.id_prefix}{i}", [i + 1], 30) for i in range(8)]
        assert client.add_all(requests) == {}
    for client in clients:
        wanted = {f"{client.id_prefix}{i}": expected([i + 1], 30) for i in range(8)}
        assert drain(client)[0] == wanted


@pytest.mark.behaviour(110)
def test_the_error_names_the_last_core_that_died(stack: ExitStack) -> None:
    cores = [hosted(stack, FakeBuild(raise_at=2)), hosted(stack, FakeBuild(raise_at=3))]
    client = attached(stack, *cores)
    client.add_all([make_request(str(i), [i + 1], 20) for i in range(6)])
    history = r"core \d of 2 at ipc:.*: .*ArithmeticError: the worker fell over"
    with pytest.raises(EngineDeadError, match=history) as info:
        for _ in range(100):
            client.step()
    assert "the worker fell over" in str(info.value.__cause__)
    for call in (client.stats, client.check_alive, lambda: client.abort(["0"])):
        with pytest.raises(EngineDeadError, match=history):
            call()


def test_cores_that_do_not_run_the_same_model_are_refused(stack: ExitStack) -> None:
    cores = [hosted(stack), hosted(stack, FakeBuild(options={"max_model_len": 300}))]
    with pytest.raises(ConfigError, match=r"max_model_len is 512 for the core at .* and 300 for"):
        attached(stack, *cores)


def test_one_address_that_is_wrong_leaves_nothing(stack: ExitStack) -> None:
    core = hosted(stack)
    config = fake_config(core_address=f"{core.address.data},ipc:///nowhere/core")
    before = open_files()
    for _ in range(2):
        with pytest.raises(ConfigError, match="there is no core at 'ipc:///nowhere/core'"):
            open_core(config)
    one = EngineCoreClient(core.address)
    one.shutdown()
    until = time.monotonic() + WAIT_SECONDS
    # Sockets are closed by threads of their library, a moment later; one is the core's last.
    while core.host.health().num_clients or open_files() > before + 1:
        assert time.monotonic() < until, "connections or files are left open"
        time.sleep(0.01)

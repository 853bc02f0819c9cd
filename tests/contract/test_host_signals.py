"""Signals of the process that hosts a core: which of them count, and until when."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from support.core_clients import own_place
from support.spawned import FakeBuild, fake_config

from engine.core.inproc_client import InprocClient
from engine.ipc.address import Directory
from engine.rpc.host import EngineCoreHost

SIGNAL = signal.SIGUSR1


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[InprocClient]:
    with own_place(monkeypatch):
        yield FakeBuild()(fake_config())


@pytest.fixture
def host(core: InprocClient) -> Iterator[EngineCoreHost]:
    directory = Directory.create()
    host = EngineCoreHost(core, fake_config(), directory.address, directory=directory)
    host.handle_signals(SIGNAL)
    yield host
    host.close()


@pytest.fixture
def taken() -> Iterator[list[int]]:
    """Signals that came to the program itself."""
    taken: list[int] = []
    before = signal.signal(SIGNAL, lambda number, frame: taken.append(number))
    yield taken
    signal.signal(SIGNAL, before)


def test_a_signal_while_the_host_closes_does_not_kill_it(
    taken: list[int], core: InprocClient, host: EngineCoreHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last words take up to a second, and impatient programs send SIGTERM twice."""
    raised = []
    scheduler = core._core.scheduler
    monkeypatch.setattr(scheduler, "shutdown", lambda: raised.append(signal.raise_signal(SIGNAL)))
    host.close()
    assert raised and taken == []
    signal.raise_signal(SIGNAL)
    assert taken == [SIGNAL]


def test_only_a_second_signal_ends_at_once(host: EngineCoreHost) -> None:
    """What a client asked for before is none."""
    host.drain(20.0)
    signal.raise_signal(SIGNAL)
    assert host.ending.at is not None and host.ending.at > time.monotonic() + 10.0
    signal.raise_signal(SIGNAL)
    assert host.ending.at <= time.monotonic()

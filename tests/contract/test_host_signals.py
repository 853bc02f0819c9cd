"""Signals of the process that hosts a core: which of them count, and until when."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.core_clients import own_place
from support.spawned import FakeBuild, fake_config

from engine.ipc.address import Directory
from engine.rpc.host import EngineCoreHost
from engine.sched import Scheduler

SIGNAL = signal.SIGUSR1


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with own_place(monkeypatch) as path:
        yield path


def make_host(**options: Any) -> EngineCoreHost:
    """A host that has taken the signal; ``options`` are those of its scheduler."""
    directory, config = Directory.create(), fake_config()
    core = FakeBuild(options=options)(config)
    host = EngineCoreHost(core, config, directory.address, directory=directory)
    host.handle_signals(SIGNAL)
    return host


@pytest.fixture
def host() -> Iterator[EngineCoreHost]:
    host = make_host()
    yield host
    host.close()


@pytest.fixture
def taken() -> Iterator[list[int]]:
    """Signals that came to the program itself."""
    taken: list[int] = []
    before = signal.signal(SIGNAL, lambda number, frame: taken.append(number))
    yield taken
    signal.signal(SIGNAL, before)


class SignalledScheduler(Scheduler):
    """A signal comes while it ends."""

    num_signals: ClassVar[int] = 0

    def shutdown(self) -> None:
        type(self).num_signals += 1
        signal.raise_signal(SIGNAL)
        super().shutdown()


def test_a_signal_while_the_host_closes_does_not_kill_it(taken: list[int]) -> None:
    """Its last words take up to a second, and impatient programs send SIGTERM twice."""
    make_host(scheduler_cls=SignalledScheduler).close()
    assert SignalledScheduler.num_signals == 1 and taken == []
    signal.raise_signal(SIGNAL)
    assert taken == [SIGNAL]


def test_only_a_second_signal_ends_at_once(host: EngineCoreHost) -> None:
    """What a client asked for before is none."""
    host.drain(20.0)
    signal.raise_signal(SIGNAL)
    assert host.ending.at is not None and host.ending.at > time.monotonic() + 10.0
    signal.raise_signal(SIGNAL)
    assert host.ending.at <= time.monotonic()

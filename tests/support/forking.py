"""Cores whose processes are hard to end, and scripts of parents that are killed or fork."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.config.engine import EngineConfig
from engine.core.inproc_client import InprocClient
from engine.sched.interface import StepOutputs
from support.spawned import FakeBuild


def fork_sleeper() -> int:
    """A copy of this process, with all that it has open, which does nothing. Returns its id."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def end_sleeper(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Forking(FakeBuild):
    """A core whose process forks a sleeper in its first step, with all sockets open.

    The sleeper's id is written to ``pid_file``.
    """

    pid_file: str = ""

    def __call__(
        self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> InprocClient:
        client = super().__call__(config, clock=clock)
        turn = client.turn

        def first_turn() -> StepOutputs:
            Path(self.pid_file).write_text(str(fork_sleeper()))
            client.turn = turn  # type: ignore[method-assign]
            return turn()

        client.turn = first_turn  # type: ignore[method-assign]
        return client


@dataclass(frozen=True)
class Clinging(FakeBuild):
    """A core that never lets go of its memory."""

    def __call__(
        self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> InprocClient:
        client = super().__call__(config, clock=clock)
        client.shutdown = lambda: time.sleep(3600)  # type: ignore[method-assign]
        return client


PARENT = """
import gc, os, sys, tempfile, time
sys.path[:0] = ["tests"]
tempfile.tempdir = {place!r}
from support.forking import Clinging, end_sleeper, fork_sleeper
from support.spawned import FakeBuild, fake_config
from engine.rpc.launch import start_core

if __name__ == "__main__":
    client = start_core(fake_config(), {build})
"""

DIES_BEFORE_ITS_FORK = """
    print(client._child.pid, fork_sleeper(), flush=True)
    time.sleep(60)
"""

CLOSES_BEFORE_ITS_FORK = """
    if os.fork() == 0:
        del client  # the copy's: nothing that it lets go of is its own
        gc.collect()
        os._exit(0)
    os.wait()
    assert client.call("echo", 1) == 1
    sleeper = fork_sleeper()
    start = time.monotonic()
    process = client._child._process
    ended = []
    process.close = lambda: ended.append(process.exitcode)
    client.shutdown()
    end_sleeper(sleeper)
    print(time.monotonic() - start, *ended)
"""

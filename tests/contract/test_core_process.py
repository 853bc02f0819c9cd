"""A core's process and its parent: each ends the other in time, stopped, hung or forked from."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from support.core_clients import drain, spawn_client
from support.forking import (
    CLOSES_BEFORE_ITS_FORK,
    DIES_BEFORE_ITS_FORK,
    PARENT,
    Clinging,
    Forking,
    end_sleeper,
)
from support.live_core import pid_of
from support.patience import SOON_SECONDS
from support.processes import collect_garbage
from support.simulate import expected, make_request
from support.spawned import FakeBuild, fake_config

from engine.errors import EngineDeadError
from engine.frontend.session import Session
from engine.ipc.address import Directory
from engine.llm_engine import LLMEngine
from engine.messages.params import SamplingParams
from engine.rpc.host import EngineCoreHost
from engine.rpc.launch import connect, spawn, start_core, start_cores
from engine.rpc.server import Ending

pytestmark = pytest.mark.usefixtures("place")


# -- forks


@pytest.mark.behaviour(110)
def test_a_killed_core_is_noticed_although_a_process_that_it_forked_lives(place: Path) -> None:
    pid_file = place / "pid"
    client = spawn_client(Forking(step_seconds=0.3, pid_file=str(pid_file)))
    try:
        client.add(make_request("a", [1], 400))
        while not client.step():
            pass
        os.kill(pid_of(client), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(EngineDeadError, match="its process was killed by SIGKILL"):
            for _ in range(50):
                client.step()
        client.shutdown()
        assert time.monotonic() - start < SOON_SECONDS
    finally:
        end_sleeper(int(pid_file.read_text()))
        pid_file.unlink()


@pytest.mark.parametrize("build", ["FakeBuild()", "Clinging()"])
def test_a_core_goes_with_its_parent_although_a_fork_of_that_lives(build: str, place: Path) -> None:
    code = PARENT.format(place=str(place), build=build) + DIES_BEFORE_ITS_FORK
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        core, sleeper = map(int, parent.stdout.readline().split())
        process = psutil.Process(core)
        parent.kill()
        parent.wait()
        start = time.monotonic()
        try:
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() - start < SOON_SECONDS, "the core outlived its parent"
                time.sleep(0.01)
        finally:
            end_sleeper(sleeper)


def test_a_core_ends_when_it_is_asked_to_although_a_fork_of_its_parent_lives(place: Path) -> None:
    code = PARENT.format(place=str(place), build="FakeBuild()") + CLOSES_BEFORE_ITS_FORK
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, status = done.stdout.split()
    assert float(seconds) < SOON_SECONDS and status == "0", done  # in order: it was not killed


# -- ends


def test_an_interrupt_at_the_terminal_is_for_the_parent_alone() -> None:
    child, address = spawn(fake_config(), FakeBuild())
    os.kill(child.pid, signal.SIGINT)  # while Python itself starts
    client = connect(fake_config(), child, address)
    os.kill(child.pid, signal.SIGINT)
    client.add(make_request("a", [1], 3))
    assert drain(client)[0] == {"a": expected([1], 3)}
    client.shutdown()


@pytest.mark.behaviour(116)
@pytest.mark.parametrize("build", [FakeBuild(), FakeBuild(hang_at=2), Clinging()])
def test_a_core_that_is_stopped_or_hangs_is_gone_two_seconds_after_shutdown(
    build: FakeBuild,
) -> None:
    client = spawn_client(build)
    client.add(make_request("a", [1], 400))
    process = psutil.Process(pid_of(client))
    if build == FakeBuild():
        process.suspend()
    else:
        time.sleep(0.1)
    start = time.monotonic()
    client.shutdown()
    assert time.monotonic() - start < SOON_SECONDS
    assert not process.is_running()


@pytest.mark.behaviour(116)
def test_cores_that_are_stopped_are_given_up_together() -> None:
    client = start_cores(fake_config(multiprocess=True, data_parallel_size=3), FakeBuild())
    processes = [psutil.Process(pid) for pid in client.pids]
    for process in processes:
        process.suspend()
    start = time.monotonic()
    client.shutdown()
    assert time.monotonic() - start < 5.5  # one after the other it would be six
    assert not any(process.is_running() for process in processes)


def test_a_core_that_got_sigterm_keeps_the_time_that_it_promised() -> None:
    client = spawn_client(FakeBuild(step_seconds=0.01), drain_timeout=20.0)
    client.add_all([make_request(str(i), [i + 1], 150) for i in range(4)])
    os.kill(pid_of(client), signal.SIGTERM)
    assert drain(client)[0] == {str(i): expected([i + 1], 150) for i in range(4)}
    with pytest.raises(EngineDeadError, match="was shut down"):
        for _ in range(100):
            client.step()
    client.shutdown()


@pytest.mark.parametrize("serves", [False, True])
def test_a_closed_host_has_put_back_what_it_took_of_signals(serves: bool) -> None:
    numbers = (signal.SIGUSR1, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    directory = Directory.create()
    config = fake_config()
    host = EngineCoreHost(FakeBuild()(config), config, directory.address, directory=directory)
    host.handle_signals(*numbers)
    if serves:
        threading.Timer(0.05, signal.raise_signal, [signal.SIGUSR1]).start()
        host.serve()
    host.close()
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(fd) == fd
    host.close()


@pytest.mark.parametrize("call", ["multiprocessing.context.BaseContext.Pipe", "os.pidfd_open"])
def test_a_process_that_the_system_does_not_give_is_an_error_and_leaves_nothing(
    call: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    start_core(fake_config(), FakeBuild()).shutdown()  # which has imported all that there is
    before = what_is_open(place)
    with monkeypatch.context() as patch:
        patch.setattr(call, refuse)
        with pytest.raises(EngineDeadError, match=r"no process for the engine core: .*Too many"):
            start_core(fake_config(), FakeBuild())
    assert what_is_open(place) == before


class Interrupted(float):
    """A time; a signal comes in the middle of its first comparison."""

    has_come = False

    def __lt__(self, other: float) -> bool:
        if not self.has_come:
            self.has_come = True
            signal.raise_signal(signal.SIGUSR1)
        return float(self) < other


def test_a_signal_while_the_end_is_set_neither_hangs_nor_puts_it_off() -> None:
    """The second signal, which ends at once, was undone if it came while the first was noted."""
    ending = Ending()
    before = signal.signal(signal.SIGUSR1, lambda *_: ending.no_later_than(5.0))
    try:
        ending.no_later_than(9.0)
        ending.no_later_than(Interrupted(7.0))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ending.at == 5.0


def what_is_open(place: Path) -> tuple[int, int, list[Path]]:
    """Descriptors, threads, and directories of cores; without what earlier tests have dropped."""
    collect_garbage()
    fds, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return fds, threads, list(place.iterdir())


@pytest.mark.behaviour(110)
def test_an_engine_whose_core_died_is_closed_and_another_made_again_and_again(
    place: Path,
) -> None:
    opened = None
    for _ in range(4):
        client = start_core(fake_config(), FakeBuild())
        engine = LLMEngine(Session(fake_config(), client, None, time.monotonic))
        engine.add_request("a", [7, 8], SamplingParams(max_tokens=400))
        engine.step()
        os.kill(pid_of(client), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="its process was killed by SIGKILL"):
            for _ in range(1000):
                engine.step()
        engine.shutdown()
        opened = opened or what_is_open(place)  # the first has imported, and keeps its cache
    assert what_is_open(place) == opened

"""One fault in one process of an engine in one phase, and what the others must do about it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.errors import EngineDeadError
from engine.ipc.address import Address
from engine.rpc.zmq_client import EngineCoreClient
from support import kill_actor, kill_ranks, kill_server
from support.hostile import Hostile
from support.kill_outcome import Cell, Outcome
from support.live_core import is_running, own_directory, pid_of, shared_names, wait_until
from support.patience import WAIT_SECONDS
from support.processes import tree_of
from support.streams import Lengths, Streams

DEATH_SECONDS = 1.0  # from a core's death to errors
HANG_SECONDS = kill_actor.HANG_SECONDS + 1.0  # from its last sign of life
TREE_SECONDS = 2.0  # from a parent's death to its core's end
GONE_SECONDS = 1.0  # from the end of others' work until nothing is left of a client that died
WORK_SECONDS = 20.0  # for streams to end that nothing hinders, on a machine that may be busy
READY_SECONDS = 4.0  # a core may take to start


class Scene:
    """Where it happens: a directory, and processes that use it."""

    def __init__(self, directory: Path, phase: str) -> None:
        self.directory = directory
        self.phase = phase
        self.trigger = directory / "trigger"

    def spawn(self, kind: str, argument: str) -> subprocess.Popen[str]:
        """An actor that has come to the phase."""
        paths = os.pathsep.join(path for path in sys.path if path)
        actor = subprocess.Popen(
            [sys.executable, kill_actor.__file__, kind, self.phase, argument],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert actor.stdout is not None
        assert actor.stdout.readline() == "ready\n", f"the {kind} failed before {self.phase}"
        actor.stdout.close()
        return actor

    def sockets(self) -> list[str]:
        """Directories of cores."""
        return [path.name for path in self.directory.iterdir() if path != self.trigger]

    @staticmethod
    def alive(pids: Iterable[int]) -> list[int]:
        return [pid for pid in pids if is_running(pid)]

    @staticmethod
    def kill(pid: int, number: int) -> None:
        if is_running(pid):
            os.kill(pid, number)


class Waiter(threading.Thread):
    """Somebody who uses a core until it dies, or until the work is done."""

    def __init__(self, name: str, work: Callable[[Waiter], object]) -> None:
        super().__init__(name=name, daemon=True)
        self.error: BaseException | None = None
        self.is_at_work = threading.Event()
        self._ended_at: float | None = None
        self._work = work
        self.start()

    def run(self) -> None:
        try:
            self._work(self)
        except BaseException as error:
            self.note(error)
        self.note(None)

    def note(self, error: BaseException | None) -> None:
        """It is over now, whatever is still to be tidied up."""
        if self._ended_at is None:
            self._ended_at, self.error = time.monotonic(), error

    def seconds_after(self, began: float, limit: float) -> float | None:
        """When it ended; ``None`` if it has not by then."""
        wait_until(lambda: self._ended_at is not None, began + limit - time.monotonic())
        return None if self._ended_at is None else max(0.0, self._ended_at - began)


def run_cell(cell: Cell, patience: float = 1.0) -> Outcome:
    """Let it happen, in a directory of its own, and look what is left.

    ``patience``: by which limits are longer, on a machine that may be busy.
    """
    outcome = Outcome(cell, patience)
    names = shared_names()
    hit = HITS[cell.target]
    if cell.phase == "handshake" and cell.target == "core":
        hit = _hit_start
    with own_directory() as directory:
        scene = Scene(directory, cell.phase)
        try:
            hit(cell, scene, outcome)
        except Exception as error:
            outcome.failures.append(f"{type(error).__name__}: {error}")
        outcome.check(wait_until(lambda: not scene.sockets()), f"left: {scene.sockets()}")
    new = {path.name for path in shared_names() - names}
    outcome.check(not new, f"left in shared memory: {new}")
    return outcome


# The core


def _hit_start(cell: Cell, scene: Scene, outcome: Outcome) -> None:
    """While the core loads."""
    waiter = Waiter(
        "start",
        lambda waiter: kill_actor.start_core(
            str(scene.trigger), cell.phase, core_ready_timeout=READY_SECONDS
        ),
    )
    assert wait_until(multiprocessing.active_children), "no core was started"
    (child,) = multiprocessing.active_children()
    time.sleep(0.3)
    began = time.monotonic()
    scene.kill(child.pid or 0, signal.Signals[cell.fault])
    # One that is stopped is found out when it should have been ready.
    limit = DEATH_SECONDS + (READY_SECONDS if cell.fault == "SIGSTOP" else 0.0)
    took = waiter.seconds_after(began, WAIT_SECONDS)
    outcome.within(took, limit, "the error")
    error = waiter.error
    outcome.check(isinstance(error, EngineDeadError), f"start_core: {error!r}")
    outcome.check("initialization failed" in str(error), f"the error says {error}")


def _hit_core(cell: Cell, scene: Scene, outcome: Outcome) -> None:
    owner = kill_actor.start_core(
        str(scene.trigger), cell.phase, core_hang_timeout=kill_actor.HANG_SECONDS
    )
    pid = pid_of(owner)
    caller = EngineCoreClient(owner.address, hang_timeout=kill_actor.HANG_SECONDS)
    streams = kill_actor.come_to(cell.phase, owner)
    if cell.phase == "draining":
        streams.reasons.add("abort")
        scene.kill(pid, signal.SIGTERM)
    waiters = [
        Waiter("streams", lambda waiter: _read_for_ever(waiter, owner, streams)),
        Waiter("calls", lambda waiter: _call_for_ever(waiter, caller)),
    ]
    if cell.phase == "add":
        waiters.append(Waiter("adds", lambda waiter: _add_for_ever(waiter, owner.address)))
    for waiter in waiters:
        assert waiter.is_at_work.wait(WAIT_SECONDS), f"{waiter.name} never began: {waiter.error!r}"
    began = time.monotonic()
    if cell.fault == "garbage":
        _survive_garbage(cell, owner, waiters, outcome)
    else:
        _harm(cell, scene, pid)
        _all_hear_of_it(cell, waiters, began, outcome)
    caller.shutdown()
    owner.shutdown()
    outcome.check(wait_until(lambda: not is_running(pid)), "the core lives on")


def _harm(cell: Cell, scene: Scene, pid: int) -> None:
    if cell.fault in ("raise", "hang"):
        scene.trigger.write_text("hang in add" if cell.phase == "add" else cell.fault)
    else:
        scene.kill(pid, signal.Signals[cell.fault])


def _all_hear_of_it(cell: Cell, waiters: list[Waiter], began: float, outcome: Outcome) -> None:
    """Each gets an error of the engine, in time. A core that drains does its work before."""
    limit = HANG_SECONDS if cell.fault in ("SIGSTOP", "hang") else DEATH_SECONDS
    if cell.fault == "SIGTERM" and cell.phase in ("prefill", "decode"):
        limit = WORK_SECONDS
    _hear_of_it(waiters, began, limit, outcome)
    if cell.fault == "raise":
        outcome.check("the worker fell over" in str(waiters[0].error), "the cause is not named")


def _hear_of_it(waiters: list[Waiter], began: float, limit: float, outcome: Outcome) -> None:
    for waiter in waiters:
        outcome.within(
            waiter.seconds_after(began, WAIT_SECONDS), limit, f"the error of {waiter.name}"
        )
        error = waiter.error
        outcome.check(isinstance(error, EngineDeadError), f"{waiter.name} heard {error!r}")


def _survive_garbage(
    cell: Cell, owner: EngineCoreClient, waiters: list[Waiter], outcome: Outcome
) -> None:
    hostile = Hostile(owner.address, random.Random(str(cell)))
    hostile.attack(200)
    hostile.close()
    if cell.phase == "draining":
        _all_hear_of_it(Cell("core", "SIGTERM", "decode"), waiters, time.monotonic(), outcome)
        return
    time.sleep(0.5)
    for waiter in waiters[1:]:
        outcome.check(waiter.is_alive(), f"{waiter.name} heard {waiter.error!r}")
    os.kill(pid_of(owner), signal.SIGKILL)
    _all_hear_of_it(Cell("core", "SIGKILL", "idle"), waiters, time.monotonic(), outcome)


def _read_for_ever(waiter: Waiter, client: EngineCoreClient, streams: Streams) -> None:
    waiter.is_at_work.set()
    streams.finish()
    while True:
        client.step()
        client.call("stats")


def _call_for_ever(waiter: Waiter, client: EngineCoreClient) -> None:
    while True:
        client.call("stats")
        waiter.is_at_work.set()
        time.sleep(0.01)


def _add_for_ever(waiter: Waiter, address: Address) -> None:
    client = EngineCoreClient(address, hang_timeout=kill_actor.HANG_SECONDS)
    streams = Streams(client, 1, random.Random(0), lengths=Lengths(output=(1, 2)))
    try:
        while True:
            streams.fill()
            streams.finish()
            waiter.is_at_work.set()
            time.sleep(0.1)  # so that the core waits when the next one comes
    except EngineDeadError as error:
        waiter.note(error)
    finally:
        client.shutdown()


# A client of a core that others use too


def _hit_client(cell: Cell, scene: Scene, outcome: Outcome) -> None:
    owner = kill_actor.start_core(str(scene.trigger), "idle")
    pid = pid_of(owner)
    try:
        actor = scene.spawn("client", owner.address.data)
        bystander = kill_actor.come_to("decode", owner)
        if cell.phase == "draining":
            scene.kill(pid, signal.SIGTERM)
        _hurt(cell, scene, actor)
        bystander.finish()
        if cell.fault != "SIGSTOP":
            # Its requests would go on for seconds, had it not gone.
            is_over = _is_over if cell.phase == "draining" else _is_quiet
            outcome.within(wait_until(lambda: is_over(owner)), GONE_SECONDS, "its end")
        _revive(cell, scene, actor, outcome)
    finally:
        owner.shutdown()


def _hurt(cell: Cell, scene: Scene, actor: subprocess.Popen[str]) -> None:
    own = {"raise": signal.SIGUSR1, "garbage": signal.SIGUSR2}
    number = own.get(cell.fault) or signal.Signals[cell.fault]
    scene.kill(actor.pid, number)
    if number in (signal.SIGKILL, signal.SIGTERM):
        actor.wait()


def _revive(cell: Cell, scene: Scene, actor: subprocess.Popen[str], outcome: Outcome) -> None:
    """Who was only stopped goes on as if nothing had been."""
    if cell.fault != "SIGSTOP" or cell.phase == "handshake":
        scene.kill(actor.pid, signal.SIGKILL)
        actor.wait()
        return
    scene.kill(actor.pid, signal.SIGCONT)
    status = actor.wait()
    if cell.target == "parent" or cell.phase != "draining":
        outcome.check(status == 0, f"who was stopped for a while ended with {status}")


def _is_over(owner: EngineCoreClient) -> bool:
    return not is_running(pid_of(owner))


def _is_quiet(owner: EngineCoreClient) -> bool:
    stats = owner.stats()
    assert stats is not None
    return not stats.num_running + stats.num_waiting + stats.num_parked


# The process that started the core


def _hit_parent(cell: Cell, scene: Scene, outcome: Outcome) -> None:
    actor = scene.spawn("parent", str(scene.trigger))
    if cell.phase == "handshake":
        assert wait_until(lambda: len(tree_of(actor.pid)) > 1), "no core was started"
        time.sleep(0.3)
    tree = tree_of(actor.pid)
    try:
        _hurt(cell, scene, actor)
        if cell.fault == "SIGSTOP":
            time.sleep(0.3)
            outcome.check(scene.alive(tree[1:]), "the core ended with a parent that is stopped")
            _revive(cell, scene, actor, outcome)
        else:
            actor.wait()
        gone = wait_until(lambda: not scene.alive(tree))
        outcome.within(gone, TREE_SECONDS, "the end of the tree")
    finally:
        for pid in scene.alive(tree):
            scene.kill(pid, signal.SIGKILL)


# A server, and the core behind it


def _hit_served_core(cell: Cell, scene: Scene, outcome: Outcome) -> None:
    """Each stream is told, and the server ends by itself, with a status that says so."""
    with kill_server.streaming(cell.phase) as it:
        core = it.core()
        tree = tree_of(it.pid)
        _kill_under_streams(cell, scene, it, outcome)
        status = it.server.process.wait()
        wanted = 0 if cell.phase == "draining" else 1
        outcome.check(status == wanted, f"exit status {status}")
        gone = wait_until(lambda: not scene.alive([*tree, core]))
        outcome.within(gone, kill_server.TREE_SECONDS, "the end of the tree")


def _hit_restarted_core(cell: Cell, scene: Scene, outcome: Outcome) -> None:
    """Each stream is told, and new ones are served by a new core; none comes while it drains."""
    with kill_server.streaming(cell.phase, "--on-core-death", "restart") as it:
        core = it.core()
        _kill_under_streams(cell, scene, it, outcome)
        if cell.phase != "draining":
            back = wait_until(it.is_served)
            outcome.within(back, kill_server.BACK_SECONDS, "a new core")
            outcome.check(it.is_healthy(), "the server is not well")
            outcome.check(it.core() != core, "the core is the same")
        tree = tree_of(it.pid)
        outcome.check(it.server.end() == 0, "the server did not end in order")
        gone = wait_until(lambda: not scene.alive([*tree, core]))
        outcome.within(gone, kill_server.TREE_SECONDS, "the end of the tree")


def _kill_under_streams(
    cell: Cell, scene: Scene, it: kill_server.Streaming, outcome: Outcome
) -> None:
    scene.kill(it.core(), signal.Signals[cell.fault])
    limit = kill_server.HANG_SECONDS + 1.0 if cell.fault == "SIGSTOP" else DEATH_SECONDS
    if cell.fault == "SIGTERM":
        limit = WORK_SECONDS
    outcome.within(it.read_on(WAIT_SECONDS), limit, "the end of the streams")
    outcome.check(not it.not_told(), f"not told: {it.not_told()}")


def _hit_server(cell: Cell, scene: Scene, outcome: Outcome) -> None:
    """It takes its core with it; one that is ended in order tells its streams first."""
    with kill_server.streaming(cell.phase) as it:
        tree = tree_of(it.pid)
        scene.kill(it.pid, signal.Signals[cell.fault])
        if cell.fault == "SIGSTOP":
            time.sleep(0.3)
            outcome.check(scene.alive(tree[1:]), "the core ended with a server that is stopped")
            scene.kill(it.pid, signal.SIGCONT)
        if cell.fault != "SIGKILL":
            outcome.within(it.read_on(WAIT_SECONDS), WORK_SECONDS, "the end of the streams")
            outcome.check(not it.not_told(), f"not told: {it.not_told()}")
            is_ending = cell.fault == "SIGTERM" or cell.phase == "draining"
            status = it.server.process.wait() if is_ending else it.server.end()
            outcome.check(status == 0, f"exit status {status}")
        gone = wait_until(lambda: not scene.alive(tree))
        outcome.within(gone, kill_server.TREE_SECONDS, "the end of the tree")


HITS: dict[str, Callable[[Cell, Scene, Outcome], None]] = {
    "core": _hit_core,
    "client": _hit_client,
    "parent": _hit_parent,
    "server": _hit_server,
    "served_core": _hit_served_core,
    "restarted_core": _hit_restarted_core,
    **dict.fromkeys(kill_ranks.RANKS, kill_ranks.hit_rank),
}

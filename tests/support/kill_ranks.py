"""One fault in one rank of a core in one phase, and what the core's clients must hear of it.

The core has three ranks, without a model. Its own process is rank 0. Faults strike in a method of a
rank's worker, or from outside where no method runs.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker

from engine.errors import EngineDeadError, EngineError
from engine.rpc.zmq_client import EngineCoreClient
from support.digest_ranks import DigestGroup, Fault, GroupBuild
from support.kill_outcome import Cell, Outcome
from support.live_core import is_running, pid_of, start, wait_until
from support.patience import WAIT_SECONDS
from support.processes import children, ranks_of, tree_of
from support.streams import Lengths, Streams

SIZE = 3
RANKS = tuple(f"rank{rank}" for rank in range(SIZE))
FAULTS = ("SIGKILL", "SIGSTOP", "raise")
STARTING = ("load", "measure", "allocate")
PHASES = (*STARTING, "idle", "launch", "collect", "call", "abort", "shutdown")
OUTSIDE = ("idle",)  # nothing runs that could raise
AFTER = 5  # calls of a method before a fault
HANG_SECONDS = 1.0  # of a rank
CORE_HANG_SECONDS = 2.0
READY_SECONDS = 4.0  # that a rank may take to start
CORE_READY_SECONDS = 12.0
DEATH_SECONDS = 1.0
SHUTDOWN_SECONDS = 4.0
NUM_STREAMS = 3
LENGTHS = Lengths(prompt=(4, 8), output=(200, 250))


def cells() -> Iterator[Cell]:
    """All cells that can happen."""
    for rank in RANKS:
        for fault in FAULTS:
            for phase in PHASES:
                if fault != "raise" or phase not in OUTSIDE:
                    yield Cell(rank, fault, phase)


def hit_rank(cell: Cell, scene: object, outcome: Outcome) -> None:
    """Let it happen, and look what is left."""
    resource_tracker.ensure_running()  # it stays
    before = children()
    rank = int(cell.target.removeprefix("rank"))
    name, other = f"rank {rank}", cell.phase in OUTSIDE
    after = AFTER if cell.phase in ("launch", "collect") else 1
    fault = Fault() if other else Fault(cell.fault, rank, cell.phase, after)
    build = GroupBuild(
        worker=DigestGroup(
            size=SIZE,
            fault=fault,
            hang_timeout=HANG_SECONDS * outcome.patience,
            ready_timeout=READY_SECONDS * outcome.patience,
        )
    )
    started: list[int] = []
    began = time.monotonic()
    try:
        client = start(
            build,
            core_hang_timeout=CORE_HANG_SECONDS * outcome.patience,
            core_ready_timeout=CORE_READY_SECONDS * outcome.patience,
        )
    except EngineDeadError as error:
        outcome.check(cell.phase in STARTING, f"the start failed: {error}")
        _check_start(cell, name, time.monotonic() - began, str(error), outcome)
    else:
        outcome.check(cell.phase not in STARTING, "the start did not fail")
        started = tree_of(pid_of(client))
        try:
            _use(cell, client, rank, name, outcome)
        finally:
            began = time.monotonic()
            client.shutdown()
            outcome.within(time.monotonic() - began, SHUTDOWN_SECONDS, "the shutdown")
    gone = wait_until(lambda: not any(map(is_running, started)) and children() <= before)
    outcome.within(gone, DEATH_SECONDS, "the end of all processes")


def _check_start(cell: Cell, name: str, seconds: float, error: str, outcome: Outcome) -> None:
    limit = {"SIGSTOP": READY_SECONDS}.get(cell.fault, 0.0)
    if cell.fault == "SIGSTOP" and name == "rank 0":
        limit = CORE_READY_SECONDS
    # Processes also take a while to start.
    outcome.within(seconds, limit + 6.0, "the error")
    _check_words(cell, name, error, outcome)


def _use(cell: Cell, client: EngineCoreClient, rank: int, name: str, outcome: Outcome) -> None:
    """Come to the phase, and read until the client hears of the fault."""
    process = ([pid_of(client), *ranks_of(pid_of(client))])[rank]
    share = 1.0 if cell.phase == "abort" else 0.0
    rng = random.Random(str(cell))
    streams = Streams(client, NUM_STREAMS, rng, cancel_share=share, lengths=LENGTHS)
    if cell.phase == "shutdown":
        streams.fill()
        while streams.counts.tokens < 3 * NUM_STREAMS:
            streams.read()
        return
    began = time.monotonic()
    if cell.phase == "idle":
        os.kill(process, signal.Signals[cell.fault])
    try:
        _come_to(cell, client, streams)
    except EngineDeadError as error:
        limit = DEATH_SECONDS
        if cell.fault == "SIGSTOP":
            limit = CORE_HANG_SECONDS + 1.0 if rank == 0 else 1.5 * HANG_SECONDS + 0.5
        outcome.within(time.monotonic() - began, limit + 1.0, "the error")
        _check_words(cell, name, str(error), outcome)
    else:
        outcome.failures.append("nobody heard of it")


def _come_to(cell: Cell, client: EngineCoreClient, streams: Streams) -> None:
    until = time.monotonic() + WAIT_SECONDS
    if cell.phase == "idle" and cell.fault == "SIGKILL":
        while time.monotonic() < until:  # without any work
            client.call("stats")
            time.sleep(0.01)
    streams.fill()
    if cell.phase == "call":
        try:
            client.call("noted")
        except EngineDeadError:
            raise
        except EngineError as error:  # who calls hears the cause, and then that the core has died
            assert "noted" in str(error), error
    while time.monotonic() < until:
        streams.turn()


def _check_words(cell: Cell, name: str, error: str, outcome: Outcome) -> None:
    """The error names rank and cause; of rank 0, which is the core, the cause only."""
    cause = {"SIGKILL": "was killed by SIGKILL", "raise": "a wire has come loose"}.get(cell.fault)
    if cause is not None:
        outcome.check(cause in error, f"the cause is not named: {error}")
    if name != "rank 0":
        outcome.check(name in error, f"{name} is not named: {error}")

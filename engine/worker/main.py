"""The process of a rank other than 0, which carries out what the core writes to the ring, or sends
it to another machine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

import msgspec

from engine.errors import WireError
from engine.ipc.process import Line, ParentWatch, StartReport, report_to_parent
from engine.ipc.rank_sockets import RankSocket
from engine.ipc.ring import RingReader, Stopped
from engine.ipc.sealed_files import SealedFile
from engine.observe.logs import set_up_logging
from engine.worker.rank import Rank, RankReport, RankWorker, report_of

END_SECONDS = 1.5  # to end by itself, once the core has requested it
ORPHANED = 70  # exit status after the death of the core


def send_report(line: Line, lock: threading.Lock, report: RankReport) -> None:
    """Send a report to the core, one at a time. Does nothing if the core has ended."""
    with lock, suppress(OSError):
        line.send_bytes(msgspec.msgpack.encode(report))


def serve_rank(
    line: Line,
    handle: SealedFile,
    rank: int,
    spin_seconds: float,
    make: Callable[[], RankWorker],
    log_level: str,
    name: str,
) -> None:
    """The main function of a rank's process: carry out calls until the core ends or requests it.

    handle: of the ring. spin_seconds: how long it looks for a message before it sleeps. make: makes
    the worker. name: of this rank, for log lines."""
    is_done = set_up(line, log_level, name)
    report = partial(send_report, line, threading.Lock())
    try:
        ring = RingReader(handle, rank - 1, spin_seconds=spin_seconds)
    except WireError as error:  # perhaps the core has ended, and its memory with it
        report(report_of(error))
        raise SystemExit(1) from None
    try:
        carry_out_all(make(), ring, report)
    except Stopped:
        pass  # another rank has failed, which the core knows
    except Exception as error:
        report(report_of(error))
        ring.stop()
        raise SystemExit(1) from None
    is_done.set()


class FarWorker(RankWorker, Protocol):
    """The worker of a rank on another machine."""

    @property
    def num_begun(self) -> int:
        """Operations with other ranks that it has begun."""
        ...


def serve_far_rank(
    line: Line,
    ip: str,
    secret: str,
    make: Callable[[], FarWorker],
    log_level: str,
    name: str,
) -> None:
    """The main function of a rank's process on another machine than the core's. Its parent, which
    learns its address, keeps it there. ip: of this machine, at which it listens."""
    is_done = set_up(line, log_level, name)
    end = RankSocket(ip, secret, partial(os._exit, ORPHANED))
    report_to_parent(line, StartReport(True, address=end.address))

    def report(found: RankReport) -> None:
        end.send_report(msgspec.msgpack.encode(found))

    try:
        end.accept()
        worker = make()
        end.progress = lambda: worker.num_begun
        carry_out_all(worker, end, report)
    except Exception as error:
        report(report_of(error))
        end.close()
        os._exit(1)  # threads that wait for other ranks would not end
    end.close()
    is_done.set()


class Calls(Protocol):
    """Where the calls of the core come from."""

    def receive(self) -> bytes:
        """Wait for the next message."""
        ...

    def report(self, index: int, value: int) -> None:
        """Let the core see a word."""
        ...


def carry_out_all(worker: RankWorker, calls: Calls, report: Callable[[RankReport], object]) -> None:
    """Carry out calls until the last one. Raises the error of a step."""
    one = Rank(worker, calls.report, report)
    while not one.is_over:
        one.carry_out(calls.receive())


def set_up(line: Line, log_level: str, name: str) -> threading.Event:
    """Prepare the process of a rank, which ends with its parent or if that requests it. Set the
    returned event when it ends by itself."""
    is_done = threading.Event()

    def leave() -> None:
        if watch.is_requested:
            is_done.wait(END_SECONDS)
        os._exit(0 if watch.is_requested else ORPHANED)

    watch = ParentWatch(line, leave)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the core decides when its ranks end
    set_up_logging(log_level, name)
    return is_done

"""The process of a rank other than 0, which carries out what the core writes to the ring."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from engine.ipc.process import Line, ParentWatch
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
    is_done = threading.Event()

    def leave() -> None:
        if watch.is_requested:
            is_done.wait(END_SECONDS)
        os._exit(0 if watch.is_requested else ORPHANED)

    watch = ParentWatch(line, leave)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the core decides when its ranks end
    set_up_logging(log_level, name)
    ring = RingReader(handle, rank - 1, spin_seconds=spin_seconds)
    report = partial(send_report, line, threading.Lock())
    try:
        one = Rank(make(), ring.report, report)
        while not one.is_over:
            one.carry_out(ring.receive())
    except Stopped:
        pass  # another rank has failed, which the core knows
    except Exception as error:
        report(report_of(error))
        ring.stop()
        raise SystemExit(1) from None
    is_done.set()

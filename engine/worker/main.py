"""The process of a rank: it does what rank 0 does, in the same order.

    ring   calls of the core, from one writer to all ranks but rank 0, which is in the core
    line   what calls return, and the error that ends the rank

Results of steps are not sent: all ranks compute the same tokens. Each shows a checksum of them in
the ring's memory, where the core compares it with that of its own.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import traceback
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from engine.errors import EngineError
from engine.ipc.host_memory import resident_bytes
from engine.ipc.plan_stream import PlanReader
from engine.ipc.plans import decode
from engine.ipc.process import Line, ParentWatch
from engine.ipc.ring import NUM_WORDS, RingReader, Stopped
from engine.ipc.sealed_files import SealedFile
from engine.messages.step import Column, Masks, StepPlan, StepResult
from engine.observe.logs import set_up_logging

# What a message in the ring begins with.
LAUNCH, PREVIEW, SAMPLE, NO_MASKS, COLLECT, CALL = b"L", b"P", b"S", b"N", b"C", b"F"

NUM_DONE = 0  # the word in which a rank counts the messages that it has carried out
RESULTS = 1  # the first of the words with checksums of results, by number of the step
NUM_RESULTS = NUM_WORDS - RESULTS
END_SECONDS = 1.5  # to end by itself, once the core has requested it
ORPHANED = 70  # exit status after the death of the core
UNASKED = -1  # number of a report that answers no call


class RankWorker(Protocol):
    """What a rank calls of its worker; see ``engine.worker.worker.ModelWorker``."""

    def launch(self, plan: StepPlan) -> Any: ...

    def preview(self, ticket: Any) -> Column | None: ...

    def sample(self, ticket: Any, masks: Masks | None) -> None: ...

    def collect(self, ticket: Any) -> StepResult: ...

    def check(self) -> None: ...

    def shutdown(self) -> None: ...


class RankReport(msgspec.Struct, array_like=True, frozen=True):
    """What a rank reports: the encoded value that call ``number`` has returned, or the error that
    it has raised. Number -1: the error that ends the rank."""

    number: int
    value: bytes = b""
    kind: str = ""
    message: str = ""
    traceback: str = ""


def checksum(result: StepResult, number: int) -> int:
    """A word about the result of the step with this number: the low 31 bits of the number, then 32
    bits that follow from the tokens, and from which rows failed."""
    found = zlib.crc32(result.token_ids.tobytes(), zlib.crc32(result.counts.tobytes()))
    if result.errors:
        found = zlib.crc32(bytes(str(sorted(result.errors)), "ascii"), found)
    return (number & 0x7FFFFFFF) << 32 | found


def is_of(word: int, number: int) -> bool:
    """True if a word is the checksum of the result with this number, from 1 on."""
    return word >> 32 == number & 0x7FFFFFFF


class Rank:
    """Carries out the calls of the core with the worker of one rank."""

    def __init__(self, worker: RankWorker, ring: RingReader, line: Line) -> None:
        self._worker = worker
        self._ring = ring
        self._line = line
        self._plans = PlanReader()
        self._launched: deque[Any] = deque()  # tickets that are not collected, the newest last
        self._num_collected = 0
        self._num_calls = 0
        self._is_over = False
        self._by_kind: dict[int, Callable[[bytes], None]] = {
            ord(LAUNCH): self._launch,
            ord(PREVIEW): self._preview,
            ord(SAMPLE): self._sample,
            ord(NO_MASKS): self._sample,
            ord(COLLECT): self._collect,
            ord(CALL): self._call,
        }

    def run(self) -> None:
        """Carry out calls until ``shutdown``. Raises ``Stopped`` if the group has stopped, and the
        error of a step."""
        num_done = 0
        while not self._is_over:
            message = self._ring.receive()
            self._by_kind[message[0]](message)
            self._worker.check()
            num_done += 1
            self._ring.report(NUM_DONE, num_done)

    # -- helpers

    def _launch(self, message: bytes) -> None:
        self._launched.append(self._worker.launch(self._plans.decode(message[1:])))

    def _preview(self, message: bytes) -> None:
        self._worker.preview(self._launched[-1])

    def _sample(self, message: bytes) -> None:
        masks = decode(message[1:], Masks) if message[:1] == SAMPLE else None
        self._worker.sample(self._launched[-1], masks)

    def _collect(self, message: bytes) -> None:
        result = self._worker.collect(self._launched.popleft())
        self._num_collected += 1
        number = self._num_collected
        self._ring.report(RESULTS + number % NUM_RESULTS, checksum(result, number))

    def _call(self, message: bytes) -> None:
        name, args = msgspec.msgpack.decode(message[1:])
        number = self._num_calls
        self._num_calls += 1
        self._is_over = name == "shutdown"
        try:
            value = getattr(self._worker, name)(*args)
            if name == "allocate":
                gc.freeze()  # objects made so far live as long as the process
                value = resident_bytes()
            report = RankReport(number, msgspec.msgpack.encode(value))
        except Exception as error:
            report = report_of(error, number)
        send_report(self._line, report)


def report_of(error: Exception, number: int = UNASKED) -> RankReport:
    """The report of an error that was just raised."""
    name = next(kind.__name__ for kind in type(error).__mro__ if _is_known(kind))
    return RankReport(number, b"", name, str(error), traceback.format_exc())


def _is_known(kind: type) -> bool:
    return kind.__module__ == EngineError.__module__ or not issubclass(kind, EngineError)


def send_report(line: Line, report: RankReport) -> None:
    """Send a report to the core. Does nothing if the core has ended."""
    with suppress(OSError):
        line.send_bytes(msgspec.msgpack.encode(report))


def serve_rank(
    line: Line,
    handle: SealedFile,
    rank: int,
    make: Callable[[], RankWorker],
    log_level: str,
    name: str,
) -> None:
    """The main function of a rank's process: carry out calls until the core ends or requests it.

    handle: of the ring. make: makes the worker. name: of this rank, for log lines."""
    is_done = threading.Event()

    def leave() -> None:
        if watch.is_requested:
            is_done.wait(END_SECONDS)
        os._exit(0 if watch.is_requested else ORPHANED)

    watch = ParentWatch(line, leave)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the core decides when its ranks end
    set_up_logging(log_level, name)
    ring = RingReader(handle, rank - 1)
    try:
        Rank(make(), ring, line).run()
    except Stopped:
        pass  # another rank has failed, which the core knows
    except Exception as error:
        send_report(line, report_of(error))
        ring.stop()
        raise SystemExit(1) from None
    is_done.set()

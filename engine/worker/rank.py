"""A rank other than 0: it does what rank 0 does, in the same order.

    ring   calls of the core, from one writer to all ranks but rank 0, which is in the core
    line   what calls return, at once or, if it is a ``Future``, later; the error that ends the rank

Results of steps are not sent: all ranks compute the same tokens. Each shows a checksum of them in
the ring's memory, where the core compares it with that of its own.
"""

from __future__ import annotations

import gc
import traceback
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import msgspec

from engine.errors import EngineError
from engine.ipc.plan_stream import PlanReader
from engine.ipc.plans import decode
from engine.messages.step import Column, Masks, StepPlan, StepResult
from engine.observe.guard import Failures, ObserverGuard
from engine.worker.rank_times import StepClock, Waited

# What a message in the ring begins with.
LAUNCH, PREVIEW, SAMPLE, NO_MASKS, COLLECT, CALL, NOTIFY = b"L", b"P", b"S", b"N", b"C", b"F", b"M"

NUM_DONE = 0  # the word in which a rank counts the messages that it has carried out
RESULTS = 1  # the first of the words with checksums of results, by number of the step
NUM_RESULTS = 6
TIMES = RESULTS + NUM_RESULTS  # the first of the words of ``StepTimes``
NO_CALL = -1  # number of a report that answers no call


class RankWorker(Protocol):
    """What a rank calls of its worker; see ``engine.worker.worker.ModelWorker``."""

    def launch(self, plan: StepPlan) -> Any: ...

    def preview(self, ticket: Any) -> Column | None: ...

    def sample(self, ticket: Any, masks: Masks | None) -> None: ...

    def collect(self, ticket: Any) -> StepResult: ...

    def call(self, name: str, *args: Any) -> Any: ...

    def check(self) -> None: ...

    def waited(self) -> Waited: ...

    def shutdown(self) -> None: ...


class RankPlace(msgspec.Struct, array_like=True, frozen=True):
    """Where a rank computes. ``device``: such as CPUs 0-3, or the name of a GPU."""

    host: str
    process: int
    device: str
    host_bytes: int  # of the host's memory
    device_bytes: int = 0  # of a GPU's


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

    def __init__(
        self,
        worker: RankWorker,
        show: Callable[[int, int], object],
        report: Callable[[RankReport], object],
    ) -> None:
        """show: makes a word, given by its index, visible to the core; report: sends a report, in
        any thread."""
        self._worker = worker
        self._show = show
        self._report = report
        self._plans = PlanReader()
        self._launched: deque[Any] = deque()  # tickets that are not collected, the newest last
        self._num_collected = 0
        self._num_calls = 0
        self._num_done = 0
        self._times = StepClock(worker.waited)
        effect = "the waits of this rank are no longer reported"
        self._watching = ObserverGuard(Failures(), "rank_times", effect, stops=True)
        self._is_over = False
        self._by_kind: dict[int, Callable[[bytes], None]] = {
            ord(LAUNCH): self._launch,
            ord(PREVIEW): self._preview,
            ord(SAMPLE): self._sample,
            ord(NO_MASKS): self._sample,
            ord(COLLECT): self._collect,
            ord(CALL): self._call,
            ord(NOTIFY): self._notify,
        }

    @property
    def is_over(self) -> bool:
        """True after the last call."""
        return self._is_over

    def carry_out(self, message: bytes) -> None:
        """Carry out a message of the core. Raises the error of a step."""
        self._by_kind[message[0]](message)
        self._worker.check()
        self._num_done += 1
        self._show(NUM_DONE, self._num_done)

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
        self._show(RESULTS + number % NUM_RESULTS, checksum(result, number))
        self._watching.run(self._show_times, result)

    def _show_times(self, result: StepResult) -> None:
        self._times.add(result.seconds)
        for word, value in enumerate(self._times.read(), TIMES):
            self._show(word, value)

    def _call(self, message: bytes) -> None:
        name, args = msgspec.msgpack.decode(message[1:])
        number = self._num_calls
        self._num_calls += 1
        self._is_over = name == "shutdown"
        try:
            value = getattr(self._worker, name)(*args)
            if name == "allocate":
                gc.freeze()  # objects made so far live as long as the process
                self._watching.run(self._times.begin)
            if isinstance(value, Future):
                value.add_done_callback(partial(self._answer, number))
                return
            report = RankReport(number, msgspec.msgpack.encode(value))
        except Exception as error:
            report = report_of(error, number)
        self._report(report)

    def _answer(self, number: int, later: Future[Any]) -> None:
        """Report what a call has returned later, in the thread that has found it."""
        error = later.exception()
        if error is None:
            self._report(RankReport(number, msgspec.msgpack.encode(later.result())))
        else:
            self._report(report_of(error, number))

    def _notify(self, message: bytes) -> None:
        name, args = msgspec.msgpack.decode(message[1:])
        self._worker.call(name, *args)


def report_of(error: BaseException, number: int = NO_CALL) -> RankReport:
    """The report of an error that was raised."""
    name = next(kind.__name__ for kind in type(error).__mro__ if _is_known(kind))
    return RankReport(number, b"", name, str(error), "".join(traceback.format_exception(error)))


def _is_known(kind: type) -> bool:
    return kind.__module__ == EngineError.__module__ or not issubclass(kind, EngineError)

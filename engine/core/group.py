"""``WorkerGroup``: several workers, in processes of their own, that compute each plan together.

    core ── launch, sample, collect ──> WorkerGroup ──> the worker of rank 0, in this process
                                            │
                                            └── ring ──> the workers of ranks 1, 2, ...

Every call is written to the ring, then carried out by rank 0; the others read it and do the same,
with the same result. A thread (``RankWatch``) notices what goes wrong in another rank. The group
has the methods of ``engine.worker.worker.ModelWorker``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol

import msgspec

from engine.config.decide import ModelFacts
from engine.config.gpu_memory import GIB
from engine.core.engine_core import Executor
from engine.errors import RankError
from engine.ipc.plan_stream import PlanWriter
from engine.ipc.plans import encode
from engine.ipc.ring import NAP_SECONDS
from engine.messages.step import Column, Masks, StepPlan, StepResult
from engine.worker.rank import (
    COLLECT,
    LAUNCH,
    NO_MASKS,
    NOTIFY,
    NUM_RESULTS,
    PREVIEW,
    RESULTS,
    SAMPLE,
    TIMES,
    RankPlace,
    RankReport,
    checksum,
    is_of,
)
from engine.worker.rank_times import StepClock, StepTimes, Waited

MOST_LATE = NUM_RESULTS - 2  # steps by which another rank may be late

logger = logging.getLogger("engine.core")


class LocalWorker(Executor[Any], Protocol):
    """The worker of rank 0; see ``engine.worker.worker.ModelWorker``."""

    @property
    def shares_memory(self) -> bool:
        """True if it computes in the host's memory."""
        ...

    def check(self) -> None:
        """Raise ``RankError`` if this rank has noticed that another one has failed."""
        ...

    def waited(self) -> Waited:
        """What this rank has waited for others."""
        ...

    def place(self) -> RankPlace:
        """Where it computes."""
        ...

    def load(self) -> ModelFacts: ...

    def measure(self) -> int: ...

    def allocate(self, num_blocks: int) -> None: ...


class Answers(Protocol):
    """What ranks 1, 2, ... report of a call."""

    @property
    def are_there(self) -> bool:
        """True if ``wait`` would not wait."""
        ...

    def wait(self) -> list[RankReport]:
        """Wait for the reports of all ranks, in their order. To be called once. Raises
        ``RankError`` if a rank fails meanwhile."""
        ...


class OtherRanks(Protocol):
    """Ranks 1, 2, ... of a group."""

    def __len__(self) -> int: ...

    @property
    def is_stopped(self) -> bool:
        """True once the group has stopped, because a rank has failed."""
        ...

    def send(self, *parts: bytes) -> None:
        """Let all of these ranks carry out a message. Raises ``RankError`` if the group has
        stopped."""
        ...

    def call(self, name: str, *args: Any, is_start: bool = False) -> Answers:
        """Let all of these ranks call a method of their workers. is_start: it may take as long as a
        start."""
        ...

    def started(self) -> None:
        """Take note that the start is over: from now on, what ranks do must end in time."""
        ...

    def reported(self, index: int, word: int) -> int:
        """A word that rank ``index`` + 1 shows."""
        ...

    def check(self) -> None:
        """Raise ``RankError`` if the group has stopped. Called while rank 0 waits for others."""
        ...

    def fail(self, error: RankError) -> None:
        """Stop the group because of this error, unless it has stopped already."""
        ...

    def raise_failure(self, error: Exception | None = None) -> NoReturn:
        """Raise the error that has stopped the group. error: what rank 0 has noticed of it."""
        ...

    def start_error_of(self, rank: int, report: RankReport) -> Exception:
        """The error for what a rank has reported of a start."""
        ...

    def on_failure(self, notify: Callable[[RankError], object]) -> None:
        """Call ``notify``, in any thread, if a rank fails; at once if one has."""
        ...

    def close(self) -> None:
        """End them. May be repeated."""
        ...


class ResultCheck:
    """Compares the checksums of ranks' results with those of a rank that computes the same. The
    comparison may be some steps late, so that rank 0 need not wait for others."""

    def __init__(self, ranks: OtherRanks, first: int = 0) -> None:
        """first: the rank whose results are compared with those of the ranks after it."""
        self._ranks = ranks
        self._first = first
        self._own = [0] * NUM_RESULTS  # of the latest results, by number
        self._num_results = 0
        self._num_checked = [0] * (len(ranks) - first)

    def add(self, result: StepResult) -> None:
        """Add the next result of the first rank. Waits for ranks that are many steps late. Raises
        ``RankError`` if a rank had another result in one of the last steps."""
        self._num_results += 1
        own = checksum(result, self._num_results)
        self._own[self._num_results % NUM_RESULTS] = own
        for index, num_checked in enumerate(self._num_checked):
            number = num_checked + 1
            while number <= self._num_results:
                place = number % NUM_RESULTS
                found = self._ranks.reported(self._first + index, RESULTS + place)
                if is_of(found, number):
                    self._compare(self._first + index + 1, found, self._own[place])
                    number += 1
                elif self._num_results - number < MOST_LATE:
                    break
                else:
                    self._ranks.check()
                    time.sleep(NAP_SECONDS)
            self._num_checked[index] = number - 1

    def _compare(self, rank: int, found: int, own: int) -> None:
        if found != own:
            self._ranks.fail(
                RankError(
                    f"rank {rank} computed other tokens than rank {self._first} in one of the last "
                    f"{NUM_RESULTS} steps: the ranks differ, and cannot go on"
                )
            )
            self._ranks.raise_failure()


class WorkerGroup:
    """The worker of rank 0 and those of the other ranks, as one worker."""

    def __init__(
        self, worker: LocalWorker, ranks: OtherRanks, num_sharing: Sequence[int] = ()
    ) -> None:
        """num_sharing: for each rank, how many are on its machine; (): all are on this one."""
        self.at_end: Callable[[], object] = lambda: None
        """Called at the end of the shutdown."""
        self._num_sharing = num_sharing or [1 + len(ranks)] * (1 + len(ranks))
        self._worker = worker
        self._ranks = ranks
        self._plans = PlanWriter()
        self._results = ResultCheck(ranks)
        self._times = StepClock(self._waited)
        self._last_times: list[StepTimes] = []
        self._is_closed = False

    # -- the start

    def load(self) -> ModelFacts:
        """Load the model on all ranks. Raises ``ConfigError``."""
        facts, of_others = self._on_all("load")
        for rank, each in enumerate(of_others, 1):
            if (found := msgspec.msgpack.decode(each, type=ModelFacts)) != facts:
                raise RankError(f"rank {rank} has loaded another model: {found}, rank 0: {facts}")
        return facts  # type: ignore[no-any-return]

    def measure(self) -> int:
        """Bytes that each rank has for its part of the KV pool. Raises ``ConfigError``."""
        own, of_others = self._on_all("measure")
        sizes: list[int] = [own, *map(msgspec.msgpack.decode, of_others)]
        if self._worker.shares_memory:
            sizes = [size // num for size, num in zip(sizes, self._num_sharing, strict=True)]
        return min(sizes)

    def allocate(self, num_blocks: int) -> None:
        """Allocate this many KV blocks on each rank, run steps of all shapes, and record graphs."""
        self._on_all("allocate", num_blocks)
        own, of_others = self._on_all("place")
        self._ranks.started()
        self._times.begin()
        others = [msgspec.msgpack.decode(each, type=RankPlace) for each in of_others]
        logger.info("%d ranks: %s", 1 + len(others), "; ".join(described([own, *others])))

    # -- steps

    @property
    def capabilities(self) -> frozenset[str]:
        return self._worker.capabilities

    def launch(self, plan: StepPlan) -> Any:
        """Start a step on all ranks. Raises ``RankError`` if one of them has failed."""
        self._ranks.send(LAUNCH, self._plans.encode(plan))
        return self._own(self._worker.launch, plan)

    def preview(self, ticket: Any) -> Column | None:
        """Sample a step before its grammar masks are ready; ``None`` if impossible."""
        self._ranks.send(PREVIEW)
        return self._own(self._worker.preview, ticket)  # type: ignore[no-any-return]

    def sample(self, ticket: Any, masks: Masks | None) -> None:
        """Start sampling for a step that waited for its masks."""
        if masks is None:
            self._ranks.send(NO_MASKS)
        else:
            self._ranks.send(SAMPLE, encode(masks))
        self._own(self._worker.sample, ticket, masks)

    def collect(self, ticket: Any) -> StepResult:
        """Block until a launched step is done and return its results, which are those of rank 0.

        Raises ``RankError`` if another rank had other results in one of the last steps."""
        self._ranks.send(COLLECT)
        result: StepResult = self._own(self._worker.collect, ticket)
        self._results.add(result)
        self._times.add(result.seconds)
        return result

    # -- methods

    @property
    def methods(self) -> Any:
        """Names of the methods that ``call`` accepts."""
        return self._worker.methods

    def call(self, name: str, *args: Any) -> Any:
        """Run a method of the workers of all ranks by name, between two steps. Returns the value of
        rank 0. Raises its error; ``RankError`` if not all ranks have one."""
        answers = self._ranks.call("call", name, *args)
        value, failed = None, None
        try:
            value = self._own(self._worker.call, name, *args)
        except RankError:
            raise
        except Exception as error:
            failed = error
        for rank, report in enumerate(answers.wait(), 1):
            if bool(report.kind) == (failed is None):
                self._ranks.fail(differing(name, rank, report, failed))
                self._ranks.raise_failure()
        if failed is not None:
            raise failed
        return value

    def notify_others(self, name: str, *args: Any) -> None:
        """Let the workers of all ranks but rank 0 run a method, between the plans before and those
        after. An error in it ends the rank. Raises ``RankError`` if the group has stopped."""
        self._ranks.send(NOTIFY, msgspec.msgpack.encode([name, args]))

    def call_others(self, name: str, *args: Any) -> list[Any]:
        """Run a method of the workers of all ranks but rank 0. Returns their values. Raises
        ``RankError`` if one of them raises."""
        reports = self._ranks.call("call", name, *args).wait()
        for rank, report in enumerate(reports, 1):
            if report.kind:
                self._ranks.fail(differing(name, rank, report, None))
                self._ranks.raise_failure()
        return [msgspec.msgpack.decode(report.value) for report in reports]

    def begin_others(self, name: str, *args: Any) -> Callable[[], None]:
        """Let the workers of all ranks but rank 0 run a method during the start. Returns a function
        that waits for the end, and raises the error of the lowest rank that has one."""
        answers = self.start_call_on_others(name, *args)

        def end() -> None:
            for rank, report in enumerate(answers.wait(), 1):
                if report.kind:
                    raise self._ranks.start_error_of(rank, report)

        return end

    def start_call_on_others(self, name: str, *args: Any) -> Answers:
        """Let the workers of all ranks but rank 0 run a method, without waiting. If it returns a
        ``Future``, they compute plans meanwhile. Returns their reports, which may be errors."""
        return self._ranks.call("call", name, *args, is_start=True)

    def rank_times(self) -> list[StepTimes]:
        """What each rank has spent the time of its steps with, in order of ranks."""
        if self._is_closed:
            return self._last_times
        words = range(TIMES, TIMES + len(StepTimes._fields))
        return [
            self._times.read(),
            *(
                StepTimes(*(self._ranks.reported(index, word) for word in words))
                for index in range(len(self._ranks))
            ),
        ]

    def on_failure(self, notify: Callable[[RankError], object]) -> None:
        """Call ``notify``, in any thread, if a rank fails; at once if one has."""
        self._ranks.on_failure(notify)

    def shutdown(self) -> None:
        """Free the models and end the processes. A second call does nothing."""
        if self._is_closed:
            return
        with suppress(Exception):  # who watches may not hinder the end
            self._last_times = self.rank_times()
        self._is_closed = True
        with suppress(RankError):
            self._ranks.call("shutdown")  # the end of the processes is awaited below
        try:
            self._worker.shutdown()
        finally:
            self._ranks.close()
            self.at_end()

    # -- helpers

    def _own(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of rank 0's worker. If it fails because another rank has failed, the error
        is that one's."""
        try:
            found = method(*args)
            self._worker.check()
        except Exception as error:
            if isinstance(error, RankError) or self._ranks.is_stopped:
                self._ranks.raise_failure(error)
            raise
        self._ranks.check()
        return found

    def _waited(self) -> Waited:
        """What rank 0 has waited for others."""
        return self._worker.waited()

    def _on_all(self, name: str, *args: Any) -> tuple[Any, list[bytes]]:
        """Call a method on all ranks, during the start. Returns the value of rank 0 and those of
        the others. Raises the error of the lowest rank that has one."""
        answers = self._ranks.call(name, *args, is_start=True)
        own = self._own(getattr(self._worker, name), *args)
        reports = answers.wait()
        for rank, report in enumerate(reports, 1):
            if report.kind:
                raise self._ranks.start_error_of(rank, report)
        return own, [report.value for report in reports]


def described(places: Sequence[RankPlace]) -> list[str]:
    """A text about each rank, for the log; hosts are named if there are several."""
    several = len({place.host for place in places}) > 1
    return [
        f"rank {rank} (process {place.process}{f' on {place.host}' if several else ''}, "
        f"{place.device}) {place.host_bytes / GIB:.2f} GiB of the host's memory"
        + (f", {place.device_bytes / GIB:.2f} GiB of the GPU's" if place.device_bytes else "")
        for rank, place in enumerate(places)
    ]


def differing(name: str, rank: int, report: RankReport, failed: Exception | None) -> RankError:
    """The error for a call that has failed on some ranks only, which then differ."""
    if failed is None:
        return RankError(f"{name} has failed on rank {rank}: {report.kind}: {report.message}")
    return RankError(f"{name} has failed on rank 0 and not on rank {rank}: {failed}")

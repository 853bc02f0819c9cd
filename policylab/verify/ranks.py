"""Further ranks of a simulated engine, in this process: they carry out what real ones would, from
the same bytes, as late as ranks may, and one of them may fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple, NoReturn

import msgspec

from engine.errors import RankError
from engine.ipc.ring import NUM_WORDS
from engine.messages.step import StepPlan, StepResult
from engine.worker.rank import CALL, Rank, RankReport
from policylab.verify.case import RankFault
from policylab.verify.fake import DigestWorker

FAULTS = ("raises", "hangs", "skips a plan", "repeats a plan", "draws others")
LATE = 0.3  # share of messages and looks at which a rank carries out nothing
DUE = 8  # plans after a fault, by which it must be found
PATIENCE = 40  # looks at a rank that does nothing, before it counts as hanging


class FaultyWorker:
    """The worker of a further rank, which raises or draws other tokens if the fault says so."""

    def __init__(self, worker: DigestWorker, fault: RankFault | None) -> None:
        self._worker = worker
        self._fault = fault
        self._num_plans = 0
        self.num_lies = 0
        self.preview = worker.preview
        self.sample = worker.sample
        self.waited = worker.waited

    def launch(self, plan: StepPlan) -> StepResult:
        self._num_plans += 1
        if self._is_due("raises"):
            raise ArithmeticError("a wire has come loose")
        return self._worker.launch(plan)

    def collect(self, ticket: StepResult) -> StepResult:
        result = self._worker.collect(ticket)
        if self._is_due("draws others") and result.token_ids.size:
            result.token_ids = result.token_ids + 1
            self.num_lies += 1
        return result

    def call(self, name: str, *args: Any) -> Any:
        return self._worker.call(name, *args)

    def check(self) -> None:
        """Nothing to notice."""

    def shutdown(self) -> None:
        """Nothing to release."""

    def _is_due(self, kind: str) -> bool:
        fault = self._fault
        return fault is not None and fault.kind == kind and self._num_plans >= fault.plan


class LocalAnswers(NamedTuple):
    """What the ranks have reported of their last call."""

    reports: Sequence[Sequence[RankReport]]  # of each rank
    are_there: bool = True

    def wait(self) -> list[RankReport]:
        return [each[-1] for each in self.reports]


class LocalRanks:
    """``OtherRanks`` of this process: one for each of ``workers``."""

    def __init__(
        self, workers: Sequence[DigestWorker], rng: Random, fault: RankFault | None
    ) -> None:
        self._rng = rng
        self._fault = fault
        self._error: RankError | None = None
        self._words = [[0] * NUM_WORDS for _ in workers]
        self._queues: list[deque[bytes]] = [deque() for _ in workers]
        self._reports: list[list[RankReport]] = [[] for _ in workers]
        self._num_looks = [0] * len(workers)  # in a row, at which a rank has done nothing
        self._num_plans = 0
        self._num_calls = 0
        self._workers = [
            FaultyWorker(worker, fault if fault is not None and fault.rank == rank else None)
            for rank, worker in enumerate(workers, 1)
        ]
        self._ranks = [
            Rank(worker, words.__setitem__, reports.append)
            for worker, words, reports in zip(
                self._workers, self._words, self._reports, strict=True
            )
        ]

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def is_stopped(self) -> bool:
        return self._error is not None

    def send(self, *parts: bytes) -> None:
        if self._error is not None:
            raise self._error
        message = b"".join(parts)
        is_plan = message[:1] == b"L"
        self._num_plans += is_plan
        for rank, queue in enumerate(self._queues, 1):
            queue += [message] * self._num_copies(rank, is_plan)
            if self._rng.random() >= LATE:
                self._carry_out(rank)

    def call(self, name: str, *args: Any, is_start: bool = False) -> LocalAnswers:
        self.send(CALL, msgspec.msgpack.encode([name, args]))
        self._num_calls += 1
        while min(map(len, self._reports)) < self._num_calls:
            self.check()
        return LocalAnswers(self._reports)

    def reported(self, index: int, word: int) -> int:
        return self._words[index][word]

    def started(self) -> None:
        """Nothing has a limit of time."""

    def check(self) -> None:
        for rank, queue in enumerate(self._queues, 1):
            before = len(queue)
            if self._rng.random() >= LATE:
                self._carry_out(rank)
            is_stuck = queue and len(queue) == before
            self._num_looks[rank - 1] = self._num_looks[rank - 1] + 1 if is_stuck else 0
            if self._num_looks[rank - 1] > PATIENCE:
                self.fail(RankError(f"rank {rank} has not answered"))
        if self._error is not None:
            raise self._error

    def fail(self, error: RankError) -> None:
        self._error = self._error or error

    def raise_failure(self, error: Exception | None = None) -> NoReturn:
        raise self._error or error or RankError("the group has stopped")

    def start_error_of(self, rank: int, report: RankReport) -> Exception:
        return RankError(f"rank {rank} raised {report.kind}: {report.message}")

    def on_failure(self, notify: Callable[[RankError], object]) -> None:
        """Nobody is notified: the next message raises the error."""

    def close(self) -> None:
        """Nothing to end."""

    @property
    def must_be_found(self) -> bool:
        """True if the fault has happened so long ago that the group must have stopped."""
        fault = self._fault
        if fault is None:
            return False
        if fault.kind == "draws others":
            return self._workers[fault.rank - 1].num_lies > DUE
        return self._num_plans > fault.plan + DUE

    # -- helpers

    def _num_copies(self, rank: int, is_plan: bool) -> int:
        """How often a rank gets this message."""
        fault = self._fault
        if not is_plan or fault is None or (fault.rank, fault.plan) != (rank, self._num_plans):
            return 1
        return {"skips a plan": 0, "repeats a plan": 2}.get(fault.kind, 1)

    def _carry_out(self, rank: int) -> None:
        fault, queue = self._fault, self._queues[rank - 1]
        hangs = fault is not None and (fault.kind, fault.rank) == ("hangs", rank)
        while queue and not (hangs and self._num_plans >= fault.plan):  # type: ignore[union-attr]
            try:
                self._ranks[rank - 1].carry_out(queue.popleft())
            except Exception as error:
                self.fail(RankError(f"rank {rank} raised {type(error).__name__}: {error}"))
                return

"""A group of workers without a model, in processes of their own, one of which may fail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.config.decide import ModelFacts
from engine.config.engine import EngineConfig
from engine.config.parallel import MOST_RANKS
from engine.core.group import WorkerGroup
from engine.core.inproc_client import InprocClient
from engine.core.rank_processes import GroupOptions, start_ranks
from engine.errors import ConfigError, RankError
from engine.messages.step import StepPlan, StepResult
from engine.worker.rank import RankPlace
from engine.worker.rank_times import Waited
from policylab.verify.fake import DigestWorker, LateWorker
from support.live_core import SizedBuild

VOCAB_SIZE = 1000
MEMORY = 1 << 20  # bytes that rank 0 has for KV blocks; each further rank has one less
WAITS_EACH = 1000  # nanoseconds that are added at each look


@dataclass(frozen=True)
class Fault:
    """What happens to a rank, and when: in a method of its worker, the ``after``-th time."""

    kind: str = "none"
    rank: int = 1
    method: str = "launch"
    after: int = 1
    seconds: float = 0.01

    def strike(self) -> None:
        """Do to this process what is due."""
        if self.kind == "raise":
            raise ArithmeticError("a wire has come loose")
        if self.kind == "lost another":
            raise RankError("another rank has not answered")
        if self.kind == "refuse":
            raise ConfigError("there is no room for 7 heads")
        if self.kind in ("late", "hang"):
            time.sleep(self.seconds if self.kind == "late" else 3600)
        if self.kind in ("SIGKILL", "SIGSTOP"):
            os.kill(os.getpid(), getattr(signal, self.kind))


class FaultyMethods:
    """The methods of a rank's worker, each of which counts its calls."""

    shares_memory = True
    methods = ("noted",)

    def __init__(self, worker: DigestWorker, rank: int, fault: Fault) -> None:
        self._worker, self._rank = worker, rank
        self._fault = fault if fault.rank == rank else Fault()
        self._counts: dict[str, int] = {}
        self.num_begun = MOST_RANKS - rank  # a higher rank is later than a lower one
        self._waited = 0
        self.capabilities = worker.capabilities

    def load(self) -> ModelFacts:
        self._count("load")
        return ModelFacts(vocab_size=VOCAB_SIZE, block_bytes=64)

    def measure(self) -> int:
        self._count("measure")
        return MEMORY - self._rank

    def allocate(self, num_blocks: int) -> None:
        self._count("allocate")

    def launch(self, plan: StepPlan) -> Any:
        self._count("launch")
        if plan.freed_slots:
            self._count("abort")
        return self._worker.launch(plan)

    def preview(self, ticket: Any) -> Any:
        return self._worker.preview(ticket)

    def sample(self, ticket: Any, masks: Any) -> None:
        self._count("sample")
        self._worker.sample(ticket, masks)

    def collect(self, ticket: Any) -> StepResult:
        is_due = self._count("collect")
        result = self._worker.collect(ticket)
        if is_due and self._fault.kind == "other token" and result.token_ids.size:
            result.token_ids = result.token_ids + 1
        return result

    def call(self, name: str, *args: Any) -> Any:
        self._count("call")
        return [name, *args]

    def check(self) -> None:
        pass

    def waited(self) -> Waited:
        self._waited += WAITS_EACH
        return Waited(operations=self._waited)

    def place(self) -> RankPlace:
        return RankPlace("here", os.getpid(), "CPUs 0-1", 1 << 20)

    def shutdown(self) -> None:
        self._count("shutdown")

    def _count(self, name: str) -> bool:
        """True if the fault is due. One that is "late" is so from then on."""
        self._counts[name] = self._counts.get(name, 0) + 1
        is_due = self._fault.method == name and self._counts[name] >= self._fault.after
        if is_due:
            self._fault.strike()
        return is_due


def make_digests(
    num_blocks: int, block_size: int, rank: int, fault: Fault, *, is_late: bool = False
) -> FaultyMethods:
    """The worker of a rank, in its process."""
    kind = LateWorker if is_late else DigestWorker
    return FaultyMethods(kind(num_blocks, block_size, vocab_size=VOCAB_SIZE), rank, fault)


@dataclass(frozen=True)
class DigestGroup:
    """Makes a group of ``size`` ranks."""

    size: int = 2
    num_blocks: int = 400
    block_size: int = 16
    fault: Fault = field(default_factory=Fault)
    is_late: bool = False
    hang_timeout: float = 300.0
    ready_timeout: float = 600.0
    is_loaded: bool = True

    def __call__(self) -> WorkerGroup:
        def make(rank: int) -> Callable[[], FaultyMethods]:
            sizes = (self.num_blocks, self.block_size, rank, self.fault)
            return partial(make_digests, *sizes, is_late=self.is_late)

        limits = {"hang_timeout": self.hang_timeout, "ready_timeout": self.ready_timeout}
        options = GroupOptions(log_level="error", **limits)
        own = make(0)()
        group = WorkerGroup(own, start_ranks([make(rank) for rank in range(1, self.size)], options))
        if self.is_loaded:
            try:
                group.load()
                group.measure()
                group.allocate(self.num_blocks)
            except BaseException:
                group.shutdown()
                raise
        return group


@dataclass(frozen=True)
class GroupBuild(SizedBuild):
    """Builds a core around a group, whose failures it notices when it is idle, too."""

    def __call__(
        self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> InprocClient:
        client = super().__call__(config, clock=clock)
        group = client.core.executor
        assert isinstance(group, WorkerGroup)
        group.on_failure(client.fail)
        return client

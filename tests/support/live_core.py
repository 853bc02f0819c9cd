"""A core in a process of its own, sized at will and looked at from outside."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.config.decide import Decided
from engine.config.engine import EngineConfig
from engine.config.sched import SchedulerConfig
from engine.core.engine_core import EngineCore, Executor
from engine.core.inproc_client import InprocClient
from engine.kv.manager import KVManager
from engine.messages.step import StepResult
from engine.rpc.launch import start_core
from engine.rpc.zmq_client import EngineCoreClient
from engine.sched.plugins.find import make_scheduler
from engine.sched.policy import Policy, SchedView
from engine.sched.request import Request
from policylab.verify.fake import DigestWorker
from support.patience import WAIT_SECONDS
from support.spawned import fake_config

VOCAB_SIZE = 1000
BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
WARM_UP_SHARE = 0.3  # of a run, before its memory counts: pools and caches fill


@dataclass(frozen=True)
class SizedBuild:
    """Builds a core around a worker that computes digests, or around the one that it is given."""

    num_blocks: int = 400
    num_seats: int = 64
    options: dict[str, Any] = field(default_factory=dict)
    """More of the scheduler's."""
    worker: Callable[[], Executor] | None = None
    start_seconds: float = 0.0
    """How long building it takes."""

    def __call__(
        self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> InprocClient:
        time.sleep(self.start_seconds)
        options = {
            "max_num_batched_tokens": max(256, 2 * self.num_seats),
            "max_num_seqs": self.num_seats,
            "max_model_len": MAX_MODEL_LEN,
            **self.options,
        }
        sched = SchedulerConfig(**options)
        decided = Decided(
            max_model_len=MAX_MODEL_LEN,
            num_kv_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(),
            device="cpu",
            scheduler=sched,
        )
        kv = KVManager(self.num_blocks, BLOCK_SIZE)
        scheduler = make_scheduler(sched, kv, clock=clock)
        return InprocClient(EngineCore(scheduler, self._worker()), decided, clock=clock)

    def _worker(self) -> Executor:
        if self.worker is not None:
            return self.worker()
        return DigestWorker(self.num_blocks, BLOCK_SIZE, vocab_size=VOCAB_SIZE)


@dataclass(frozen=True)
class Triggered:
    """A worker that does to itself what a file says, once there is one: "raise" or "hang"."""

    trigger: str
    step_seconds: float
    num_blocks: int = 400

    def __call__(self) -> Executor:
        return TriggeredWorker(self)


class TriggeredWorker(DigestWorker):
    def __init__(self, made_by: Triggered) -> None:
        super().__init__(made_by.num_blocks, BLOCK_SIZE, vocab_size=VOCAB_SIZE)
        self._trigger = Path(made_by.trigger)
        self._step_seconds = made_by.step_seconds

    def collect(self, result: StepResult) -> StepResult:
        time.sleep(self._step_seconds)
        if self._trigger.exists():
            told = self._trigger.read_text()
            if told == "raise":
                raise ArithmeticError("the worker fell over")
            if told == "hang":
                time.sleep(3600)
        return super().collect(result)


class TriggeredPolicy(Policy):
    """First come, first served; an arrival hangs once a file says "hang in add"."""

    def __init__(self, trigger: str) -> None:
        self._trigger = Path(trigger)

    def rank(self, req: Request, view: SchedView) -> tuple[int, ...]:
        return (req.arrival,)

    def on_add(self, req: Request, view: SchedView) -> None:
        if self._trigger.exists() and self._trigger.read_text() == "hang in add":
            time.sleep(3600)


def start(build: SizedBuild | None = None, **core: Any) -> EngineCoreClient:
    """A client whose core was just spawned; ``core`` are fields of ``CoreConfig``.

    Its log has errors only: a line for each hostile message would fill a disk.
    """
    config = replace(fake_config(**core), log_level="error")
    return start_core(config, build or SizedBuild())


def pid_of(client: EngineCoreClient) -> int:
    """The process of a client's own core."""
    (pid,) = client.pids
    return pid


def num_held(client: EngineCoreClient) -> int:
    """Requests that a core has: running, waiting and parked ones."""
    stats = client.stats()
    assert stats is not None
    return stats.num_running + stats.num_waiting + stats.num_parked


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_seconds(pid: int) -> float:
    """Processor time that all threads of a process have had, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def is_running(pid: int) -> bool:
    """Does this process exist, other than as a dead one that nobody asked for?"""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(is_so: Callable[[], object], seconds: float = WAIT_SECONDS) -> float | None:
    """Seconds until it was so; ``None`` if it never was."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < seconds:
        if is_so():
            return waited
        time.sleep(0.005)
    return None


@contextmanager
def own_directory() -> Iterator[Path]:
    """Cores that are started meanwhile have their directories in this one; it goes at the end."""
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="cores-") as path:
        tempfile.tempdir = os.environ["TMPDIR"] = path
        try:
            yield Path(path)
        finally:
            tempfile.tempdir = before[0]
            del os.environ["TMPDIR"]
            if before[1] is not None:
                os.environ["TMPDIR"] = before[1]


def shared_names() -> set[Path]:
    """What has a name in shared memory."""
    return set(Path("/dev/shm").iterdir())


def growth(memory: Iterable[tuple[float, float]]) -> float:
    """MiB in ten minutes of (seconds, MiB): the straight line that fits best.

    The first three tenths do not count, in which pools and caches fill. 0.0 for fewer than two.
    """
    points = list(memory)
    known = [(x, y) for x, y in points if x >= WARM_UP_SHARE * points[-1][0]]
    if len(known) < 2:
        return 0.0
    x_mean = sum(x for x, _ in known) / len(known)
    y_mean = sum(y for _, y in known) / len(known)
    spread = sum((x - x_mean) ** 2 for x, _ in known)
    along = sum((x - x_mean) * (y - y_mean) for x, y in known)
    return round(600.0 * along / spread, 3) if spread else 0.0

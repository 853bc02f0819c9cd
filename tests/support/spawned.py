"""Cores without a model that a spawned process can build: everything here is importable there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config.core import CoreConfig
from engine.config.decide import Decided
from engine.config.engine import EngineConfig
from engine.config.env import VISIBLE_GPUS
from engine.config.model import ModelConfig
from engine.config.sched import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.inproc_client import InprocClient
from engine.core.watching import CoreWatch
from engine.kv.manager import KVManager
from engine.kv_transfer.host import open_core_store
from engine.kv_transfer.stores import StoreIdentity
from engine.lora.loading import Order
from engine.messages.step import StepResult
from engine.sched.plugins.find import make_scheduler
from engine.sched.policies.fcfs import FCFS
from engine.sched.scheduler import Scheduler
from policylab.verify.fake import DigestWorker
from support.adapters import Copy, FakeReader, FakeReading, digest_of, slots_of
from support.data_plane import FeatureWorker
from support.kv_rows import key_of, rows_of

NUM_BLOCKS = 400
BLOCK_SIZE = 16
VOCAB_SIZE = 1000


@dataclass(frozen=True)
class FakeBuild:
    """Builds a core around the digest worker; ``step_seconds`` is how long each step sleeps."""

    step_seconds: float = 0.0
    raise_at: int | None = None
    """Step that raises."""
    hang_at: int | None = None
    """Step that never ends."""
    start_seconds: float = 0.0
    """How long building it takes."""
    fail_start: str = ""
    """What building it raises."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the scheduler."""

    def __call__(
        self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> InprocClient:
        time.sleep(self.start_seconds)
        if self.fail_start:
            raise ValueError(self.fail_start)
        options = {
            "max_num_batched_tokens": 256,
            "max_num_seqs": 64,
            "max_model_len": 512,
            **self.options,
        }
        sched = SchedulerConfig(**options)
        decided = Decided(
            max_model_len=sched.max_model_len,
            num_kv_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(),
            device="cpu",
            scheduler=sched,
        )
        scheduler = make_scheduler(sched, KVManager(NUM_BLOCKS, BLOCK_SIZE), clock=clock)
        core = EngineCore(scheduler, self.make_worker())
        methods = CoreWatch(core, clock).methods
        return InprocClient(core, decided, clock=clock, methods=methods)

    def make_worker(self) -> ScriptedWorker:
        return ScriptedWorker(self)


@dataclass(frozen=True)
class TellingGpus(FakeBuild):
    """Writes which GPUs it sees, and its share of each, to a file named by its process."""

    folder: str = ""

    def __call__(
        self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> InprocClient:
        told = f"{os.environ.get(VISIBLE_GPUS, 'any')} {config.gpu.gpu_memory_utilization}"
        (Path(self.folder) / str(os.getpid())).write_text(told)
        return super().__call__(config, clock=clock)


@dataclass(frozen=True)
class BlocksOfCores(FakeBuild):
    """Writes to a file named by its process which of two blocks of KV it has, and then writes the
    one with its number, in the memory that the cores share."""

    folder: str = ""

    def __call__(
        self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> InprocClient:
        store = open_core_store(config, StoreIdentity("model", 100))
        found = store.contains([key_of(0), key_of(1)])
        (Path(self.folder) / str(os.getpid())).write_text(f"{found[0]} {found[1]}")
        store.write([key_of(config.core_index)], rows_of([config.core_index], 100))
        return super().__call__(config, clock=clock)


@dataclass(frozen=True)
class FailsWhileMarked(FakeBuild):
    """Cannot be built while a file exists."""

    mark: str = ""

    def __call__(
        self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> InprocClient:
        if Path(self.mark).exists():
            raise ValueError("the weights are gone")
        return super().__call__(config, clock=clock)


@dataclass(frozen=True)
class NotesLog(FakeBuild):
    """Writes its process into the step log, in place of steps."""

    def __call__(
        self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> InprocClient:
        assert config.step_log is not None
        Path(config.step_log).write_text(str(os.getpid()))
        return super().__call__(config, clock=clock)


@dataclass(frozen=True)
class FirstFails(FakeBuild):
    """The first of the cores that share a file cannot be built; the others are not built."""

    mark: str = ""

    def __call__(
        self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> InprocClient:
        try:
            Path(self.mark).touch(exist_ok=False)
        except FileExistsError:
            threading.Event().wait()
        raise ValueError("the weights are gone")


class ScriptedWorker(DigestWorker):
    """The digest worker, with what ``FakeBuild`` says happening in its steps."""

    def __init__(self, script: FakeBuild) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE, vocab_size=VOCAB_SIZE)
        self._script = script
        self._num_steps = 0

    def collect(self, result: StepResult) -> StepResult:
        self._num_steps += 1
        if self._script.step_seconds:
            time.sleep(self._script.step_seconds)
        if self._num_steps == self._script.raise_at:
            raise ArithmeticError("the worker fell over")
        if self._num_steps == self._script.hang_at:
            time.sleep(3600)
        return super().collect(result)


def fake_config(**core: Any) -> EngineConfig:
    """A configuration for a core without a model; ``core`` are fields of ``CoreConfig``."""
    return EngineConfig(
        model=ModelConfig(model="fake"),
        core=CoreConfig(**core),
        log_level="warning",
        disable_log_stats=True,
    )


@dataclass(frozen=True)
class AdapterBuild(FakeBuild):
    """A core with adapters, whose contents are those of files in ``folder``. While its file "hold"
    exists, nothing is read to the end."""

    folder: str = ""

    def __call__(
        self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> InprocClient:
        slots = slots_of(FolderReader(Path(self.folder)), 2)
        sched = SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=8, max_model_len=512)
        scheduler = Scheduler(
            sched, KVManager(NUM_BLOCKS, BLOCK_SIZE), FCFS(), clock=clock, resources=[slots]
        )
        decided = Decided(
            max_model_len=sched.max_model_len,
            num_kv_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(),
            device="cpu",
            scheduler=sched,
            capabilities=("adapters",),
        )
        core = EngineCore(scheduler, FeatureWorker(NUM_BLOCKS, BLOCK_SIZE, vocab_size=VOCAB_SIZE))
        return InprocClient(core, decided, clock=clock, adapters=slots)


class FolderReader(FakeReader):
    """Reads the files of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(is_slow=True)
        self._folder = folder

    def submit(self, order: Order) -> FolderReading:
        (self._folder / f"read by {os.getpid()}").touch()
        return FolderReading(self, self._folder, order)


class FolderReading(FakeReading):
    def __init__(self, reader: FakeReader, folder: Path, order: Order) -> None:
        super().__init__(reader, order)
        self._folder = folder

    def wait(self) -> Copy:
        return Copy(digest_of((self._folder / self.order.path).read_text()))

    def poll(self) -> Copy | None:
        return None if (self._folder / "hold").exists() else self.wait()

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
from engine.kv.manager import KVManager
from engine.messages.step import StepResult
from engine.sched.plugins.find import make_scheduler
from policylab.verify.fake import DigestWorker

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
    """Of the scheduler."""

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
        return InprocClient(EngineCore(scheduler, self.make_worker()), decided, clock=clock)

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
    """Of those that share a file the first cannot be built, and the others never are."""

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

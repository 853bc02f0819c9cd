"""The measurements of ``metronome bench``. Warm-up runs and profiled runs are not counted."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, fields, replace

from engine.cli.profiling import profiled
from engine.cli.streaming import times_of
from engine.config.args import EngineArgs
from engine.errors import ConfigError
from engine.frontend.encoding import Prompt
from engine.hub.fetch import fetched
from engine.llm_engine import LLMEngine
from engine.messages.params import SamplingParams
from engine.messages.requests import RequestOutput

PROMPT_SEED = 0  # every run of a benchmark gets the same random prompts
PROBE_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class BenchWorkload:
    """The prompts of a benchmark: random token ids, or texts if given."""

    num_prompts: int
    input_len: int
    output_len: int
    num_iters: int
    texts: tuple[str, ...] = ()

    def prompts(self, vocab_size: int) -> list[Prompt]:
        """Return the given texts, or else ``num_prompts`` random prompts of equal length."""
        if self.texts:
            return list(self.texts)
        dice = random.Random(PROMPT_SEED)
        return [
            [dice.randrange(vocab_size) for _ in range(self.input_len)]
            for _ in range(self.num_prompts)
        ]


def measure_throughput(args: EngineArgs, workload: BenchWorkload) -> dict[str, float | int]:
    """Run all prompts at once, ``num_iters`` times. Returns counts and rates of the fastest run."""
    with LLMEngine.from_engine_args(args) as engine:
        prompts = workload.prompts(engine.session.client.decided.vocab_size)
        _run(engine, prompts, workload.output_len)
        runs = [_timed(engine, prompts, workload.output_len) for _ in range(workload.num_iters)]
        _record(engine, args, prompts, workload.output_len)
    seconds, outputs = min(runs, key=lambda run: run[0])
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "requests": len(outputs),
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "seconds": seconds,
        "requests_per_second": len(outputs) / seconds,
        "output_tokens_per_second": num_output / seconds,
        "total_tokens_per_second": (num_prompt + num_output) / seconds,
    }


def measure_latency(args: EngineArgs, workload: BenchWorkload) -> dict[str, float | int]:
    """Run ``num_iters`` batches. Returns mean, median and 99th percentile of each latency in ms."""
    with LLMEngine.from_engine_args(args) as engine:
        prompts = workload.prompts(engine.session.client.decided.vocab_size)
        _run(engine, prompts, workload.output_len)
        outputs: list[RequestOutput] = []
        for _ in range(workload.num_iters):
            engine.reset_prefix_cache()  # otherwise later batches find their prompts cached
            outputs += _run(engine, prompts, workload.output_len)
        _record(engine, args, prompts, workload.output_len)
    result: dict[str, float | int] = {"batches": workload.num_iters, "batch_size": len(prompts)}
    for name, values in _milliseconds(outputs).items():
        values.sort()
        result[f"{name}_ms_mean"] = statistics.fmean(values)
        result[f"{name}_ms_p50"] = statistics.median(values)
        result[f"{name}_ms_p99"] = values[min(len(values) - 1, int(0.99 * len(values)))]
    return result


def _milliseconds(outputs: list[RequestOutput]) -> dict[str, list[float]]:
    """Return each request's milliseconds to the first token, between two tokens, and in total."""
    times: dict[str, list[float]] = {"first_token": [], "next_token": [], "whole_request": []}
    for output in outputs:
        figures = times_of(output)
        assert figures.first_token_seconds is not None
        num_next = len(output.outputs[0].token_ids) - 1
        between = (figures.seconds - figures.first_token_seconds) / max(1, num_next)
        times["first_token"].append(1e3 * figures.first_token_seconds)
        times["next_token"].append(1e3 * between)
        times["whole_request"].append(1e3 * figures.seconds)
    return times


def measure_startup(args: EngineArgs, workload: BenchWorkload) -> dict[str, float | int]:
    """Measure how many seconds fresh processes take to import, to load the model and to generate
    the first token. Returns the medians."""
    encoded = json.dumps(_given(_fetched(args)))
    _probe(encoded, workload)
    runs = [_probe(encoded, workload) for _ in range(workload.num_iters)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _probe(encoded: str, workload: BenchWorkload) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "policylab.bench.startup_probe",
        encoded,
        str(workload.input_len),
    ]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise ConfigError(f"the engine did not start: {done.stderr.strip().splitlines()[-1]}")
    phases: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**phases, "process_seconds": seconds}


def _fetched(args: EngineArgs) -> EngineArgs:
    """Return the arguments with a local model directory, after a download if needed. Child
    processes then need neither a download nor an access token."""
    is_here, has_text = args.core_address is None, not args.skip_tokenizer_init
    there = fetched(args.create_config().model, for_core=is_here, for_text=has_text)
    return replace(
        args,
        model=there.model,
        tokenizer=there.tokenizer,
        revision=None,
        tokenizer_revision=None,
        hf_token=None,
    )


def _given(args: EngineArgs) -> dict[str, object]:
    defaults = EngineArgs()
    values = {field.name: getattr(args, field.name) for field in fields(args)}
    return {name: value for name, value in values.items() if value != getattr(defaults, name)}


def _timed(
    engine: LLMEngine, prompts: list[Prompt], output_len: int
) -> tuple[float, list[RequestOutput]]:
    engine.reset_prefix_cache()  # otherwise later runs find their prompts cached
    start = time.perf_counter()
    outputs = _run(engine, prompts, output_len)
    return time.perf_counter() - start, outputs


def _record(engine: LLMEngine, args: EngineArgs, prompts: list[Prompt], output_len: int) -> None:
    """Profile an additional run of the prompts, which is not measured, if a trace directory is
    set."""
    if args.torch_profiler_dir is not None:
        engine.reset_prefix_cache()
        with profiled(engine, args):
            _run(engine, prompts, output_len)


def _run(engine: LLMEngine, prompts: list[Prompt], output_len: int) -> list[RequestOutput]:
    params = SamplingParams(
        temperature=0.0, max_tokens=output_len, ignore_eos=True, output_kind="final"
    )
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs

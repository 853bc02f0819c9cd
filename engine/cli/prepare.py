"""Compile the kernels that a model needs ahead of time, for example in a container image.

Starts the model once, with the same options as for serving, and computes a few tokens.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from engine.cli.options import add_engine_options, engine_args, take_model
from engine.errors import ConfigError
from engine.llm_engine import LLMEngine
from engine.messages.params import SamplingParams
from engine.messages.pooling import PoolingParams

NUM_TOKENS = 4
LENGTHS = (40, 3)  # tokens of the prompts; together, steps then have chunks and single tokens
SAMPLING = (
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
    SamplingParams(
        max_tokens=NUM_TOKENS, temperature=1.0, top_p=0.9, top_k=5, seed=1, ignore_eos=True
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    add_engine_options(parser)


def run(parsed: argparse.Namespace) -> int:
    take_model(parsed)
    started = time.time()
    with LLMEngine.from_engine_args(engine_args(parsed)) as engine:
        pools = "only_pooling" in engine.session.client.decided.capabilities
        for params in (PoolingParams(),) if pools else SAMPLING:
            _compute(engine, params)
        from engine.worker.warmup import wait_for_kernels

        wait_for_kernels()
    from kernels.cpu.disk_cache import CURRENT
    from kernels.cpu.isa import KERNEL_CACHE, LEVEL, processor

    places = CURRENT.places
    if places.writable is None:
        raise ConfigError(
            f"compiled kernels cannot be saved: {'; '.join(places.refusals)}; set --kernel-cache "
            f"(or {KERNEL_CACHE}) to a writable directory"
        )
    kept = list(Path(places.writable).rglob("*.nbc"))
    num_new = sum(each.stat().st_mtime >= started for each in kept)
    print(
        f"{num_new} kernels compiled in {time.time() - started:.1f} s; {places.writable} has "
        f"{len(kept)}, for {LEVEL} on {processor()}"
    )
    return 0


def _compute(engine: LLMEngine, params: SamplingParams | PoolingParams) -> None:
    longest = engine.session.inputs.max_model_len - NUM_TOKENS
    for name, length in enumerate(LENGTHS):
        ids = [1] * max(1, min(length, longest))
        engine.add_request(str(name), {"prompt_token_ids": ids}, params)
    while engine.has_unfinished_requests():
        engine.step()

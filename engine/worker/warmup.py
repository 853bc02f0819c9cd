"""Gets everything ready before the first request arrives: kernels, and a few tokens computed."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from functools import partial

import numpy as np
import torch

from engine.config.model import ModelInfo
from engine.messages.params import SamplingParams
from engine.messages.step import EMPTY, Column, NewSeq, StepPlan
from engine.models.assemble import activation_dtype
from engine.models.hf_config import heads
from engine.worker.memory import choose_kv_dtype
from engine.worker.roofline import Measured
from engine.worker.runner import Driver, Runner
from kernels.cpu.prepare import AttentionKind, prepare

logger = logging.getLogger("engine.worker")

NUM_PROMPT, NUM_DECODES = 4, 2
NUM_TIMES = 2  # where steps are recorded as they come: the second of a kind is, if it can be
WORTH_SAYING = 2.0  # seconds
LARGEST_SECONDS = 0.5  # that a start may take longer, so that the first prompts need not wait


def prepare_kernels(info: ModelInfo, dtype: torch.dtype, kv_dtype: str) -> None:
    """Load the kernels of a model on the CPU in a thread, while its weights are read.

    kv_dtype: ``kv_cache_dtype`` as asked for.
    """
    found, kind = heads(info.hf), None
    if found is not None:
        computed_in = activation_dtype(dtype, "cpu")
        cache = choose_kv_dtype(kv_dtype, computed_in, "cpu")
        kind = AttentionKind(*found, (computed_in.itemsize, cache.itemsize))
    prepared = partial(prepare, dtype, kind, logger.info)
    threading.Thread(target=prepared, name="prepare-kernels").start()


def warm_up(driver: Driver, num_blocks: int) -> float:
    """Run a prompt and some decodes: kernels are compiled and loaded before the first request.

    Returns seconds; the KV written is zeroed. Failures are ignored here: requests will report them.
    """
    machine = driver.runner.machine
    block_size = machine.slots.block_size
    longest = min(machine.live.tokens.shape[1] - 1, (num_blocks - 1) * block_size)
    num_prompt = min(NUM_PROMPT, longest - NUM_DECODES, machine.batches.max_num_tokens)
    if num_prompt < 1:
        return 0.0
    started = time.perf_counter()
    params = SamplingParams(temperature=1.0, max_tokens=NUM_DECODES + 1, ignore_eos=True)
    seq = NewSeq("warm-up", 0, [0] * num_prompt, num_prompt, params, 0, [], [])
    for _ in range(1 if machine.recorder is None else NUM_TIMES):
        driver.execute(_plan(0, num_prompt, block_size, new=[seq]))
        for position in range(num_prompt, num_prompt + NUM_DECODES):
            driver.execute(_plan(position, 1, block_size))
        driver.execute(_plan(0, 0, block_size, freed=[0]))
    for layer in machine.kv:
        layer[: 1 + -(-(num_prompt + NUM_DECODES) // block_size)] = 0
    seconds = time.perf_counter() - started
    if seconds > WORTH_SAYING:
        logger.info("kernels compiled in %.0f s; the next start finds them", seconds)
    return seconds


def meet_largest(
    driver: Driver, max_num_tokens: int, max_num_seqs: int, max_model_len: int
) -> None:
    """Run a step as large as there can be, on a CPU, where it is a quick one: what it takes of
    memory for the first time costs a fault a page, a tenth of a second of the first prompts.

    Failures are ignored here, too."""
    if driver.roofline is None:
        return
    num_seqs = min(-(-max_num_tokens // max_model_len), max_num_seqs)
    count = min(max_num_tokens // num_seqs, max_model_len)
    counts = np.full(num_seqs, count, dtype=np.int32)
    step = Measured(0.0, counts, counts * 0, counts * 0 + 1)
    if driver.roofline.floor([step]) < LARGEST_SECONDS:
        with suppress(Exception):
            driver.runner.profile_run(int(counts.sum()), num_seqs)


def _plan(
    start: int,
    count: int,
    block_size: int,
    *,
    new: list[NewSeq] | None = None,
    freed: list[int] | None = None,
) -> StepPlan:
    """A step of slot 0, whose table is blocks 1, 2, 3, ... in order."""
    one = np.ones(min(count, 1), dtype=np.int32)
    indices: Column = np.arange(-(-(start + count) // block_size), dtype=np.int32)
    if not count:
        indices = EMPTY
    return StepPlan(
        step=0,
        rows=np.zeros(len(one), dtype=np.intp),
        slots=one * 0,
        generations=one,
        starts=one * start,
        counts=one * count,
        samples=one,
        new=new or [],
        block_slots=indices * 0,
        block_indices=indices,
        block_ids=indices + 1,
        freed_slots=freed or [],
        num_tokens=count,
        proposals=one * 2,  # a draft model has a first pass and further ones
    )


CHUNKS = (1, 2, 4, 8, 16, 32, 64, 128)  # tokens; launch settings differ only up to the longest


def meet_shapes(runner: Runner, max_num_tokens: int, max_model_len: int) -> None:
    """Run a chunk of every kind of length, at the beginning and behind a long context. Otherwise
    kernels are compiled while a request waits for them."""
    longest = min(max_num_tokens, max_model_len)
    for num_tokens in CHUNKS:
        if num_tokens <= longest:
            for context in {0, max_model_len - num_tokens}:
                runner.profile_run(num_tokens, 1, context)

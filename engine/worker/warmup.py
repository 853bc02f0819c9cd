"""Warm-up before the first request: compiles and loads kernels, and runs a few steps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from engine.config.model import ModelConfig, ModelInfo
from engine.gguf.link import gguf_file
from engine.messages.params import SamplingParams
from engine.messages.step import EMPTY, Column, DraftPart, MaskPart, Masks, NewSeq, StepPlan
from engine.models.assemble import activation_dtype, compute_dtype
from engine.models.encoder_families import encoder_family
from engine.models.hf_config import heads
from engine.sample.edits import WORD
from engine.worker.memory import choose_kv_dtype, tensors_of
from engine.worker.roofline import Measured
from engine.worker.runner import Driver, Runner
from kernels.cpu.prepare import AttentionKind, prepare
from kernels.tuning import MAX_PREFILL_ROWS

logger = logging.getLogger("engine.worker")

NUM_PROMPT, NUM_DECODES = 4, 2
NUM_TIMES = 2  # a CPU recorder records a kind of step when it occurs the second time
LONG_STEP_SECONDS = 0.05  # of steps that take longer, Python's overhead is too small to record them
SLOW_SECONDS = 2.0  # a longer warm-up is logged
PROGRESS_SECONDS = 5.0  # between two log lines on the progress of compilation
FEW_KEYS = 512  # split-KV attention makes few parts of them
MANY_KEYS = 16_384  # split into parts in any batch; more keys would only take longer
PLAIN = SamplingParams(temperature=1.0, max_tokens=NUM_DECODES + 1, ignore_eos=True)
EVERYTHING = SamplingParams(
    temperature=1.0,
    top_k=2,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    allowed_token_ids=[0, 1],
    logit_bias={1: 1.0},
    min_tokens=1,
    logprobs=1,
    prompt_logprobs=1,
    max_tokens=NUM_DECODES + 1,
    ignore_eos=True,
)
KERNELS_THREAD = "prepare-kernels"
LARGEST_SECONDS = 0.5  # the largest step is run at start only if it takes less


def prepare_kernels(info: ModelInfo, model: ModelConfig, kv_dtype: str, num_ranks: int = 1) -> None:
    """Load the CPU kernels of a model in a thread while its weights are read. ``kv_dtype``: the
    option ``kv_cache_dtype``; ``num_ranks``: that compute the model together."""
    dtype = compute_dtype(model, info, "cpu")
    found, kind = heads(info.hf, num_ranks), None
    if found is not None:
        computed_in = activation_dtype(dtype, "cpu")
        cache = choose_kv_dtype(kv_dtype, computed_in, "cpu")
        kind = AttentionKind(*found, (computed_in.itemsize, cache.itemsize))
    is_quantized = gguf_file(info.path) is not None and model.quantize_activations
    has_blocks = is_quantized and dtype is torch.bfloat16
    is_encoder = encoder_family(info.architecture) is not None
    prepared = partial(
        prepare, dtype, kind, logger.info, has_blocks=has_blocks, is_encoder=is_encoder
    )
    threading.Thread(target=prepared, name=KERNELS_THREAD).start()


def wait_for_kernels() -> None:
    """Block until threads of ``prepare_kernels`` have compiled and stored all kernels, also those
    that the first requests do not use."""
    for thread in threading.enumerate():
        if thread.name == KERNELS_THREAD:
            thread.join()


def warm_up(driver: Driver, num_blocks: int, agree: Callable[[bool], bool] = bool) -> float:
    """Run a prompt and some decodes, so that kernels are compiled and loaded before the first
    request. Returns the seconds that this took.

    agree: whether all ranks say so, of something that is measured. Afterwards the KV blocks that
    were used are zeroed. Errors are ignored, as requests will report them."""
    machine = driver.runner.machine
    block_size = machine.slots.block_size
    longest = min(machine.live.tokens.shape[1] - 1, (num_blocks - 1) * block_size)
    num_prompt = min(NUM_PROMPT, longest - NUM_DECODES, machine.batches.max_num_tokens)
    if num_prompt < 1:
        return 0.0
    started = time.perf_counter()
    seq = NewSeq("warm-up", 0, [0] * num_prompt, num_prompt, PLAIN, 0, [], [])
    for _ in range(1 if machine.recorder is None else NUM_TIMES):
        driver.execute(_plan(0, num_prompt, block_size, new=[seq]))
        for position in range(num_prompt, num_prompt + NUM_DECODES):
            began = time.perf_counter()
            driver.execute(_plan(position, 1, block_size))
        is_long = time.perf_counter() - began > LONG_STEP_SECONDS
        driver.execute(_plan(0, 0, block_size, freed=[0]))
        if agree(is_long):
            break
    if machine.platform.compiles and driver.runner.samples:
        _run_all_edits(driver, num_prompt)
    for layer in tensors_of(machine.kv):
        layer[: 1 + -(-(num_prompt + NUM_DECODES) // block_size)] = 0
    seconds = time.perf_counter() - started
    if seconds > SLOW_SECONDS:
        logger.info(
            "the first steps took %.0f s; if they compiled kernels, the next start finds them",
            seconds,
        )
    return seconds


def _run_all_edits(driver: Driver, num_prompt: int) -> None:
    """Run a request that uses all kinds of logit edits, first with a grammar mask, then with
    drafts, so that the kernels of edits are compiled and their tables allocated."""
    machine = driver.runner.machine
    block_size = machine.slots.block_size
    seq = NewSeq("warm-up", 0, [0] * num_prompt, num_prompt, EVERYTHING, 0, [0], [[0], [0, 0]])
    first = _plan(0, num_prompt, block_size, new=[seq])
    first.masks = MaskPart(np.zeros(1, dtype=np.int32))
    num_words = -(-machine.model.vocab_size // WORD)
    pending = driver.launch(first)
    driver.sample(pending, Masks(np.full(num_words, -1, dtype=np.int32), num_words))
    driver.collect(pending)
    num_drafts, num_copies = NUM_DECODES - 1, machine.slots.state.num_copies
    has_copies = num_copies == 0 or num_copies - 2 >= num_drafts  # of recurrent states
    # Otherwise no step has room for a draft.
    if machine.batches.max_num_tokens >= NUM_DECODES and has_copies:
        verify = _plan(num_prompt, NUM_DECODES, block_size)
        verify.drafts = DraftPart(
            np.full(1, num_drafts, dtype=np.int32), np.zeros(num_drafts, dtype=np.int32)
        )
        driver.execute(verify)
    driver.execute(_plan(0, 0, block_size, freed=[0]))


def run_largest_step(
    driver: Driver,
    max_num_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    agree: Callable[[bool], bool] = bool,
) -> None:
    """Run the largest possible step on a CPU, if it takes less than ``LARGEST_SECONDS``, to fault
    in its memory. Otherwise page faults would slow the first prompts by 0.1 s. Failures are
    ignored. agree: as in ``warm_up``."""
    num_seqs = min(-(-max_num_tokens // max_model_len), max_num_seqs)
    count = min(max_num_tokens // num_seqs, max_model_len)
    counts = np.full(num_seqs, count, dtype=np.int32)
    step, is_short = Measured(0.0, counts, counts * 0, counts * 0 + 1), False
    with suppress(Exception):
        if driver.roofline is not None:
            is_short = driver.roofline.floor([step]) < LARGEST_SECONDS
    if agree(is_short):
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
    """Make a plan with one sequence, in slot 0 with block table 1, 2, 3, ...: it computes ``count``
    tokens from position ``start`` on, or has no rows if ``count`` is 0."""
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
        proposals=one * 2,  # so that a draft model runs its first and a later pass
    )


def run_all_kinds(runner: Runner, max_num_tokens: int, max_model_len: int) -> None:
    """Run a step of every kind, so that no kernel is compiled while a request waits. Failures are
    raised: such a step could never be computed."""
    reported = started = time.perf_counter()
    max_num_seqs = len(runner.machine.slots.state.num_computed)
    kinds = kinds_of_steps(max_num_tokens, max_num_seqs, max_model_len)
    for done, kind in enumerate(kinds):
        runner.profile_run(*kind)
        now = time.perf_counter()
        if now - reported > PROGRESS_SECONDS:
            reported = now
            logger.info(
                "compiling kernels: %d of %d kinds of steps, %.0f s",
                *(done + 1, len(kinds), now - started),
            )


class StepKind(NamedTuple):
    """A class of steps that launch the same kernels, given by the number of tokens, the number of
    sequences that share them, and the number of earlier tokens of each sequence."""

    num_tokens: int
    num_seqs: int
    context: int


def kinds_of_steps(max_num_tokens: int, max_num_seqs: int, max_model_len: int) -> list[StepKind]:
    """Return kinds of steps that together launch every variant of the kernels.

    Variants depend on the number of tokens, the query rows of a prompt chunk, and the number of
    parts into which the keys of sequences are split."""
    most = min(max_num_tokens, max_model_len)
    powers = [1 << bit for bit in range(max_num_tokens.bit_length())]
    rows = [1 << bit for bit in range(MAX_PREFILL_ROWS.bit_length())]
    firsts = {held // group + 1 for held in rows for group in range(1, MAX_PREFILL_ROWS + 1)}
    lengths = sorted(n for n in firsts.union(power for power in powers) if n <= most)
    kinds = []
    for length in lengths:
        contexts = (0, FEW_KEYS - length, max_model_len - length)
        kinds += [StepKind(length, 1, c) for c in contexts if 0 <= c <= max_model_len - length]
    for num_seqs in powers[1:]:
        if num_seqs <= max_num_seqs:
            most_held = (0, FEW_KEYS - 1, MANY_KEYS - 1, max_model_len - 1)
            fitting = [c for c in most_held if c < min(max_model_len, MANY_KEYS)]
            kinds += [StepKind(num_seqs, num_seqs, context) for context in fitting]
    shared = [power for power in powers if power > most] + [max_num_tokens]
    for num_tokens in shared:
        num_seqs = -(-num_tokens // max_model_len)
        if num_seqs <= max_num_seqs:
            kinds.append(StepKind(num_tokens, num_seqs, 0))
    return list(dict.fromkeys(kinds))

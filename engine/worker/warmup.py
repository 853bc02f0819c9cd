"""Gets everything ready before the first request arrives: kernels, and a few tokens computed."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from engine.config.model import ModelInfo
from engine.messages.params import SamplingParams
from engine.messages.step import EMPTY, Column, DraftPart, MaskPart, Masks, NewSeq, StepPlan
from engine.models.assemble import activation_dtype
from engine.models.hf_config import heads
from engine.sample.edits import WORD
from engine.worker.memory import choose_kv_dtype
from engine.worker.roofline import Measured
from engine.worker.runner import Driver, Runner
from kernels.cpu.prepare import AttentionKind, prepare
from kernels.tuning import MAX_PREFILL_ROWS

logger = logging.getLogger("engine.worker")

NUM_PROMPT, NUM_DECODES = 4, 2
NUM_TIMES = 2  # where steps are recorded as they come: the second of a kind is, if it can be
WORTH_SAYING = 2.0  # seconds
SECONDS_TO_TELL = 5.0  # between two words on how far compiling has come
FEW_KEYS = 512  # of which a split makes few parts
MANY_KEYS = 16_384  # that are split in any batch; more would only take longer
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
LARGEST_SECONDS = 0.5  # that a start may take longer, so that the first prompts need not wait


def prepare_kernels(info: ModelInfo, dtype: torch.dtype, kv_dtype: str) -> None:
    """Load the kernels of a model on the CPU in a thread, while its weights are read.

    kv_dtype: ``kv_cache_dtype`` as requested.
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
    seq = NewSeq("warm-up", 0, [0] * num_prompt, num_prompt, PLAIN, 0, [], [])
    for _ in range(1 if machine.recorder is None else NUM_TIMES):
        driver.execute(_plan(0, num_prompt, block_size, new=[seq]))
        for position in range(num_prompt, num_prompt + NUM_DECODES):
            driver.execute(_plan(position, 1, block_size))
        driver.execute(_plan(0, 0, block_size, freed=[0]))
    if machine.platform.compiles:
        _meet_edits(driver, num_prompt)
    for layer in machine.kv:
        layer[: 1 + -(-(num_prompt + NUM_DECODES) // block_size)] = 0
    seconds = time.perf_counter() - started
    if seconds > WORTH_SAYING:
        logger.info("kernels compiled in %.0f s; the next start finds them", seconds)
    return seconds


def _meet_edits(driver: Driver, num_prompt: int) -> None:
    """A request that asks for everything that is done with logits, with a mask, then with drafts.
    What edits them is compiled so, and its tables are made."""
    machine = driver.runner.machine
    block_size = machine.slots.block_size
    seq = NewSeq("warm-up", 0, [0] * num_prompt, num_prompt, EVERYTHING, 0, [0], [[0], [0, 0]])
    first = _plan(0, num_prompt, block_size, new=[seq])
    first.masks = MaskPart(np.zeros(1, dtype=np.int32))
    num_words = -(-machine.model.vocab_size // WORD)
    pending = driver.launch(first)
    driver.sample(pending, Masks(np.full(num_words, -1, dtype=np.int32), num_words))
    driver.collect(pending)
    if machine.batches.max_num_tokens >= NUM_DECODES:  # else no step has room for a draft
        verify = _plan(num_prompt, NUM_DECODES, block_size)
        num_drafts = NUM_DECODES - 1
        verify.drafts = DraftPart(
            np.full(1, num_drafts, dtype=np.int32), np.zeros(num_drafts, dtype=np.int32)
        )
        driver.execute(verify)
    driver.execute(_plan(0, 0, block_size, freed=[0]))


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
    with suppress(Exception):
        if driver.roofline.floor([step]) < LARGEST_SECONDS:
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


def meet_shapes(runner: Runner, max_num_tokens: int, max_model_len: int) -> None:
    """Run a step of every kind that there can be. Otherwise kernels are compiled while a request
    waits for them. Failures are not ignored: such a step could not be computed."""
    reported = started = time.perf_counter()
    max_num_seqs = len(runner.machine.slots.state.num_computed)
    kinds = kinds_of_steps(max_num_tokens, max_num_seqs, max_model_len)
    for done, kind in enumerate(kinds):
        runner.profile_run(*kind)
        now = time.perf_counter()
        if now - reported > SECONDS_TO_TELL:
            reported = now
            logger.info(
                "compiling kernels: %d of %d kinds of steps, %.0f s",
                *(done + 1, len(kinds), now - started),
            )


class StepKind(NamedTuple):
    """Steps that launch the same kernels: tokens, sequences that share them, tokens before."""

    num_tokens: int
    num_seqs: int
    context: int


def kinds_of_steps(max_num_tokens: int, max_num_seqs: int, max_model_len: int) -> list[StepKind]:
    """One step for every kernel that a step may launch call by call, whatever the model's heads.

    Kernels differ by the power of two that holds a chunk's rows (tokens times query heads of a key
    head), by what the tokens alone come to (experts, quantised products), and by whether the keys
    are split, into few parts or many: by the number of sequences and how long they are.
    """
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

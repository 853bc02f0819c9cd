"""Measures the whole engine on random weights: steps, one request alone, 256 of mixed lengths."""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from shapes import Shape, model_directory

from engine import LLM, SamplingParams
from gpu.box import Box, Ceilings, Row, Rows, share

MAX_MODEL_LEN = 2560


class Load(NamedTuple):
    """A request: its prompt and the number of tokens to generate."""

    prompt: list[int]
    num_new: int


def headline(
    count: int = 256, shortest: int = 100, longest: int = 1024, highest: int = 10000
) -> list[Load]:
    """Input and output uniform in 100 to 1024, seed 0: 133,966 output tokens, as published.

    The order of the dice is that of the script of nano-vllm and mini-SGLang. highest: token id.
    """
    dice = random.Random(0)
    prompts = [
        [dice.randint(0, highest) for _ in range(dice.randint(shortest, longest))]
        for _ in range(count)
    ]
    return [Load(prompt, dice.randint(shortest, longest)) for prompt in prompts]


def step_floor(shape: Shape, num_seqs: int, num_keys: int, most: Ceilings) -> float:
    """Seconds of a step of decodes over this many keys in all, in 16 bits."""
    weights = max(2 * shape.num_read / most.bytes, 2 * shape.num_read * num_seqs / most.operations)
    attention = 4 * shape.heads * shape.head_dim * shape.layers * num_keys
    return weights + max(num_keys * shape.kv_bytes(2) / most.bytes, attention / most.operations)


def floor_of(shape: Shape, loads: Sequence[Load], most: Ceilings) -> float:
    """Seconds of all these requests, begun at once: their prompts, then step after step."""
    lengths = [len(load.prompt) for load in loads]
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    head = shape.vocab * shape.hidden  # of the last token alone
    operations = 2 * (shape.num_read - head) * sum(lengths)
    operations += 4 * pairs * shape.heads * shape.head_dim * shape.layers
    seconds = operations / most.operations
    for step in range(1, max(load.num_new for load in loads)):
        running = [len(load.prompt) + step for load in loads if load.num_new > step]
        seconds += step_floor(shape, len(running), sum(running), most)
    return seconds


@contextmanager
def engine_of(box: Box, shape: Shape, **options: object) -> Iterator[LLM]:
    """An engine on random weights, whose memory is freed at the end."""
    with model_directory(shape, 4096) as root, engine_at(box, root, **options) as llm:
        yield llm


@contextmanager
def engine_at(box: Box, root: str, **options: object) -> Iterator[LLM]:
    """An engine on random weights for the config.json in this directory, whose memory is freed at
    the end."""
    dry = {"dtype": "float32", "num_kv_blocks": 12, "max_num_seqs": 4, "max_model_len": 64}
    dry |= {"max_num_batched_tokens": 32, "block_size": 16, "cudagraph_capture_sizes": [1, 3]}
    real = {"dtype": "bfloat16", "max_num_seqs": 256, "max_model_len": MAX_MODEL_LEN}
    given = {"load_format": "dummy", "device": "cuda", "skip_tokenizer_init": True}
    given |= {"disable_log_stats": True, "enable_prefix_caching": False}
    llm = LLM(root, **{**given, **(dry if box.is_dry else real), **options})
    try:
        yield llm
    finally:
        llm.shutdown()
        del llm
        gc.collect()
        box.clear()


def run(llm: LLM, loads: Sequence[Load], temperature: float = 0.0) -> list[tuple[float, int]]:
    """(time, tokens so far) after every step."""
    total, done = 0, {}
    for index, load in enumerate(loads):
        params = SamplingParams(
            temperature=temperature, max_tokens=load.num_new, ignore_eos=True, detokenize=False
        )
        llm.llm_engine.add_request(str(index), load.prompt, params)
    marks = [(time.perf_counter(), 0)]
    while llm.llm_engine.has_unfinished_requests():
        for out in llm.llm_engine.step():
            count = len(out.outputs[0].token_ids)
            total += count - done.get(out.request_id, 0)
            done[out.request_id] = count
        marks.append((time.perf_counter(), total))
    wanted = sum(load.num_new for load in loads)
    if total != wanted:
        raise ValueError(f"{total} tokens came instead of {wanted}")
    return marks


def decode_seconds(marks: Sequence[tuple[float, int]], num_seqs: int) -> float:
    """The median time of the steps in which each sequence got a token."""
    gaps = [
        after[0] - before[0]
        for before, after in itertools.pairwise(marks)
        if after[1] - before[1] == num_seqs
    ]
    return statistics.median(gaps[2:-2] or gaps)


def prompt_of(length: int, index: int) -> list[int]:
    """Random token ids, the same for each index."""
    return random.Random(index).choices(range(3, 500), k=length)


def _row(what: str, requests: int, seconds: float, num_tokens: int, floor: float = 0.0) -> Row:
    row = {"what": what, "requests": requests, "ms": 1e3 * seconds, "tok/s": num_tokens / seconds}
    return {**row, "floor ms": 1e3 * floor, "%": share(floor, seconds)} if floor else row


def _steps(box: Box, llm: LLM, shape: Shape, label: str) -> Rows:
    """Milliseconds of a step of decodes, scheduling and all."""
    for num in box.sizes((1, 64, 256), (2,)):
        length, num_new = (5, 3) if box.is_dry else (1024, 48)
        loads = [Load(prompt_of(length, index), num_new) for index in range(num)]
        taken = decode_seconds(run(llm, loads), num)
        floor = step_floor(shape, num, num * (length + num_new // 2), box.ceilings)
        yield _row(f"step, {label}", num, taken, num, floor)


def _alone(box: Box, llm: LLM, shape: Shape) -> Row:
    length, num_new = (5, 3) if box.is_dry else (128, 256)
    run(llm, [Load(prompt_of(length, 0), num_new)])
    taken = decode_seconds(run(llm, [Load(prompt_of(length, 1), num_new)]), 1)
    floor = step_floor(shape, 1, length + num_new // 2, box.ceilings)
    return _row("one request alone", 1, taken, 1, floor)


def _headline(box: Box, llm: LLM, shape: Shape) -> Row:
    loads = headline(3, 2, 4, 500) if box.is_dry else headline()
    marks = run(llm, loads, temperature=0.6)
    taken, floor = marks[-1][0] - marks[0][0], floor_of(shape, loads, box.ceilings)
    num = sum(load.num_new for load in loads)
    row = _row("256 of 100 to 1024, seed 0", len(loads), taken, num, floor)
    return {**row, "steps": len(marks) - 1}


def _arrivals(box: Box, llm: LLM, label: str) -> Row:
    """Steps with a prompt in each: one request of 64 tokens arrives a step, and 64 decode."""
    length, num_new, count = (5, 3, 5) if box.is_dry else (64, 64, 192)
    engine, gaps = llm.llm_engine, []
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    for index in range(count):
        engine.add_request(str(index), prompt_of(length, index), params)
        before = time.perf_counter()
        engine.step()
        gaps.append(time.perf_counter() - before)
    while engine.has_unfinished_requests():
        engine.step()
    taken = statistics.median(gaps[num_new + 1 :] or gaps)
    return _row(f"a prompt of {length} each step, {label}", num_new, taken, num_new)


def of_model(name: str, box: Box) -> Rows:
    """Start-up, one request alone, the headline, steps; then steps without graphs."""
    shape = box.shapes()[name]
    began = time.perf_counter()
    with engine_of(box, shape) as llm:
        yield {"what": "start", "requests": 0, "ms": 1e3 * (time.perf_counter() - began)}
        yield _alone(box, llm, shape)
        yield _headline(box, llm, shape)
        yield from _steps(box, llm, shape, "graphs")
        yield _arrivals(box, llm, "graphs")
    with engine_of(box, shape, enforce_eager=True) as llm:
        yield from _steps(box, llm, shape, "call by call")
        yield _arrivals(box, llm, "call by call")
